"""Operators that cannot be captured, and programs that are recompiled for them, without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import runtime, torch_patches, uncapturable
from pygraph.options import Options
from pygraph.partition.attempt import Attempt
from pygraph.partition.partition import Partition
from pygraph.partition.signature import Entry
from pygraph.report.classify import Kind, classify
from pygraph.torch_patches import selection
from pygraph.torch_patches.selection import ALL, EXACT, NONE
from pygraph.uncapturable import Compilation

from .compiled_programs import X
from .stand_ins import INFO


@pytest.fixture(autouse=True)
def nothing_found_yet() -> Iterator[None]:
    uncapturable._found.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    uncapturable._found.clear()


def _generated(folder: Path, line: str) -> Callable[[list[Any]], Any]:
    """A partition as Inductor writes it."""
    path = folder / "generated.py"
    path.write_text(f"def partition_0(args):\n    x, = args\n    {line}\n")
    names: dict[str, Any] = {"torch": torch}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names["partition_0"]  # type: ignore[no-any-return]


@pytest.fixture
def refusing_operator() -> Iterator[None]:
    """An operator that raises what it is called with."""
    with torch.library._scoped_library("pygraph_test", "DEF") as library:
        library.define("refuse(Tensor x, str why) -> Tensor")

        def refuse(x: torch.Tensor, why: str) -> torch.Tensor:
            raise RuntimeError(why)

        library.impl("refuse", refuse, "CompositeExplicitAutograd")
        yield


_NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        (
            "the two recordings differ: operator aten::_chunk_cat, node 0, a memcpy, "
            "uses other host memory",
            "aten::_chunk_cat",
        ),
        (
            "operator aten::_chunk_cat, node 3, a copy uses memory of the host that the graph does "
            "not hold",
            "aten::_chunk_cat",
        ),
        # From a tensor in pinned memory, which the program has.
        (
            "operator aten::copy_, node 1, a copy uses memory of the host that the graph does not hold",
            "",
        ),
        ("the two recordings differ: operator aten::add, node 0, a memcpy, has another extent", ""),
        ("the two recordings differ: operator my::add, node 0, a memcpy, uses other host memory", ""),
    ],
)
def test_an_operator_that_copies_from_its_own_host_memory_is_named(text: str, operator: str) -> None:
    assert uncapturable.operator_in(RuntimeError(text)) == operator


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        (f'torch.ops.pygraph_test.refuse.default(x, "{_NOT_PERMITTED}")', "pygraph_test::refuse"),
        # Which may be gone the next time.
        ('torch.ops.pygraph_test.refuse.default(x, "CUDNN_STATUS_NOT_INITIALIZED")', ""),
        # Of an operator before it.
        (
            'torch.ops.pygraph_test.refuse.default(x, "failed due to a previous error during capture")',
            "",
        ),
        ("x.no_such_method_for_captures()", ""),
    ],
)
def test_the_line_that_raised_tells_the_operator(
    tmp_path: Path, line: str, operator: str, refusing_operator: None
) -> None:
    with pytest.raises((RuntimeError, AttributeError)) as raised:
        _generated(tmp_path, f"return {line}")([X])
    assert uncapturable.operator_in(raised.value) == operator


def test_errors_from_elsewhere_tell_none() -> None:
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(_NOT_PERMITTED)
    assert uncapturable.operator_in(raised.value) == ""


class _Backend:
    """Runs graphs as they are; each compilation can be made anew."""

    def __init__(self, patches: str = NONE) -> None:
        self.patches = selection.parse("patches", patches)
        self.made: list[Compilation] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.made.append(Compilation(uncapturable.names()))
        self.made[-1].add_guard(gm)
        torch_patches.apply(gm, self.patches)
        return gm.forward


def _double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize("patches", [NONE, EXACT, ALL])
def test_a_program_is_compiled_anew_once(patches: str) -> None:
    backend = _Backend(patches)
    double = torch.compile(_double, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(double(X), X + X)
    (first,) = backend.made
    partition = Partition(lambda args: args, INFO, Options(), first)
    assert first.note_uncapturable("mylib::waits", "it waits") and first.note_uncapturable(
        "mylib::waits_too", "it waits"
    )
    for _ in range(3):
        assert torch.equal(double(X), X + X)
    _, second = backend.made
    assert second.cuts == {"mylib::waits", "mylib::waits_too"}
    assert partition not in runtime.partitions
    # What cuts already, and is in a graph all the same, is no reason to compile it again.
    assert not second.note_uncapturable("mylib::waits", "it waits")
    double(X)
    assert len(backend.made) == 2


def test_no_python_runs_for_the_guard_until_an_operator_is_found() -> None:
    backend = _Backend(selection.EXACT)  # without which another guard runs Python
    torch.compile(_double, backend=backend)(X)
    (entry,) = _debug_get_cache_entry_list(_double.__code__)
    (compilation,) = backend.made

    def python_calls() -> int:
        seen: list[str] = []
        sys.setprofile(lambda frame, event, _: seen.append(event))
        assert entry.guard_manager.root.check({"x": X}) is not compilation._is_expired
        sys.setprofile(None)
        return seen.count("call")

    assert python_calls() == 0
    assert compilation.note_uncapturable("mylib::waits", "it waits")
    assert python_calls() > 0


def test_a_program_that_was_dropped_leaves_no_global_behind() -> None:
    names = set(globals())
    torch.compile(_double, backend=_Backend())(X)
    assert any(name.startswith("__pygraph_program") for name in set(globals()) - names)
    torch._dynamo.reset()
    gc.collect()
    assert not any(name.startswith("__pygraph_program") for name in globals())


@contextlib.contextmanager
def _other_stance() -> Iterator[None]:
    torch.compiler.set_stance("fail_on_recompile")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize(
    "forbid",
    [
        lambda: torch._dynamo.config.patch(error_on_recompile=True),
        lambda: torch._dynamo.config.patch(recompile_limit=2),
        _other_stance,
    ],
)
@pytest.mark.parametrize("comes_later", [False, True])
def test_a_program_that_may_not_be_compiled_anew_is_not(
    forbid: Callable[[], contextlib.AbstractContextManager[None]], comes_later: bool
) -> None:
    backend = _Backend()
    double = torch.compile(_double, backend=backend)
    double(X)
    (compilation,) = backend.made
    if comes_later:
        assert compilation.note_uncapturable("mylib::waits", "it waits")
    with forbid():
        if not comes_later:
            assert not compilation.note_uncapturable("mylib::waits", "it waits")
        assert torch.equal(double(X), X + X)
    assert backend.made == [compilation]
    assert uncapturable.names() == ["mylib::waits"]  # for programs that are compiled later


def test_a_refusal_says_that_the_program_is_compiled_anew() -> None:
    compilation = Compilation([])
    partition = Partition(lambda args: args, INFO, Options(), compilation)
    attempt = Attempt([], failure="RuntimeError: capturing", operator="mylib::waits")
    entry = Entry()
    partition._pipeline.conclude(entry, attempt, 0.0, [])
    assert entry.reason == "RuntimeError: capturing"  # it has no guard
    compilation.has_guard = True
    compilation._code = _double.__code__
    entry = Entry()
    partition._pipeline.conclude(entry, attempt, 0.0, [])
    assert entry.reason.endswith("; recompiled, without mylib::waits in graphs")
    partition._pipeline.conclude(other := Entry(), dataclasses.replace(attempt, operator=""), 0.0, [])
    assert other.reason == "RuntimeError: capturing"


def test_explain_knows_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, device="meta")
    node = graph.call_function(torch.ops.aten.sort.default, (x,))
    node.meta["val"] = x.meta["val"]
    monkeypatch.setattr("pygraph.report.classify.is_on_gpu", lambda node: True)
    assert classify(node)[0] is Kind.GRAPH
    uncapturable._found["aten::sort"] = "it waits"
    kind, cut = classify(node)
    assert kind is Kind.GAP and cut is not None
    assert cut.reason == "aten::sort cannot be captured (it waits)"
