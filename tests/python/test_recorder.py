"""What is left of a recording that fails or is interrupted, wherever that happens."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from pygraph import runtime
from pygraph.gpu import current
from pygraph.record import memory_pools, owned_memory, recorder, stream_capture
from pygraph.record.stream_capture import StreamCapture, check_abandoned, check_interrupted

from .fake_engine import FakeGraph

_DEVICE = 0


class World:
    """A GPU whose captures fail where it is told."""

    def __init__(self, fails_at: str, error: BaseException) -> None:
        self._fails_at = fails_at
        self._error = error
        self.is_begun = self.is_routed = self.is_capturing = False
        self.are_workspaces_aside = False
        self.uses = 0  # of the recording's pool
        self.released = 0  # times that the pool was, by its owner
        self.held: list[tuple[int, int]] = []
        self.others_use_a_pool = self.others_capture = False
        self.offset = 12  # of the default generator

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self) -> None:
        if self.others_capture:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += 4

    def step(self, name: str) -> None:
        if name == self._fails_at:
            self._fails_at = ""
            raise self._error

    def end_allocate(self, device: int, pool: tuple[int, int]) -> None:
        if not self.is_routed:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_routed = False

    def release_pool(self, device: int, pool: tuple[int, int]) -> None:
        assert self.uses > 0
        self.uses -= 1


class Pool:
    id = (0, 5)

    def __init__(self, world: World) -> None:
        self._world = world
        world.uses = 1

    def use_count(self) -> int:
        return self._world.uses


class Pair:
    def __init__(self, world: World) -> None:
        self._world = world

    def stand_ins(self, index: int) -> list[Any]:
        self._world.step("stand_ins")
        return []

    def begin(self, index: int, stream: int) -> None:
        self._world.is_begun = self._world.are_workspaces_aside = True
        self._world.step("begin")

    def end(self) -> None:
        self._world.is_begun = False

    def put_back_workspaces(self) -> None:
        self._world.are_workspaces_aside = False

    def is_recorded(self, tensor: Any) -> bool:
        return True

    def finish(self, *args: object) -> None:
        self._world.step("finish")


class Graph:
    """As PyTorch 2.11's."""

    def __init__(self, world: World, is_the_one: bool) -> None:
        self._world = world
        self._is_the_one = is_the_one
        self._has_ended = False

    def register_generator_state(self, generator: object) -> None:
        if self._is_the_one:
            self._world.step("register")

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        if not self._is_the_one:
            return
        self._world.step("generators")
        self._world.is_routed = True
        self._world.uses += 1
        self._world.step("capture_begin")
        self._world.is_capturing = True

    def capture_end(self) -> None:
        if not self._is_the_one:
            return
        if not self._world.is_capturing:
            raise RuntimeError("illegal state")
        self._world.is_capturing = False
        self._world.step("capture_end")
        self._world.is_routed = False
        self._has_ended = True

    def raw_cuda_graph(self) -> int:
        self._world.step("raw")
        return 0

    def reset(self) -> None:
        if self._has_ended:
            # From PyTorch 2.12 on, this frees the workspaces of the stream.
            assert self._world.are_workspaces_aside
            self._world.uses -= 1
            self._has_ended = False


class _Drawn:
    """A tensor of random numbers; slices of it are, too."""

    def __getitem__(self, place: slice) -> _Drawn:
        return self

    def uniform_(self, generator: Any) -> None:
        if isinstance(generator, World):
            generator.draw()


def _world(monkeypatch: pytest.MonkeyPatch, fails_at: str, error: BaseException) -> World:
    world = World(fails_at, error)
    made: list[Graph] = []

    def graph(keep_graph: bool = False) -> Graph:
        made.append(Graph(world, is_the_one=not made))
        return made[-1]

    def release(pool: Pool) -> None:
        world.release_pool(_DEVICE, pool.id)
        world.released += 1

    def still_held(pool: Pool) -> list[Any]:
        world.step("still_held")
        return world.held

    monkeypatch.setattr(stream_capture, "_REGISTERS_GENERATORS", True)  # as of PyTorch 2.11
    monkeypatch.setattr(stream_capture, "_quieten_libraries", lambda undo: None)
    monkeypatch.setattr(stream_capture, "side_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(current, "use_stream", lambda stream, undo: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", world.end_allocate, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", world.release_pool, raising=False)
    monkeypatch.setattr(torch, "empty", lambda *size, device: _Drawn())
    monkeypatch.setattr(memory_pools, "make", lambda: Pool(world))
    monkeypatch.setattr(memory_pools, "release", release)
    monkeypatch.setattr(memory_pools, "free", lambda: None)
    monkeypatch.setattr(memory_pools, "are_in_use", lambda: world.others_use_a_pool)
    monkeypatch.setattr(torch.cuda, "default_generators", (world,))
    monkeypatch.setattr(owned_memory, "still_held", still_held)
    return world


def _capture(function: Any, world: World, sources: list[int], generators: list[Any]) -> None:
    pair: Any = Pair(world)
    StreamCapture(function, pair, 0, _DEVICE, sources, generators).make()


_PLACES = ["stand_ins", "register", "begin", "generators", "capture_begin", "function", "capture_end"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", [*_PLACES, "raw", "finish", "still_held"])
def test_wherever_a_recording_fails_everything_is_as_before(
    monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    world = _world(monkeypatch, place, error)

    def function(args: list[Any]) -> list[Any]:
        world.step("function")
        return []

    generator: Any = SimpleNamespace()
    with pytest.raises(type(error)) as raised:
        _capture(function, world, [0], [generator])
    assert raised.value is error  # it tells whether a later call may be recorded
    assert not (world.is_begun or world.is_routed or world.is_capturing or world.are_workspaces_aside)
    check_abandoned()
    check_interrupted()
    assert (world.uses, world.released) == (0, 1)
    assert stream_capture._abandoned == stream_capture._interrupted == []


def _late(number: int, frame: Any) -> NoReturn:
    raise TimeoutError


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, _late)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("place", ["capture_end", "still_held"])
def test_what_a_signals_handler_raises_in_the_clean_up_comes_after_it(
    monkeypatch: pytest.MonkeyPatch, handled: None, place: str
) -> None:
    world = _world(monkeypatch, "", RuntimeError())
    places = [place]

    def step(name: str) -> None:
        if name in places:
            places.clear()
            signal.raise_signal(signal.SIGUSR1)

    def function(args: list[Any]) -> list[Any]:
        raise RuntimeError("it cannot be captured")

    monkeypatch.setattr(world, "step", step)
    raised = []
    for do in (lambda: _capture(function, world, [0], [SimpleNamespace()]), check_abandoned):
        try:
            do()
        except Exception as error:
            raised.append(type(error))
    assert raised[-1] is TimeoutError
    assert not (world.is_begun or world.is_routed or world.is_capturing or world.are_workspaces_aside)
    assert (world.uses, world.released) == (0, 1)
    assert stream_capture._abandoned == []


def test_no_recording_begins_while_the_program_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before PyTorch 2.15 it would set the program's random numbers back."""
    world = _world(monkeypatch, "", RuntimeError())
    recorded: list[int] = []
    generator: Any = SimpleNamespace()

    def function(args: list[Any]) -> list[Any]:
        recorded.append(len(recorded))
        return []

    def capture() -> None:
        _capture(function, world, [0], [generator])

    world.others_use_a_pool = world.others_capture = True
    with pytest.raises(runtime.OthersDraw, match="captures a graph of its own"):
        capture()
    assert (recorded, world.is_begun, world.is_routed, world.offset) == ([], False, False, 12)
    world.others_capture = False  # a pool alone does not matter
    capture()
    assert (recorded, world.offset) == ([0], 12)
    assert not world.are_workspaces_aside
    world.others_capture = True
    monkeypatch.setattr(stream_capture, "_REGISTERS_GENERATORS", False)  # from PyTorch 2.15 on
    capture()
    assert recorded == [0, 1]


def test_what_an_interrupt_has_left_is_looked_at_before_the_next_recordings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody handles an interrupt here, and what is left holds the call's arguments. The traceback may
    be held until another is shown."""
    world = _world(monkeypatch, "function", KeyboardInterrupt())

    def function(args: list[Any]) -> list[Any]:
        world.step("function")
        return []

    with pytest.raises(KeyboardInterrupt):
        _capture(function, world, [], [])

    def next_pair(*args: object) -> None:
        raise RuntimeError("as far as this test goes")

    def record() -> None:
        with pytest.raises(RuntimeError, match="as far"):
            recorder.record(recorder.Request(function, [], device=_DEVICE))

    monkeypatch.setattr(current, "use_device", lambda index, undo: None)
    monkeypatch.setattr(runtime, "engine", lambda: SimpleNamespace(RecordingPair=next_pair))
    world.held = [(4096, 512)]
    record()
    check_abandoned()
    assert world.released == 0
    world.held = []
    record()
    assert world.released == 1
    assert stream_capture._interrupted == []


class LinkedPair(Pair):
    """A pair that has both recordings, and may not be linked."""

    def __init__(self, world: World, links: bool) -> None:
        super().__init__(world)
        self._links = links
        self.finished: list[int] = []

    def finish(self, index: int, *rest: object) -> None:
        self.finished.append(index)

    def may_write(self) -> list[int]:
        return self.finished.copy()

    def returned(self) -> list[int]:
        return [1]

    def set_surroundings(self, held: list[torch.Tensor], cached: object) -> None: ...

    def link(self, sharing: list[int], gradients: list[int], given: list[Any], lanes: int) -> FakeGraph:
        assert (sharing, gradients, [group.positions for group in given]) == ([0, 1], [], [[0]])
        if not self._links:
            raise NotRelocatable("the two recordings differ")
        return FakeGraph(lanes=lanes)


class NotRelocatable(RuntimeError):
    """The engine's."""


@pytest.mark.parametrize("links", [True, False])
def test_what_is_written_is_known_even_if_the_recordings_cannot_be_linked(
    monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    world = _world(monkeypatch, "", RuntimeError())
    pair = LinkedPair(world, links)
    engine = SimpleNamespace(RecordingPair=lambda args, device, capacity: pair)
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(current, "use_device", lambda index, undo: None)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    group: Any = SimpleNamespace(positions=[0])
    request = recorder.Request(
        lambda args: [1, 2], [3, 4], device=_DEVICE, given_away=[group], lanes=4, written={7}
    )
    if links:
        recording = recorder.record(request)
        assert (recording.given_away, recording.returned) == (frozenset({0}), frozenset({1}))
        assert recording.branched is not None
        assert (recording.graph.lanes, recording.branched.lanes) == (1, 4)
        recording.use(recording.branched)
        assert (recording.graph.lanes, recording.branched) == (4, None)
    else:
        with pytest.raises(NotRelocatable):
            recorder.record(request)
    assert pair.finished == [0, 1]
    assert request.written == {7, 0, 1}


def test_operators_that_the_first_recording_defines_are_reported_in_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function may import them at its first use. Operators that an unreported one calls would
    count as PyTorch's own."""
    world = _world(monkeypatch, "", RuntimeError())
    pair = LinkedPair(world, links=True)
    engine = SimpleNamespace(RecordingPair=lambda args, device, capacity: pair)
    monkeypatch.setattr(runtime, "engine", lambda: engine)
    monkeypatch.setattr(current, "use_device", lambda index, undo: None)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    are_direct: list[bool] = []

    def function(args: list[Any]) -> list[Any]:
        if not are_direct:
            torch.library.custom_op(
                "pygraph_test::late", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor"
            )
        are_direct.append(_is_direct())
        return [1, 2]

    def _is_direct() -> bool:
        return bool(getattr(torch.ops.pygraph_test.late.default, "_pyobj_dispatcher", None))

    group: Any = SimpleNamespace(positions=[0])
    recorder.record(recorder.Request(function, [3, 4], device=_DEVICE, given_away=[group]))
    assert len(are_direct) == 2 and not are_direct[1]
    assert _is_direct() == are_direct[0]
