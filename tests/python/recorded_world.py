"""A GPU made up on the CPU, on which all of a partition's own code runs: recording, linking,
verification, trial, audits.

The function adds its first argument to the second one, in place, and draws a random number. What
PyTorch and the engine do is made up: captures, memory pools, streams, generators, timers.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import graphs

from pygraph import runtime
from pygraph.gpu import fingerprint
from pygraph.options import Options
from pygraph.partition import audit_replay, selector, timed_calls
from pygraph.partition.partition import Partition
from pygraph.record import memory_pools, owned_memory, stream_capture
from pygraph.select import decision_cache
from pygraph.select.trial import Sample
from pygraph.verify import verify
from pygraph.verify.rehearsal import Rehearsal

from . import audit_world
from .contexts import capturing, drawing
from .fake_engine import FakeGraph
from .stand_ins import INFO

_INFO = dataclasses.replace(
    INFO, argument_count=2, static=frozenset(), compared_calls=2, runs_program=True
)


class Gpu:
    """The state of the device, of PyTorch, and of this thread in them.

    raises_in_captures: whether the function does, unless it ``asks`` and is told that it is captured.
    """

    def __init__(self) -> None:
        self.device = 1  # the program's; the partition's is 0
        self.stream = _stream(7)
        self.fraction = 0.5
        self.empties_cache = True
        self.generator = audit_world.Generator()
        self.capture: Any = None
        self.pair: Any = None  # whose recording has begun
        self.pools: list[Pool] = []
        self.extra = 0.0  # that the function adds, and graphs do not
        self.raises_in_captures = self.asks = False

    def surroundings(self) -> Any:
        asks = graphs.__dict__["_cuda_isCurrentStreamCapturing"]
        of_pytorch = (self.device, self.stream, self.fraction, self.empties_cache, asks)
        return (*of_pytorch, self.capture, self.pair)

    def compute(self, args: list[Any], generator: Any = None, extra: float = 0.0) -> list[torch.Tensor]:
        x, total = args
        args.clear()
        total.add_(x)
        return [x * (generator or self.generator).draw() + total + extra]


def _stream(number: int) -> Any:
    return SimpleNamespace(cuda_stream=number, device=torch.device("cuda", 0), synchronize=lambda: None)


class Pool:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.id = (0, number)
        self.uses = 1
        self.was_used = False

    def use_count(self) -> int:
        return self.uses


class _Sentinels:
    def __getitem__(self, place: slice) -> _Sentinels:
        return self

    def uniform_(self, generator: Any) -> None:
        generator.draw()


class _Capture:
    """PyTorch's graph."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._pool: Any = None
        self._offset = 0

    def register_generator_state(self, generator: Any) -> None: ...

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        assert self._gpu.capture is None, "another capture is under way"
        self._gpu.capture, self._offset = self, self._gpu.generator.offset
        self._pool = next((p for p in self._gpu.pools if p.id == pool), None)
        if self._pool is not None:
            self._pool.uses, self._pool.was_used = self._pool.uses + 1, True

    def capture_end(self) -> None:
        if self._gpu.capture is not self:
            raise RuntimeError("nothing is captured")
        self._gpu.capture, self._gpu.generator.offset = None, self._offset

    def raw_cuda_graph(self) -> int:
        return 0

    def reset(self) -> None:
        if self._gpu.capture is self:
            self.capture_end()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.uses -= 1


class _Pair:
    """The engine's pair of recordings."""

    def __init__(self, gpu: Gpu, args: list[Any]) -> None:
        self._gpu, self._args = gpu, args

    def stand_ins(self, index: int) -> list[Any]:
        return [arg.clone() for arg in self._args]

    def begin(self, index: int, stream: int) -> None:
        self._gpu.pair = self

    def end(self) -> None:
        self._gpu.pair = None

    def put_back_workspaces(self) -> None: ...

    def is_recorded(self, tensor: Any) -> bool:
        return True

    def finish(self, *of: Any) -> None: ...

    def may_write(self) -> list[int]:
        return [1]

    def returned(self) -> list[int]:
        return []

    def set_surroundings(self, *of: Any) -> None: ...

    def link(self, *of: Any) -> FakeGraph:
        return Graph(self._gpu)

    def poison(self) -> None: ...

    def untouched(self) -> bool:
        return True


class Graph(FakeGraph):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__(random_arguments=[-1])
        self._gpu = gpu

    def replay(
        self, arguments: list[Any], gives_away: bool, poison: int = -1, generator: Any = None
    ) -> Sequence[Any]:
        self.replays += 1
        return self._gpu.compute(list(arguments), generator)


class _Observer:
    """The engine's, of memory that is freed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.observers += 1
        self._is_over = False

    def end(self) -> None:
        self._engine.observers -= not self._is_over
        self._is_over = True

    __del__ = end


class Engine(audit_world.Engine):
    NotRelocatable = type("NotRelocatable", (RuntimeError,), {})

    def __init__(self, real: Any, gpu: Gpu) -> None:
        super().__init__(real)
        self._real = real
        self.observers = 0
        self.RecordingPair = lambda args, device, capacity: _Pair(gpu, args)
        self.FreeObserver = lambda tensors, observe: _Observer(self)

    def free_pool(self, *number: int) -> bool:
        return True

    def waiting_seconds(self, callable: Any, key: bytes) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class World:
    """current: the program that was made last."""

    current: Program

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu = Gpu()
        self._real = runtime.engine()
        self.engine = Engine(self._real, gpu)
        self._replace_pytorch(monkeypatch)
        real_empty = torch.empty

        def empty(*size: Any, **options: Any) -> Any:
            is_on_gpu = str(options.get("device", "")).startswith("cuda")
            return _Sentinels() if is_on_gpu else real_empty(*size, **options)

        for owner, name, value in (
            (torch, "empty", empty),
            (runtime, "engine", lambda: self.engine),
            (runtime, "partitions", weakref.WeakSet()),
            (stream_capture, "side_stream", lambda device: _stream(1)),
            (stream_capture, "_REGISTERS_GENERATORS", False),
            (memory_pools, "_allocator", lambda: None),
            (owned_memory, "_segments", lambda pool: []),
            (verify, "keep_busy", lambda seconds: None),
            (verify, "disturb", lambda seconds: None),
            (verify, "wait_for_loads", lambda: None),
            (Rehearsal, "_results", _results),
            (audit_replay, "free_bytes", lambda: 1 << 40),
            (timed_calls, "timed", self._timed),
            (fingerprint, "_CHUNK", 16),  # elements: the tensors are small
            (selector, "_CALLS_PER_RECHECK", 4),
            (decision_cache, "key_of", lambda program, key, device: ""),
        ):
            monkeypatch.setattr(owner, name, value)

    def _replace_pytorch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self.gpu

        def set_stream(stream: Any) -> None:
            gpu.stream = stream

        def exchange(device: int) -> int:
            before, gpu.device = gpu.device, device
            return before

        def set_fraction(fraction: float) -> None:
            gpu.fraction = fraction

        def set_empties_cache(value: bool) -> None:
            gpu.empties_cache = value

        def pool(allocator: Any) -> Pool:
            gpu.pools.append(Pool(gpu, len(gpu.pools)))
            return gpu.pools[-1]

        def release(device: int, number: Any) -> None:
            gpu.pools[number[1]].uses -= 1

        def end_allocate(device: int, number: Any) -> None:
            raise RuntimeError("not recording")

        for owner, name, value in (
            (torch.cuda, "current_device", lambda: gpu.device),
            (torch.cuda, "_exchange_device", exchange),
            (torch.cuda, "_maybe_exchange_device", exchange),
            (torch.cuda, "current_stream", lambda device=None: gpu.stream),
            (torch.cuda, "set_stream", set_stream),
            (torch.cuda, "default_generators", (gpu.generator,)),
            (graphs, "_cuda_isCurrentStreamCapturing", lambda: gpu.capture is not None),
            (torch.cuda, "get_per_process_memory_fraction", lambda device=None: gpu.fraction),
            (torch.cuda, "set_per_process_memory_fraction", set_fraction),
            (torch.cuda, "mem_get_info", lambda device=None: (1 << 40, 1 << 41)),
            (torch.cuda, "memory_stats_as_nested_dict", lambda device=None: {}),
            (torch.cuda, "memory_allocated", lambda: 0),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "CUDAGraph", lambda keep_graph=False: _Capture(gpu)),
            (torch.cuda, "MemPool", pool),
            (torch._C, "_cuda_get_conv_benchmark_empty_cache", lambda: gpu.empties_cache),
            (torch._C, "_cudnn_set_conv_benchmark_empty_cache", set_empties_cache),
            (torch._C, "_cuda_releasePool", release),
            (torch._C, "_cuda_endAllocateToPool", end_allocate),
        ):
            monkeypatch.setattr(owner, name, value, raising=False)

    def _timed(self, run: Any, sleep: float) -> tuple[Any, Sample]:
        graph = self.current.graph()
        before = graph.replays if graph is not None else 0
        result = run()
        is_replay = graph is not None and graph.replays > before
        seconds = 1e-4 if is_replay else 1e-3
        if sleep > 0:
            return result, Sample(seconds, device=seconds)
        return result, Sample(seconds, latency=seconds)

    def program(self, **options: Any) -> Program:
        """A new one, in the state of a process that has just begun."""
        self.engine = Engine(self._real, self.gpu)
        self.gpu.generator.offset = 0
        self.gpu.extra = 0.0
        self.gpu.raises_in_captures = self.gpu.asks = False
        self.gpu.pools.clear()
        return Program(self, options)


def _results(run: Any, outputs: Sequence[Any], args: Any) -> list[torch.Tensor]:
    return [*outputs, *(args[i] for i in run.visible)]


class Program:
    """Calls of one partition, by number."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self._world = world
        self.total = torch.zeros(4)
        self.partition = Partition(self._run, _INFO, Options(**options))
        world.current = self

    def _run(self, args: list[Any]) -> list[torch.Tensor]:
        gpu = self._world.gpu
        is_known = gpu.asks and torch.cuda.is_current_stream_capturing()
        if gpu.raises_in_captures and gpu.capture is not None and not is_known:
            raise RuntimeError("it cannot be captured")
        return gpu.compute(args, extra=gpu.extra)

    @property
    def entry(self) -> Any:
        return next(iter(self.partition.entries.values()), None)

    def graph(self) -> Any:
        return self.entry.graph if self.entry is not None else None

    def call(self, number: int) -> torch.Tensor:
        x = torch.arange(4.0) + number
        (result,) = self.partition.callable([x, self.total])
        return result.clone()

    def expected(self, number: int, extra: float = 0.0) -> torch.Tensor:
        """The result of a call, where all calls before were made."""
        return (torch.arange(4.0) + number) * 4 * (number + 1) + _total(number + 1) + extra

    def state(self) -> tuple[list[float], int]:
        return self.total.tolist(), self._world.gpu.generator.offset

    def state_before(self, number: int) -> tuple[list[float], int]:
        """Before a call, where all calls before were made."""
        return _total(number).tolist(), 4 * number


def _total(calls: int) -> torch.Tensor:
    """The second argument after so many calls."""
    return torch.arange(4.0) * calls + calls * (calls - 1) / 2


def is_free_for_others() -> bool:
    """Whether another thread may draw, and capture."""
    got: list[bool] = []

    def ask() -> None:
        try:
            with capturing(), drawing():
                got.append(True)
        except runtime.OthersDraw:
            got.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return got == [True]
