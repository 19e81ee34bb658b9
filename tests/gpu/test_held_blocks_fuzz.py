"""Random programs whose graphs hold their blocks: calls on several streams and from several threads,
between allocations of the program, while blocks are dropped and workspaces released. Results and the
program's tensors keep their numbers, and no memory is left."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.gpu import allocator

from .held_blocks import Function, at_the_same_time
from .support import at_most, captured, randn

_MIB = 1 << 20
_LIMIT = 16 << 30  # bytes of the process, of which a 50th may be held
_MOST_KEPT = 8  # tensors of a thread
_MOST_KEPT_MIB = 80
_STEPS = 120
_WARM_UP = 12  # calls, until the engine makes them


class Kept(NamedTuple):
    tensor: torch.Tensor
    expected: torch.Tensor | float
    stream: torch.cuda.Stream


def _function(random_numbers: random.Random) -> Function:
    """All parts, internal memory of 8 to 40 MiB each, are alive at once."""
    sizes = [random_numbers.choice([8, 34, 40]) * _MIB // 4 for _ in range(4)]

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.sin(x[:size] * (i + 1)) for i, size in enumerate(sizes)]
        return torch.stack([part.amax() for part in reversed(parts)]) + x[:4]

    return step


class Program:
    """What threads share: functions with graphs, their inputs and right results, streams."""

    def __init__(self, random_numbers: random.Random) -> None:
        self.inputs = [randn(40 * _MIB // 4) for _ in range(2)]
        self.functions = [_function(random_numbers) for _ in range(3)]
        self.expected = [[function(x) for x in self.inputs] for function in self.functions]
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        self.graphed = [self._graphed(index) for index in range(len(self.functions))]

    def _graphed(self, index: int) -> Any:
        """On the function's own stream, from which calls on others take its blocks."""
        graphed = pygraph.graph(self.functions[index], select="always", audit=5)
        with torch.cuda.stream(self.streams[index]):
            for _ in range(_WARM_UP):
                graphed(self.inputs[0])
        return graphed

    def renew(self, index: int) -> None:
        """The graph ends; a new one takes its place, and may hold blocks again."""
        self.graphed[index] = self._graphed(index)


class Actor:
    """Makes random steps of a program in one thread."""

    def __init__(self, program: Program, seed: int, is_alone: bool) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._kept: list[Kept] = []
        self._actions = [self._call] * 12 + [self._allocate] * 6 + [self._check] * 4
        self._actions += [torch.cuda.empty_cache, runtime.release_workspaces]
        if is_alone:
            self._actions += [self._drop, self._renew, self._renew, self._need_much]

    def run(self) -> None:
        for _ in range(_STEPS):
            self._random.choice(self._actions)()
        while self._kept:
            self._check()

    def _call(self) -> None:
        numbers = self._random
        index = numbers.randrange(len(self._program.graphed))
        home = index if numbers.random() < 0.99 else numbers.randrange(len(self._program.streams))
        stream, batch = self._program.streams[home], numbers.randrange(len(self._program.inputs))
        with torch.cuda.stream(stream):
            result = self._program.graphed[index](self._program.inputs[batch])
        self._keep(Kept(result, self._program.expected[index][batch], stream))

    def _allocate(self) -> None:
        stream = self._random.choice(self._program.streams)
        value, size = self._random.random(), self._random.randrange(1, _MOST_KEPT_MIB) * _MIB // 4
        with torch.cuda.stream(stream):
            self._keep(Kept(torch.full((size,), value, device="cuda"), value, stream))

    def _keep(self, kept: Kept) -> None:
        self._kept.append(kept)
        if len(self._kept) > _MOST_KEPT:
            self._check()

    def _check(self) -> None:
        if not self._kept:
            return
        tensor, expected, stream = self._kept.pop(self._random.randrange(len(self._kept)))
        with torch.cuda.stream(stream):
            if isinstance(expected, float):
                assert bool((tensor == torch.tensor(expected)).all())
            else:
                assert torch.equal(tensor, expected)

    def _drop(self) -> None:
        allocator.drop_blocks(0)

    def _renew(self) -> None:
        self._program.renew(self._random.randrange(len(self._program.functions)))

    def _need_much(self) -> None:
        """For so long that graphs see it."""
        much = torch.empty(int(0.76 * _LIMIT), dtype=torch.uint8, device="cuda")
        for _ in range(20):
            self._call()
        del much
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    with at_most(_LIMIT):
        yield


@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_programs(seed: int, threads: int, history: bool) -> None:
    before = torch.cuda.memory_allocated()
    program = Program(random.Random(seed))
    assert len(captured()) == len(program.graphed)
    assert any(row.block_bytes == 0 for row in captured())
    actors = [Actor(program, 100 * seed + i, threads == 1) for i in range(threads)]
    if history:
        torch.cuda.memory._record_memory_history()
    try:
        at_the_same_time(*(actor.run for actor in actors), seconds=100)
    finally:
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
    assert all(row.state == "captured" and not row.audits_failed for row in pygraph.stats())
    del program, actors
    pygraph.reset()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < _MIB
