"""Fixtures of the tests that need no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo import eval_frame

from pygraph import runtime, torch_patches
from pygraph.callables import serving
from pygraph.gpu import current
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.torch_patches import selection, state

from . import gradient_world, graphed_world, graphs_on_the_cpu
from .compiled_programs import Backend, OurBackend
from .graphed_world import Replaying, partitions_of
from .graphs_on_the_cpu import CpuGraphs
from .selector_world import World


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact patches are wanted, also where the suite runs with none."""
    monkeypatch.setenv(selection.VARIABLE, selection.EXACT)
    torch_patches.install()


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if no patch had been applied in this process so far. Those that were are applied again."""
    torch._dynamo.reset()
    for name in ("_asked_for", "_used", "_failures", "_tried"):
        monkeypatch.setattr(state, name, type(getattr(state, name))())
    monkeypatch.setattr(state, "_is_logged", False)
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[OurBackend, Backend], ids=["ours", "pytorch's"])
def backend(request: pytest.FixtureRequest, patched: None) -> Iterator[Backend]:
    """One whose programs are called by the engine, one whose programs PyTorch calls."""
    torch._dynamo.reset()
    yield request.param()
    assert eval_frame.set_eval_frame(None) is None
    assert not torch._C._dynamo.eval_frame.set_skip_guard_eval_unsafe(False)
    eval_frame._in_optimized_module = False  # threads may leave another value; PyTorch's too


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    """Those of graphed callables, on the CPU."""
    yield from partitions_of(lambda: graphed_world.install(monkeypatch))


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine makes no call of a graphed callable by itself: for errors within Python's calls."""
    never = ({}, "a name that is not there", 0)
    make = lambda: runtime.engine().served_calls(serving.inside, runtime._own, [never], None)  # noqa: E731
    monkeypatch.setattr(serving, "served_calls", make)


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    """Partitions of callables inside of differentiated programs, on the CPU."""
    yield from partitions_of(lambda: gradient_world.install(monkeypatch))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CpuGraphs]:
    """Partitions of compiled programs, on the CPU, with caches of their own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield graphs_on_the_cpu.install(monkeypatch)
    torch._dynamo.reset()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Partition without a GPU. After how many calls the engine is to ask again, for each time that it
    is told to run a signature uncaptured."""
    told: list[int] = []
    real = runtime.engine()
    engine = SimpleNamespace(
        graphed_callable=real.graphed_callable,
        clear_decisions=real.clear_decisions,
        signature=lambda args, device: b"key",
        wait=real.wait,
        waiting_seconds=real.waiting_seconds,
        clear_waiting=real.clear_waiting,
        free_blas_workspaces=lambda: None,
        drop_blocks=lambda device: None,
        add_uncaptured_decision=lambda callable, args, calls: told.append(calls),
        clear_uncaptured_decisions=real.clear_uncaptured_decisions,
        add_graph=lambda callable, graph, most, calls: [],
    )
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(current, "use_device", lambda index, undo: None)
    monkeypatch.setattr(ObservedEffects, "watched_call", lambda self, args, run: (run(args), ""))
    return told
