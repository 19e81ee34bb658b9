"""One stream capture of a function on stand-ins for its arguments, and the clean-up if it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.gpu import current
from pygraph.gpu.load import side_stream
from pygraph.record import memory_pools, owned_memory
from pygraph.record.kernel_access import accesses_of
from pygraph.undoing import Undo, undoing

if TYPE_CHECKING:
    from pygraph import _engine

# PyTorch 2.15 finds the generators that a capture uses by itself, and warns where one is named.
_REGISTERS_GENERATORS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


class PoolInUse(RuntimeError):
    """The capture's memory came from another pool, because the thread allocates from a pool of the
    program (torch.cuda.use_mem_pool). A later call may be recorded."""


class OthersCapture(runtime.OthersDraw):
    """The program captures a graph of its own, in another thread or on another stream. Before PyTorch
    2.15 all captures share the default generator's state, and a recording would set it back: the
    program's graph would repeat random numbers. A later call may be recorded."""


@dataclasses.dataclass(frozen=True)
class StreamCapture:
    """One of the two recordings of a function.

    index: 0 or 1, the position in the pair.
    sources: the sources of the random numbers that the function draws, as the engine numbers them
        (bindings/replay/captured_graph.h). generators: the generators of these sources.
    """

    function: Callable[[list[Any]], Sequence[Any]]
    pair: _engine.RecordingPair
    index: int
    device: int
    sources: list[int]
    generators: list[torch.Generator]

    def make(self) -> int:
        """Makes the recording; returns the number of outputs. Raises what the capture raises."""
        if _REGISTERS_GENERATORS and memory_pools.are_in_use():
            undoing(self._check_that_numbers_can_be_drawn)
        pool = memory_pools.make()
        try:
            count = self._capture_into(pool)
            holder = _keep_held(self.pair, self.index, pool)
        except Exception:
            _abandoned.append((self.pair, self.index, pool))
            raise
        except BaseException:
            _interrupted.append((self.pair, self.index, pool))
            raise
        if holder:
            raise runtime.engine().NotRelocatable(
                f"{holder} keeps memory that it allocates in a recording"
            )
        return count

    def _check_that_numbers_can_be_drawn(self, undo: Undo) -> None:
        """Raises OthersCapture while the default generator is part of another capture: PyTorch refuses
        to draw from it then."""
        generator = torch.cuda.default_generators[self.device]
        before = generator.get_offset()

        def set_back() -> None:
            if generator.get_offset() == before + 4:  # else nothing was drawn, or somebody else has
                generator.set_offset(before)

        undo.append(set_back)
        try:
            torch.empty(1, device=f"cuda:{self.device}").uniform_(generator=generator)
        except RuntimeError as error:
            text = f"the program captures a graph of its own: {runtime.first_line(error)}"
            raise OthersCapture(text) from None

    def _capture_into(self, pool: torch.cuda.MemPool) -> int:
        """Captures into ``graph``. Afterwards only an operator that keeps memory, or an exception,
        refers to the pool."""
        stand_ins = self.pair.stand_ins(self.index)

        def body(undo: Undo) -> int:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            undo.append(self.pair.put_back_workspaces)  # after the reset, which frees the stream's
            undo.append(graph.reset)
            # The sentinels are kept until the graph has been read.
            returned, sentinels = undoing(functools.partial(self._capture, stand_ins, graph, pool))
            accesses = accesses_of(self.function)
            self.pair.finish(self.index, graph.raw_cuda_graph(), returned, self.sources, accesses)
            del sentinels
            return len(returned)

        return undoing(body)

    def _capture(
        self, stand_ins: list[Any], graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool, undo: Undo
    ) -> tuple[Sequence[Any], torch.Tensor]:
        """Returns the results of the function, and the sentinels."""
        stream = side_stream(self.device)
        current.use_stream(stream, undo)
        _quieten_libraries(undo)
        has_ended = False

        def clean_up() -> None:
            self.pair.end()
            if not has_ended:
                self._abandon(graph, pool)

        undo.append(clean_up)
        for generator in self.generators if _REGISTERS_GENERATORS else ():
            graph.register_generator_state(generator)
        self.pair.begin(self.index, stream.cuda_stream)
        graph.capture_begin(
            pool=pool.id,  # type: ignore[arg-type]
            capture_error_mode="thread_local",
        )
        if not self.pair.is_recorded(torch.empty(1, device=f"cuda:{self.device}")):
            raise PoolInUse("the call's memory comes from a torch.cuda.MemPool of the program's")
        returned = self.function(stand_ins)
        # The sentinels: one more random kernel per generator, from which the engine learns how many
        # numbers the graph draws. (In one tensor, because torch.use_deterministic_algorithms fills each
        # new tensor.)
        sentinels = torch.empty(len(self.generators), device=f"cuda:{self.device}")
        for i, generator in enumerate(self.generators):
            sentinels[i : i + 1].uniform_(generator=generator)
        self.pair.end()
        graph.capture_end()
        has_ended = True
        return returned, sentinels

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool) -> None:
        """Restores stream, allocator and generators after a capture that failed. May be made twice."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "the CUDA graph is empty"
                graph.capture_end()
        except Exception as error:
            signal_exceptions.pass_on(error)  # the undo step is made again
            # PyTorch 2.11 leaves the allocator routed to the pool, the pool in use, and generators in
            # capture mode. Later releases (2.15) end all of it in reset(), and a pool that is
            # released twice makes the allocator raise for good.
            graph.reset()
            with contextlib.suppress(RuntimeError):  # the capture had not got so far, or has ended
                torch._C._cuda_endAllocateToPool(self.device, pool.id)
            if pool.use_count() > 1:
                torch._C._cuda_releasePool(self.device, pool.id)
            if not _REGISTERS_GENERATORS:
                return
            with warnings.catch_warnings(), runtime.harmless("bringing generators back"):
                warnings.simplefilter("ignore")
                empty = torch.cuda.CUDAGraph()
                for generator in self.generators:
                    empty.register_generator_state(generator)
                empty.capture_begin(capture_error_mode="thread_local")
                empty.capture_end()
                empty.reset()
        else:
            graph.reset()


def _keep_held(pair: _engine.RecordingPair, index: int, pool: torch.cuda.MemPool) -> str:
    """Ends the use of a recording's pool. Memory of the pool that is still held stays valid until the
    process ends.

    Returns the name of the operator that allocated such memory, or an empty string.
    """
    pieces = owned_memory.still_held(pool)
    if pieces:
        return pair.retain(index, pieces)
    memory_pools.release(pool)
    memory_pools.free()
    return ""


# The pair, which recording of it, its pool.
_Left = tuple["_engine.RecordingPair", int, torch.cuda.MemPool]
_abandoned: list[_Left] = []  # of recordings that raised
_interrupted: list[_Left] = []  # of those that a KeyboardInterrupt or the like has ended


def check_abandoned() -> None:
    """Cleans up after failed recordings. To be called when their exceptions are gone, which hold
    memory. An interrupt is raised after all of it."""
    undoing(lambda undo: undo.append(_check_abandoned))


def _check_abandoned() -> None:
    while _abandoned:
        with runtime.harmless("looking at a failed recording"):
            _keep_held(*_abandoned[-1])
        _abandoned.pop()


def check_interrupted() -> None:
    """Cleans up after interrupted recordings.

    An interactive interpreter keeps the traceback of an interrupt, and so its local variables, until
    the next exception. Such memory is not kept until the process ends.
    """
    for left in _interrupted.copy():
        with runtime.harmless("looking at an interrupted recording"):
            if not owned_memory.still_held(left[-1]):
                memory_pools.release(left[-1])
                memory_pools.free()
                _interrupted.remove(left)


def make_handles() -> None:
    """Creates this thread's cuBLAS handle (70 MiB), for programs that need one: a capture cannot create
    it."""
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


def _quieten_libraries(undo: Undo) -> None:
    """Keeps PyTorch from emptying its cache, and Python from running finalizers, while capturing."""
    empties_cache = torch._C._cuda_get_conv_benchmark_empty_cache()
    set_empties_cache = torch._C._cudnn_set_conv_benchmark_empty_cache
    undo.append(functools.partial(set_empties_cache, empties_cache))
    set_empties_cache(False)
    if gc.isenabled():
        undo.append(gc.enable)
        gc.disable()
