"""Which layout of a graph is used, and what is said of kernels: the parts that need no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import fingerprints
from pygraph.record.kernel_access import accesses_of, letters_of
from pygraph.record.recorder import Recording, link_branched
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Sample, Timing
from pygraph.verify import branches, verify
from pygraph.verify import rehearsal as rehearsal_module
from pygraph.verify.rehearsal import Rehearsal

from .fake_engine import FakeGraph, StandIns, Writing

_MIB = 1 << 20


def _timer(*seconds: float) -> tuple[Callable[[], float], list[float]]:
    """Returns the times by turns, for ever; and a list that grows with each."""
    calls: list[float] = []

    def replay() -> float:
        calls.append(seconds[len(calls) % len(seconds)])
        return calls[-1]

    return replay, calls


def test_branches_are_used_where_they_gain() -> None:
    chain, _ = _timer(1.00e-3, 1.05e-3)
    assert branches.is_faster(chain, _timer(0.95e-3, 1.2e-3)[0])
    assert not branches.is_faster(chain, _timer(0.99e-3)[0])  # not enough to be told from noise
    assert not branches.is_faster(chain, _timer(1.1e-3)[0])


def test_what_is_slower_or_takes_long_is_replayed_less_often() -> None:
    def replays(chain: float, branched: float) -> int:
        replay, calls = _timer(branched)
        branches.is_faster(_timer(chain)[0], replay)
        return len(calls)

    assert replays(1e-3, 2e-3) < replays(1e-3, 0.5e-3)
    assert replays(0.1, 0.05) < replays(1e-3, 0.5e-3)


def test_branches_may_need_some_more_memory_but_not_much() -> None:
    def graph(workspace: int, blocks: int = 0) -> FakeGraph:
        return FakeGraph(workspace_bytes=workspace * _MIB, block_bytes=blocks * _MIB)

    assert branches.is_worth_its_memory(graph(36), graph(60))
    assert not branches.is_worth_its_memory(graph(36), graph(36, blocks=200))
    assert branches.is_worth_its_memory(graph(800, blocks=200), graph(1100))
    assert not branches.is_worth_its_memory(graph(800, blocks=200), graph(1200))


_TYPES = {"in_out_ptr0": "*fp32", "in_ptr0": "*fp32", "in_ptr1": "*i64", "n": "i32", "X": "constexpr"}
_NAMES = ["in_out_ptr0", "in_ptr0", "in_ptr1", "n"]


def test_the_names_of_parameters_tell_what_becomes_of_them() -> None:
    assert letters_of(_NAMES, _TYPES, {}) == "wrr-"
    assert letters_of(_NAMES, _TYPES, {"mutated_arg_names": ["in_ptr1", "in_out_ptr0"]}) == "wrw-"


@pytest.mark.parametrize("name", ["arg_A", "x_ptr", "sem_ptr", "in_ptr"])
def test_nothing_is_said_of_a_kernel_with_other_names(name: str) -> None:
    assert letters_of([*_NAMES, name], {**_TYPES, name: "*fp32"}, {}) is None


def test_nothing_is_said_of_a_kernel_that_takes_a_descriptor_of_a_tensor() -> None:
    types = {**_TYPES, "in_desc0": "tensordesc<fp32[64, 64]>"}
    assert letters_of([*_NAMES, "in_desc0"], types, {}) is None


def _kernel(static: bool, user: bool = False) -> Any:
    """What Inductor puts into a generated module for a kernel at address 4096."""
    from torch._inductor.runtime.hints import HeuristicType
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    class Compiled:
        function = 4096
        arg_names = (*_NAMES, "X")
        full_constexprs = (4,)

        def run(self) -> None: ...

    scope = {"runner": Compiled().run} if static else {"function": 4096}
    exec("def launcher(): ...", scope)
    launcher: Any = scope["launcher"]
    launcher._is_static = static
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    kernel.launchers = [launcher]
    kernel.triton_meta = {"signature": _TYPES}
    kernel.inductor_meta = {}
    kernel.heuristic_type = HeuristicType.USER_AUTOTUNE if user else HeuristicType.POINTWISE
    return kernel


@pytest.mark.parametrize("static", [False, True])
def test_the_kernels_of_a_program_are_found_beside_its_function(static: bool) -> None:
    scope = {"triton_poi_0": _kernel(static), "other": 1}
    exec("def partition_0(args): ...", scope)
    assert accesses_of(scope["partition_0"]) == {4096: "wrr-"}  # type: ignore[arg-type]
    assert accesses_of(max) == {}


def test_nothing_is_said_of_a_kernel_without_an_address_of_its_own() -> None:
    kernel = _kernel(static=True)
    kernel.launchers[0].__globals__["runner"].__self__.function = None
    scope = {"triton_poi_0": kernel}
    exec("def partition_0(args): ...", scope)
    assert accesses_of(scope["partition_0"]) == {}  # type: ignore[arg-type]


def test_nothing_is_said_of_the_users_kernels() -> None:
    scope = {"triton_poi_0": _kernel(static=True, user=True)}
    exec("def partition_0(args): ...", scope)
    assert accesses_of(scope["partition_0"]) == {}  # type: ignore[arg-type]


class _Graph(FakeGraph):
    """A layout of a graph that adds something, in so many seconds."""

    def __init__(self, addend: int, seconds: float, **members: Any) -> None:
        super().__init__(self._add, **members)
        self.addend = addend
        self.seconds = seconds

    def _add(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [args[0] + self.addend]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that takes the seconds that a graph says."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=int))
    monkeypatch.setattr(Rehearsal, "_results", lambda self, outputs, args: list(outputs))
    monkeypatch.setattr(Rehearsal, "timer", lambda self, graph: lambda: graph.seconds)
    monkeypatch.setattr(verify, "disturb", lambda seconds: _Atomic.disturb())
    monkeypatch.setattr(verify, "wait_for_loads", lambda: None)


def _quick_check(
    chain: FakeGraph,
    branched: FakeGraph,
    uncaptured: FakeGraph | None = None,
    kept: Decision | None = None,
    pair: StandIns | None = None,
) -> tuple[verify.Verification, Recording]:
    """uncaptured: what the function itself does; it adds one unless given. kept: of an earlier
    process. pair: the memory that was recorded with."""
    itself = uncaptured or _Graph(1, 1.0)
    recording = Recording(chain, pair or StandIns(), [], branched=branched)
    args = [torch.arange(4)]
    rehearsal = Rehearsal(lambda args: itself.replay(args, True), args, recording, frozenset())
    return verify.quick_check(rehearsal, kept), recording


def test_the_faster_layout_of_a_graph_is_kept(gpu: None) -> None:
    for seconds, is_kept in ((0.5, True), (2.0, False)):
        chain, branched = _Graph(1, 1.0), _Graph(1, seconds)
        result, recording = _quick_check(chain, branched)
        assert not result.failure
        assert not result.suspects
        kept, dropped = (branched, chain) if is_kept else (chain, branched)
        assert recording.graph is kept
        assert recording.branched is None
        assert dropped.released == 1


_TIMING = Timing(host=1e-3, device=1e-3, latency=1e-3, noise=0.0, memory=0)
_BRANCHED = Decision(REPLAYED, {UNCAPTURED: _TIMING, REPLAYED: _TIMING}, branches=True)


def test_branches_that_were_faster_in_an_earlier_process_are_not_timed(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(Rehearsal, "timer", lambda self, graph: timed.append(graph))
    branched = _Graph(1, 2.0)
    _, recording = _quick_check(_Graph(1, 1.0), branched, kept=_BRANCHED)
    assert recording.graph is branched
    assert branched.replays == 3  # compared as ever
    assert timed == []


def test_an_earlier_process_says_nothing_of_the_results_of_branches(gpu: None) -> None:
    chain = _Graph(1, 1.0)
    result, recording = _quick_check(chain, _Graph(2, 0.5), kept=_BRANCHED)
    assert not result.failure
    assert recording.graph is chain


def test_small_results_need_no_fingerprints(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels are loaded at their first launch, which takes longer than the comparison."""

    def compute(*of: object) -> None:
        raise AssertionError("a fingerprint")

    monkeypatch.setattr(fingerprints.Fingerprints, "add", compute)
    branched = _Graph(1, 0.5)
    result, recording = _quick_check(_Graph(1, 1.0), branched)
    assert (result.failure, list(result.suspects)) == ("", [])
    assert recording.graph is branched


class _Chancy(_Graph):
    """A layout of which one result is another one each time, and one the same."""

    def _add(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor([self.replays + 100 * self.addend]), torch.tensor([self.addend])]


def test_results_that_are_left_to_chance_say_nothing_of_branches(gpu: None) -> None:
    for addend, is_kept in ((1, True), (2, False)):
        chain, branched = _Chancy(1, 1.0), _Chancy(addend, 0.5)
        _, recording = _quick_check(chain, branched, uncaptured=_Chancy(1, 1.0))
        assert recording.graph is (branched if is_kept else chain)


class _Atomic(_Graph):
    """Of two results one is added up in another order beside other work, or beside other kernels of
    the graph."""

    is_disturbed = False

    @classmethod
    def disturb(cls) -> None:
        cls.is_disturbed = True

    def _add(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        order = self.addend if not _Atomic.is_disturbed else 10
        _Atomic.is_disturbed = False
        return [torch.tensor([order]), torch.tensor([self.addend % 10])]


def test_what_differs_in_a_chain_beside_other_work_may_differ_with_branches(gpu: None) -> None:
    for addend, is_kept in ((11, True), (12, False)):
        chain, branched = _Atomic(1, 1.0), _Atomic(addend, 0.5)
        result, recording = _quick_check(chain, branched, uncaptured=_Atomic(1, 1.0))
        assert not result.failure
        assert recording.graph is (branched if is_kept else chain)


def test_a_layout_with_other_results_is_dropped_and_the_chain_used(gpu: None) -> None:
    chain = _Graph(1, 1.0)
    result, recording = _quick_check(chain, _Graph(2, 0.5))
    assert not result.failure
    assert recording.graph is chain


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_only_branches_write_is_not_the_chains_mistake(gpu: None, number: int) -> None:
    """Nor where the chain is checked thoroughly afterwards."""
    chain, pair = FakeGraph(), StandIns()
    kept = dataclasses.replace(_BRANCHED, suspects=(0,))
    result, recording = _quick_check(chain, Writing(pair, number), kept=kept, pair=pair)
    assert not result.failure
    assert recording.graph is chain
    assert chain.replays == 2 + 3  # the quick check's, and the thorough one's
    assert pair.checks == 3


class _Failing(_Graph):
    """A layout that cannot be replayed a second time, as where memory is short."""

    def _add(self, args: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.replays > 1:
            raise torch.OutOfMemoryError("no memory")
        return super()._add(args)


def test_a_choice_that_fails_leaves_the_chain(gpu: None) -> None:
    for chain, branched in ((_Graph(1, 1.0), _Failing(1, 0.5)), (_Failing(1, 1.0), _Graph(1, 0.5))):
        result, recording = _quick_check(chain, branched)
        assert not result.failure
        assert not result.suspects
        assert recording.graph is chain


def test_a_branched_layout_is_checked_several_times(gpu: None) -> None:
    branched = _Graph(1, 0.5, donated=[0])
    _, recording = _quick_check(_Graph(1, 1.0), branched)
    assert recording.graph is branched
    assert branched.gave_away == [True] * 3


def test_a_graph_that_cannot_be_branched_is_a_chain() -> None:
    def link(error: bool, lanes: int) -> Any:
        if error:
            raise runtime.engine().DriverError("graph_add_dependencies failed")
        return FakeGraph(lanes=lanes)

    def branched(error: bool, found: int, lanes: int = 8) -> Any:
        return link_branched(lambda lanes: link(error, found), lanes)

    assert branched(False, 3).lanes == 3
    assert branched(False, 1) is None
    assert branched(True, 3) is None
    assert branched(True, 3, lanes=1) is None


def test_a_timed_replay_is_one_on_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(run: Callable[[], Any], sleep: float) -> tuple[Any, Sample]:
        assert sleep > 0
        return run(), Sample(host=1e-3, device=2e-3)

    monkeypatch.setattr(rehearsal_module, "timed", timed)
    graph = FakeGraph(lambda args: [args[0].add_(1)])
    args = [torch.zeros(4)]
    rehearsal = Rehearsal(lambda args: [], args, Recording(graph, StandIns(), []), frozenset({0}))
    assert rehearsal.timer(graph)() == 2e-3
    assert args[0].sum() == 0
