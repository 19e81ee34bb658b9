"""Records a compiled function twice and links the recordings to a captured graph.

Nothing executes on the GPU during a capture. stream_capture.py makes one recording; the engine's part
is ``bindings/record/recording_pair.h``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator, current
from pygraph.record import custom_operators, owned_memory
from pygraph.record.hidden_capture import HiddenCapture
from pygraph.record.stream_capture import StreamCapture, check_interrupted
from pygraph.runtime import log
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine

OUT_OF_MEMORY = "ran out of memory"  # the end of reasons that are retried later
DEFAULT_GENERATOR = -1  # as in bindings/replay/random_numbers.h


@dataclasses.dataclass(frozen=True)
class Request:
    """A function to record, for arguments like ``args``, which are not changed.

    device: the GPU's index.
    draws: whether the function uses the device's default generator.
    sharing: positions of outputs that may lie together in one block of memory, because they mostly live
        and die together (tensors saved for backward, gradients). None: all of them.
    sharing_from: all outputs from this position on may share blocks, too. None: no further ones.
    gradients: of a forward, bytes of each gradient that its backward will compute; what it saves is
        laid out for them (bindings/tensors/saved_blocks.h).
    given_away: arguments that nothing uses after the call (bindings/tensors/donation.h).
    capacity: bytes of addresses for each recording.
    lanes: the maximum number of nodes that may run at the same time.
    written: ``record`` adds the positions of arguments that the function may write, even if linking
        fails.
    hidden: hides the captures from the program; None if it gets to know of them when it asks.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    args: Sequence[Any]
    device: int
    draws: bool = False
    sharing: Sequence[int] | None = None
    sharing_from: int | None = None
    gradients: Sequence[int] = ()
    given_away: Sequence[_engine.GivenAway] = ()
    capacity: int = 1 << 36
    lanes: int = 1
    written: set[int] = dataclasses.field(default_factory=set)
    hidden: HiddenCapture | None = None


@dataclasses.dataclass
class Recording:
    """A captured graph.

    pair: its recordings, whose stand-in pages a correct graph does not use; None once they are gone.
    returned: positions of the arguments that are results, or of which results are views.
    branched: the same graph with branches, or None.
    """

    graph: _engine.CapturedGraph
    pair: _engine.RecordingPair | None
    generators: list[torch.Generator]  # that the graph advances
    given_away: frozenset[int] = frozenset()  # arguments that nothing uses after the call
    returned: frozenset[int] = frozenset()
    branched: _engine.CapturedGraph | None = None

    def use(self, graph: _engine.CapturedGraph) -> None:
        """Keeps one of the two layouts, and drops the other."""
        self.graph, self.branched = graph, None


def record(request: Request) -> Recording:
    """Records the function twice, and links the recordings.

    Raises the exceptions of the capture, NotRelocatable or DriverError; the process can go on.
    """
    check_interrupted()
    args, device = request.args, request.device
    sources = [DEFAULT_GENERATOR] if request.draws else []
    sources += [i for i, arg in enumerate(args) if isinstance(arg, torch.Generator)]
    generators = [generator_of(source, args, device) for source in sources]

    def body(undo: Undo) -> Recording:
        current.use_device(device, undo)
        unseen = frozenset(i for tensors in request.given_away for i in tensors.positions)
        pair = runtime.engine().RecordingPair(list(args), device, request.capacity)
        donated = list(request.given_away)
        count = 0
        for index in range(2):
            custom_operators.report_all(undo)  # the first recording may have defined some
            capture = StreamCapture(request.function, pair, index, device, sources, generators)
            count = undoing(functools.partial(_make, capture, request.hidden))
            request.written.update(pair.may_write())
        together = list(range(count) if request.sharing is None else request.sharing)
        if request.sharing_from is not None:
            together += range(request.sharing_from, count)
        pair.set_surroundings(owned_memory.held_tensors(request.function), owned_memory.cached_memory)
        link = functools.partial(pair.link, together, list(request.gradients), donated)
        graph = link(1)
        branched = link_branched(link, request.lanes)
        returned = frozenset(pair.returned())
        return Recording(graph, pair, generators, unseen, returned, branched)

    return undoing(body)


def generator_of(source: int, args: Sequence[Any], device: int) -> torch.Generator:
    """The generator of a source of random numbers: DEFAULT_GENERATOR, or an argument's position."""
    return torch.cuda.default_generators[device] if source == DEFAULT_GENERATOR else args[source]


def _make(capture: StreamCapture, hidden: HiddenCapture | None, undo: Undo) -> int:
    runtime.begin_capturing(undo)
    runtime.begin_recording(capture.index, undo)
    allocator.lift_limit(undo)  # PyTorch counts stand-ins as memory, although they use none
    if hidden is not None:
        hidden.begin(undo)
    return capture.make()


def link_branched(
    link: Callable[[int], _engine.CapturedGraph], lanes: int
) -> _engine.CapturedGraph | None:
    """The recorded graph with branches: up to ``lanes`` nodes may run at the same time.

    None if the nodes need the order of the chain, or the driver refuses. The chain is used then.
    """
    if lanes == 1:
        return None
    try:
        graph = link(lanes)
    except RuntimeError as error:
        log.info("a graph keeps the program's order: %s", describe_failure(error))
        return None
    return graph if graph.lanes > 1 else None


def describe_failure(error: BaseException) -> str:
    """The reason for a failed recording, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"recording {OUT_OF_MEMORY}"
    return f"{type(error).__name__}: {runtime.first_line(error)}"
