"""Functions whose graphs hold their blocks, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import pygraph
from pygraph import runtime

from .support import assert_used, captured, randn

Function = Callable[[torch.Tensor], torch.Tensor]

MIB = 1 << 20
PARTS = 6
PART = 40 * MIB  # bytes
INTERNAL = PARTS * PART  # at least; one more may be alive
LIMIT = 64 * INTERNAL  # of the process's memory, of which a 50th may be held
WARM_UP = 8
CALLS_TO_SEE = 40  # enough to see that memory is short


def step(x: torch.Tensor) -> torch.Tensor:
    """All parts are alive at once."""
    parts = [torch.sin(x * (i + 1)) for i in range(PARTS)]
    return torch.stack([part.amax() for part in reversed(parts)]).sum()


def other_step(x: torch.Tensor) -> torch.Tensor:
    return step(x) * 2


def make_input(device: str = "cuda") -> torch.Tensor:
    return randn(PART // 4).to(device)


def warmed_up(function: Function = step, **options: Any) -> tuple[Any, torch.Tensor]:
    """A graphed function with a graph that is in use, and an input."""
    graphed = pygraph.graph(function, select="always", audit=False, **options)
    x = make_input()
    for _ in range(WARM_UP):
        graphed(x)
    assert_used()
    return graphed, x


def holding(function: Function = step) -> tuple[Any, torch.Tensor]:
    """As :func:`warmed_up`, with a graph that holds its blocks."""
    before = torch.cuda.memory_allocated()
    graphed, x = warmed_up(function)
    assert is_held()
    assert torch.cuda.memory_allocated() - before >= INTERNAL
    return graphed, x


def is_held() -> bool:
    """Whether all graphs hold their blocks. Else none does."""
    (blocks,) = {row.block_bytes == 0 for row in captured()}
    (is_large,) = {row.workspace_bytes >= INTERNAL for row in captured()}
    assert blocks == is_large
    return blocks


def graphs() -> list[Any]:
    """The engine's, of all callables."""
    entries = [entry for of in runtime.all_partitions() for entry in list(of.entries.values())]
    return [entry.graph for entry in entries if entry.graph is not None]


def allocations(call: Callable[[], object]) -> int:
    """Of blocks and results: all but small ones are asked for one by one."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def at_the_same_time(*targets: Callable[[], None], seconds: float = 60) -> None:
    """Raises what one of them has raised, or if one does not end."""
    failures: list[BaseException] = []

    def run(target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)
    for failure in failures:
        raise failure
