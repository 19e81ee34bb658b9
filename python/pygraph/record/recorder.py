"""Records a compiled function twice and links the recordings to a captured graph.

Nothing executes here, on the GPU: a capture only notes what would. See ``bindings/recording_pair.h``
for the engine's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.gpu.load import side_stream
from pygraph.record import memory_pools, owned_memory
from pygraph.record.kernel_access import accesses_of

log = logging.getLogger("pygraph")

_DEFAULT_GENERATOR = -1  # as in bindings/captured_graph.h


@dataclasses.dataclass
class Recording:
    """A captured graph, and the pair of recordings whose stand-ins verification still needs.

    returned: positions of the arguments that are results, or that results are views of.
    branched: the same graph, its nodes beside each other where they can be, or None.
    """

    graph: Any  # pygraph._engine.CapturedGraph
    pair: Any  # pygraph._engine.RecordingPair
    generators: list[torch.Generator]  # that the graph advances
    given_away: frozenset[int] = frozenset()  # arguments that nobody sees after the call
    returned: frozenset[int] = frozenset()
    branched: Any | None = None  # pygraph._engine.CapturedGraph


def record(
    function: Callable[[list[Any]], Sequence[Any]],
    args: Sequence[Any],
    device: int,
    *,
    draws: bool,
    sharing: Sequence[int] | None,
    given_away: Sequence[Any],
    capacity: int,
    lanes: int,
    written: set[int],
) -> Recording:
    """Records ``function`` for arguments like ``args``, which are not touched.

    draws: whether the function uses the device's default generator.
    sharing: positions of the outputs that may lie together in blocks of memory, because they mostly
    live and die together (tensors saved for backward, gradients). None: all of them.
    given_away: arguments that nobody sees after calls (the engine's GivenAway; bindings/donation.h).
    capacity: addresses for each recording, in bytes.
    lanes: how many nodes of a graph may run at a time.
    written: gets the positions of arguments that the function may write to, also where the recordings
    cannot be linked.
    Raises what the capture raises, NotRelocatable or DriverError; the process can go on.
    """
    _check_interrupted()
    sources = [_DEFAULT_GENERATOR] if draws else []
    sources += [i for i, arg in enumerate(args) if isinstance(arg, torch.Generator)]
    generators = [
        torch.cuda.default_generators[device] if source == _DEFAULT_GENERATOR else args[source]
        for source in sources
    ]
    with torch.cuda.device(device):
        unseen = frozenset(i for tensors in given_away for i in tensors.positions)
        pair = runtime.engine().RecordingPair(list(args), device, capacity)
        donated = list(given_away)
        count = 0
        for index in range(2):
            # Stand-ins count as memory, and take none.
            with runtime.capturing(), allocator.unlimited():
                count = _capture(function, pair, index, device, sources, generators)
            written.update(pair.may_write())
        together = list(range(count) if sharing is None else sharing)
        pair.surround(owned_memory.held_tensors(function), owned_memory.cached_memory)
        graph = pair.link(together, donated, 1)
        branched = link_branched(pair, together, donated, lanes)
        returned = frozenset(pair.returned())
        return Recording(graph, pair, generators, unseen, returned, branched)


def link_branched(pair: Any, together: list[int], given_away: list[Any], lanes: int) -> Any | None:
    """The recorded graph with as many of its nodes beside each other as can be, up to ``lanes``.

    None where that is one after the other, or the driver refuses: the chain does as well.
    """
    if lanes == 1:
        return None
    try:
        graph = pair.link(together, given_away, lanes)
    except RuntimeError as error:
        log.info("a graph keeps the program's order: %s", describe_failure(error))
        return None
    return graph if graph.lanes > 1 else None


OUT_OF_MEMORY = "ran out of memory"  # how reasons end that may be gone later


class PoolInUse(RuntimeError):
    """The capture's memory came from elsewhere, as it may where the thread allocates from a pool of the
    program's (torch.cuda.use_mem_pool). A later call may be recorded."""


def describe_failure(error: BaseException) -> str:
    """The reason a recording failed, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"recording {OUT_OF_MEMORY}"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _capture(
    function: Callable[[list[Any]], Sequence[Any]],
    pair: Any,
    index: int,
    device: int,
    sources: list[int],
    generators: list[torch.Generator],
) -> int:
    """Makes one of the recordings; returns the number of outputs."""
    pool = memory_pools.make()
    try:
        count = _capture_into(pool, function, pair, index, device, sources, generators)
        holder = _keep_held(pair, index, pool)
    except Exception:
        _abandoned.append((pair, index, pool))
        raise
    except BaseException:
        _interrupted.append((pair, index, pool))
        raise
    if holder:
        raise runtime.engine().NotRelocatable(f"{holder} keeps memory that it allocates in a recording")
    return count


def _capture_into(
    pool: torch.cuda.MemPool,
    function: Callable[[list[Any]], Sequence[Any]],
    pair: Any,
    index: int,
    device: int,
    sources: list[int],
    generators: list[torch.Generator],
) -> int:
    """Nothing refers to the pool's memory afterwards but what somebody has kept, or an exception."""
    stand_ins = pair.stand_ins(index)
    stream = side_stream(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    returned: Sequence[Any] | None = None
    sentinels: list[torch.Tensor] | None = None
    with torch.cuda.stream(stream), _quiet_libraries():
        try:
            for generator in generators:
                graph.register_generator_state(generator)
            pair.begin(index, stream.cuda_stream)
            graph.capture_begin(
                pool=pool.id,  # type: ignore[arg-type]
                capture_error_mode="thread_local",
            )
            if not pair.is_recorded(torch.empty(1, device=f"cuda:{device}")):
                raise PoolInUse("the call's memory comes from a torch.cuda.MemPool of the program's")
            returned = function(stand_ins)
            # One random kernel more per generator: it tells the engine what the graph has drawn.
            sentinels = [
                torch.empty(1, device=f"cuda:{device}").uniform_(generator=generator)
                for generator in generators
            ]
            pair.end()
            graph.capture_end()
        except BaseException:
            pair.end()
            _abandon_capture(graph, pool, device, generators)
            raise
    try:
        pair.finish(index, graph.raw_cuda_graph(), returned, sources, accesses_of(function))
        return len(returned)
    finally:
        del returned, sentinels
        graph.reset()


def _keep_held(pair: Any, index: int, pool: torch.cuda.MemPool) -> str:
    """Ends the use of a recording's pool. What somebody still holds of its memory becomes valid for
    good; says who allocated that."""
    pieces = owned_memory.still_held(pool)
    if pieces:
        return pair.keep(index, pieces)  # type: ignore[no-any-return]
    memory_pools.release(pool)
    memory_pools.free()
    return ""


_Left = tuple[Any, int, torch.cuda.MemPool]  # the pair, which recording of it, its pool
_abandoned: list[_Left] = []  # of recordings that raised
_interrupted: list[_Left] = []  # of those that a KeyboardInterrupt or the like has ended


def check_abandoned() -> None:
    """To be called when the error of a recording is gone, which held what the recording had."""
    while _abandoned:
        try:
            _keep_held(*_abandoned.pop())
        except Exception:
            log.warning("what a recording has left could not be looked at", exc_info=True)


def _check_interrupted() -> None:
    """Before a recording. An interpreter that shows an interrupt holds its traceback, and all that was
    local there, until it shows another error: that is not to become valid for good."""
    for left in _interrupted.copy():
        pair, index, pool = left
        with runtime.harmless("looking at an interrupted recording"):
            if not owned_memory.still_held(pool):
                _interrupted.remove(left)
                _keep_held(pair, index, pool)


def make_handles() -> None:
    """Makes what cuBLAS keeps for each thread from its first use on, and cannot make in a capture. Not
    for programs that do without: it takes 70 MiB."""
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """No cache emptied, no finalizer run while capturing."""
    empties_cache = torch._C._cuda_get_conv_benchmark_empty_cache()
    collects = gc.isenabled()
    torch._C._cudnn_set_conv_benchmark_empty_cache(False)
    gc.disable()
    try:
        yield
    finally:
        torch._C._cudnn_set_conv_benchmark_empty_cache(empties_cache)
        if collects:
            gc.enable()


def _abandon_capture(
    graph: torch.cuda.CUDAGraph,
    pool: torch.cuda.MemPool,
    device: int,
    generators: list[torch.Generator],
) -> None:
    """Brings stream, allocator and generators back after a capture that failed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "the CUDA graph is empty"
            graph.capture_end()
    except Exception:
        # PyTorch 2.11 leaves the allocator routed to the pool and generators in capture mode.
        with contextlib.suppress(RuntimeError):  # the capture had not got so far
            torch._C._cuda_endAllocateToPool(device, pool.id)
        if pool.use_count() > 1:
            torch._C._cuda_releasePool(device, pool.id)
        with warnings.catch_warnings(), runtime.harmless("bringing generators back"):
            warnings.simplefilter("ignore")
            empty = torch.cuda.CUDAGraph()
            for generator in generators:
                empty.register_generator_state(generator)
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
            empty.reset()
    else:
        graph.reset()
