"""Graphs are used where they gain, and only there; the program's numbers never show that."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pygraph
from pygraph import runtime
from pygraph.partition import selector, timed_calls
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Sample, Timing

_TRIAL = 20  # calls after which every trial is over: two before it, nine of each variant


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Selection as users have it, with caches of the test's own."""
    monkeypatch.setenv("PYGRAPH_SELECT", "auto")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


# Host and GPU seconds per call, by variant: what a trial is told, whatever the machine's load is.
_HOST_IS_THE_LIMIT = {UNCAPTURED: (3e-4, 5e-5), REPLAYED: (1e-5, 5e-5)}
_GPU_IS_THE_LIMIT = {UNCAPTURED: (1e-5, 1e-3), REPLAYED: (1e-5, 1e-3)}


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """The times that samples show, which the test may change. Calls are made and timed all the same."""
    shown = dict(_HOST_IS_THE_LIMIT)
    make_call = timed_calls.timed_call

    def timed_call(
        host: Any, entry: Any, variant: str, args: list[Any], sleep: float
    ) -> tuple[Any, Sample | None]:
        outputs, sample = make_call(host, entry, variant, args, sleep)
        if sample is None:
            return outputs, None
        on_host, on_gpu = shown[variant]
        is_of_gpu = sample.device is not None
        return outputs, (
            Sample(on_host, device=on_gpu) if is_of_gpu else Sample(on_host, latency=on_host + on_gpu)
        )

    monkeypatch.setattr(selector, "timed_call", timed_call)
    return shown


class Small(nn.Module):
    """Many small kernels: the host is the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Large(nn.Module):
    """Two large kernels: the GPU is the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8192, 8192) / 90)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) @ self.weight


def _compiled(module: nn.Module, **options: object) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    module = module.cuda().eval()
    return module, torch.compile(module, backend="pygraph", options=options or None)


def _calls(model: Callable[..., torch.Tensor], x: torch.Tensor, count: int = _TRIAL) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(count):
            result = model(x)
    return result


def test_a_graph_is_used_where_the_host_is_the_limit() -> None:
    module, model = _compiled(Small())
    x = torch.randn(8, 64, device="cuda")
    _calls(model, x)
    (graph,) = pygraph.stats()
    assert graph.state == "captured"
    assert graph.timings[REPLAYED].period < graph.timings[UNCAPTURED].period
    replays = graph.replays
    torch.testing.assert_close(_calls(model, x, 3), module(x))
    assert pygraph.stats()[0].replays == replays + 3


def test_no_graph_is_kept_where_the_gpu_is_the_limit(times: dict[str, tuple[float, float]]) -> None:
    times |= _GPU_IS_THE_LIMIT
    module, model = _compiled(Large())
    x = torch.randn(512, 8192, device="cuda")
    result = _calls(model, x)
    (graph,) = pygraph.stats()
    assert graph.state == "not selected"
    assert "gains nothing" in graph.reason
    assert graph.nodes == 0
    torch.testing.assert_close(result, module(x))
    torch.testing.assert_close(_calls(model, x, 2), result)


def test_every_call_of_a_trial_gives_the_uncaptured_numbers() -> None:
    """Dropout, a buffer that is updated, gradients: equal to Inductor's, call by call."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
            self.norm = nn.BatchNorm1d(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.dropout(self.norm(self.first(x)).relu(), 0.5, True)).sum()

    def train(backend: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(7)
        module = Noisy().cuda()
        model = torch.compile(module, backend=backend)
        seen = []
        for step in range(_TRIAL + 4):
            x = torch.randn(32, 64, device="cuda")
            module.zero_grad()
            loss = model(x)
            loss.backward()
            seen.append(loss.detach())
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
            seen += [buffer.clone() for buffer in module.buffers()]
            if step == 5 and backend == "pygraph":
                assert any(graph.state == "measuring" for graph in pygraph.stats())
        return seen

    for ours, theirs in zip(train("pygraph"), train("inductor"), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not any(graph.state == "measuring" for graph in pygraph.stats())


@pytest.mark.parametrize("module", [Small, Large])
def test_a_decision_is_remembered_on_disk(
    module: type[nn.Module], times: dict[str, tuple[float, float]]
) -> None:
    times |= _GPU_IS_THE_LIMIT if module is Large else {}
    x = torch.randn(64 if module is Small else 8192, 64 if module is Small else 8192, device="cuda")
    _, model = _compiled(module())
    _calls(model, x)
    (first,) = pygraph.stats()
    torch._dynamo.reset()
    runtime.partitions.clear()
    _, model = _compiled(module())
    _calls(model, x, 3)
    (second,) = pygraph.stats()
    assert second.state == first.state
    assert second.timings == first.timings
    assert first.state == ("captured" if module is Small else "not selected")
    if first.state == "captured":
        assert second.replays == 2  # the one that verified, and the third call
    else:
        assert second.capture_seconds == 0


class Wide(nn.Module):
    """Products that do not need each other's results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.relu(layer(x)) for layer in self.layers])


@pytest.mark.parametrize("branches", [False, True])
def test_what_is_kept_of_a_graph_shortens_the_next_verification(tmp_path: Path, branches: bool) -> None:
    x = torch.randn(8, 64, device="cuda")
    _, model = _compiled(Wide())
    _calls(model, x)
    (path,) = (tmp_path / "pygraph").glob("v*/*.json")
    data = json.loads(path.read_text())
    assert data["suspects"] == [] and data["branches"] == (pygraph.stats()[0].lanes > 1)
    path.write_text(json.dumps({**data, "suspects": [0, 7], "branches": branches}))
    torch._dynamo.reset()
    runtime.partitions.clear()
    module, model = _compiled(Wide())
    torch.testing.assert_close(_calls(model, x, 3), module(x))
    (graph,) = pygraph.stats()
    assert graph.state == "captured"
    assert (graph.lanes > 1) == branches
    # Those of the quick check (three of branches), three of the thorough one, and the third call.
    assert graph.replays == (3 if branches else 1) + 3 + 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_a_broken_decision_is_made_anew(tmp_path: Path, content: bytes) -> None:
    x = torch.randn(8, 64, device="cuda")
    _, model = _compiled(Small())
    _calls(model, x)
    (path,) = (tmp_path / "pygraph").glob("v*/*.json")  # digests lie beside them
    path.write_bytes(content)
    torch._dynamo.reset()
    runtime.partitions.clear()
    _, model = _compiled(Small())
    _calls(model, x, 3)
    assert pygraph.stats()[0].state == "measuring"


def test_the_option_overrides_the_measurement() -> None:
    x = torch.randn(8192, 8192, device="cuda")
    _, model = _compiled(Large(), **{"pygraph.select": "always"})
    _calls(model, x, 3)
    assert pygraph.stats()[0].state == "captured"
    torch._dynamo.reset()
    runtime.partitions.clear()
    module, model = _compiled(Small(), **{"pygraph.select": "never"})
    x = torch.randn(8, 64, device="cuda")
    torch.testing.assert_close(_calls(model, x, 5), module(x))
    (graph,) = pygraph.stats()
    assert (graph.state, graph.replays) == ("not selected", 0)
    with pytest.raises(Exception, match=r"pygraph\.select"):
        _calls(_compiled(Small(), **{"pygraph.select": "sometimes"})[1], x, 1)


def test_a_graph_whose_time_changed_is_decided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "_CALLS_PER_RECHECK", 5)
    module, model = _compiled(Small())
    x = torch.randn(8, 64, device="cuda")
    _calls(model, x)
    (entry,) = (e for p in runtime.partitions for e in p.entries.values())
    assert entry.selection.decision is not None
    timings = dict(entry.selection.decision.timings)
    old = timings[REPLAYED]
    timings[REPLAYED] = Timing(old.host * 9, old.device * 9, old.latency * 9, old.noise, old.memory)
    entry.selection.decision = Decision(REPLAYED, timings)
    states = set()
    for _ in range(60):
        torch.testing.assert_close(_calls(model, x, 1), module(x))
        states.add(pygraph.stats()[0].state)
    assert states == {"captured", "measuring"}
    assert pygraph.stats()[0].timings[REPLAYED].device < old.device * 5  # not 9 any more


def test_an_uncaptured_decision_whose_time_changed_is_recorded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selector, "_CALLS_PER_RECHECK", 5)
    timing = Timing(1.0, 1.0, 1.0, 0.0, 0)
    stale = [Decision(UNCAPTURED, {UNCAPTURED: timing, REPLAYED: timing})]
    monkeypatch.setattr(decision_cache, "load", lambda key: stale[0] if stale else None)
    monkeypatch.setattr(decision_cache, "forget", lambda key: stale.clear())
    module, model = _compiled(Small())
    x = torch.randn(8, 64, device="cuda")
    _calls(model, x, 4)
    assert pygraph.stats()[0].state == "not selected"
    torch.testing.assert_close(_calls(model, x, 60), module(x))
    assert pygraph.stats()[0].state in ("captured", "measuring")


def test_marking_steps_is_harmless() -> None:
    module, model = _compiled(Small())
    x = torch.randn(8, 64, device="cuda")
    results = []
    for _ in range(_TRIAL):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(_calls(model, x, 1))
    for result in results:
        torch.testing.assert_close(result, module(x))
    assert pygraph.stats()[0].state == "captured"


def test_further_shapes_need_no_trial_after_graphs_have_won() -> None:
    module, model = _compiled(Small())
    for rows in (8, 16, 24, 32):  # the first is a program of its own, with static shapes
        _calls(model, torch.randn(rows, 64, device="cuda"), 40)
    x = torch.randn(40, 64, device="cuda")
    torch.testing.assert_close(_calls(model, x, 3), module(x))
    assert "measuring" not in {graph.state for graph in pygraph.stats()}


def test_a_trial_needs_the_memory_of_one_result() -> None:
    """What a call needs besides comes from other pieces of memory than its result's last one."""
    model = torch.compile(lambda x: x.cumsum(0).repeat(8, 1) + 1, backend="pygraph")
    x = torch.randn(1 << 12, 1 << 12, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    taken = []
    with torch.no_grad():
        while len(taken) < _TRIAL or "measuring" in {graph.state for graph in pygraph.stats()}:
            model(x)
            taken.append(torch.cuda.memory_reserved())
            assert len(taken) < 10 * _TRIAL
    (graph,) = pygraph.stats()
    assert graph.state in ("captured", "not selected") and graph.timings
    assert max(taken) - before < 1.5 * 8 * x.nbytes


def test_a_look_is_due_after_so_many_calls_whatever_shortcuts_they_tried() -> None:
    engine = runtime.engine()
    partition = engine.graphed_callable(lambda args: ("uncaptured",), lambda args: ("look",), 0)
    engine.add_uncaptured_decision(partition, [5], 9)
    way = ([0], [(True, 0, None)], [])
    inner = engine.whole_graph_callable(partition, lambda args: partition(args), True, 1, *way)
    outer = engine.whole_graph_callable(partition, lambda *args: inner(list(args)), False, 1, *way)
    assert [outer(5)[0] for _ in range(11)] == ["uncaptured"] * 9 + ["look"] * 2
