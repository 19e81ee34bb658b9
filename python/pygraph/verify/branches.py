"""Chain or branches: the faster layout of a new graph, by timing. Both are replayed alternately, on
copies of a call's inputs (rehearsal.py). docs/explanation/concepts.md explains branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pygraph.runtime import log

if TYPE_CHECKING:
    from pygraph import _engine

_LEAST_GAIN = 0.02  # of the time
_ROUNDS = 5
_LONG = 0.02  # seconds: graphs that take longer are replayed less often
_ROUNDS_OF_LONG = 2
_MORE_MEMORY = 64 << 20  # bytes, or an eighth: what branches may need beyond what a chain does


def is_worth_its_memory(chain: _engine.CapturedGraph, branched: _engine.CapturedGraph) -> bool:
    """Whether the second of two captured graphs needs little enough memory to be used.

    Kernels that run at the same time cannot share memory.
    """
    before = chain.workspace_bytes + chain.block_bytes
    after = branched.workspace_bytes + branched.block_bytes
    log.info("memory of a graph, in bytes: %d, with branches %d", before, after)
    return bool(after <= before + max(_MORE_MEMORY, before // 8))


def is_faster(chain: Callable[[], float], branched: Callable[[], float]) -> bool:
    """Whether the second of two replays is faster. Each function makes one replay and returns its
    seconds."""
    rounds = _ROUNDS if min(chain(), chain()) < _LONG else _ROUNDS_OF_LONG
    branched()
    best_chain = best_branched = float("inf")
    for done in range(1, rounds + 1):
        best_chain = min(best_chain, chain())
        best_branched = min(best_branched, branched())
        if done >= 2 and best_branched > best_chain:
            break
    log.info("time of a graph, in seconds: %.3g, with branches %.3g", best_chain, best_branched)
    return best_branched < (1 - _LEAST_GAIN) * best_chain
