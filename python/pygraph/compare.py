"""Is one result equal to another, or as close as results of the same computation come?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph.fingerprint import as_integers, fingerprint

# Tensors beyond this are compared by fingerprint, which takes no memory.
LARGE_BYTES = 1 << 26
# How far outside the spread of uncaptured runs a replay may lie, as they are only samples.
_SPREAD_FACTOR = 2.0
# Uncaptured runs that differ by more than this share of a value do not compute that value.
_ROUGHLY = 0.05
# By how much, of its norm, a result may differ where the order of additions is left to chance. A
# changed last bit can flip roundings to TF32 or bfloat16 in whatever is computed from it.
_ROUNDING = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}
_ROUNDING_OF_OTHERS = 2.0**-10
_CHUNK = 1 << 24  # elements compared at a time


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same layout, dtype and bits. Waits for the device."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.nbytes > LARGE_BYTES:
        return bool(fingerprint(a) == fingerprint(b))
    return torch.equal(as_integers(a), as_integers(b))


def fingerprints(results: Iterable[Any]) -> list[int]:
    """One per tensor among ``results``, wherever it is. Waits for the device."""
    queued = [fingerprint(t) for t in results if isinstance(t, torch.Tensor)]
    return [int(value) for value in queued]


def unwritten(with_ones: torch.Tensor, with_zeros: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that still hold the bits (ones, zeros) that two runs started with.

    Kernels leave padding of their results unwritten (attention's log-sum-exp); it says nothing.
    """
    ones, zeros = as_integers(with_ones), as_integers(with_zeros)
    mask = (ones == torch.zeros_like(ones).bitwise_not_()) & (zeros == 0)
    return mask.all(-1) if with_ones.is_complex() else mask


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A result that the graph may have got wrong.

    error: how far a replay is from an uncaptured run, as a share of the result's norm. spread: how
    far uncaptured runs are from each other.
    """

    position: int
    error: float
    spread: float


def implausible(
    replays: Sequence[Sequence[torch.Tensor]], runs: Sequence[Sequence[torch.Tensor]]
) -> list[Mismatch]:
    """The results that the graph may have got wrong.

    replays: the results of several replays. In the first fresh outputs held ones, in the second
    zeros, in the others ones again.
    runs: the same results of several uncaptured runs.
    """
    of_replays, of_runs = (list(zip(*kind, strict=True)) for kind in (replays, runs))
    repeated = [*of_runs, *((first, *again) for first, _, *again in of_replays)]
    is_left_to_chance = any(
        not same_bits(first, other) for first, *others in repeated for other in others
    )
    found = []
    for i, (replayed, run) in enumerate(zip(of_replays, of_runs, strict=True)):
        error, spread = _distances(replayed[:2], run)
        if not _is_plausible(error, spread, run[0], is_left_to_chance):
            found.append(Mismatch(i, error, spread))
    return found


def _is_plausible(error: float, spread: float, result: torch.Tensor, is_left_to_chance: bool) -> bool:
    """Whether a replay is as close to an uncaptured run as further uncaptured runs are.

    is_left_to_chance: whether any result of the function differs between equal runs or replays. Then
    a difference of the size of a rounding proves nothing, even if this result did not differ in the
    few runs there were: of many sums by atomic additions, some come out another way now and then.
    """
    if error == 0 or error <= _SPREAD_FACTOR * spread:
        return True
    rounding = _ROUNDING.get(result.dtype, _ROUNDING_OF_OTHERS)
    is_number = result.is_floating_point() or result.is_complex()
    return is_left_to_chance and is_number and error <= rounding  # false for NaN


def _distances(replays: Sequence[torch.Tensor], runs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """From a replay to the first run, and the largest from there to another run; of the run's norm.

    Elements that no kernel writes, or that uncaptured runs do not agree on even roughly, are left out.
    """
    error, spread, norm = 0.0, [0.0] * (len(runs) - 1), 0.0
    flat = [torch.split(tensor.reshape(-1), _CHUNK) for tensor in (*replays, *runs)]
    for ones, zeros, first, *others in zip(*flat, strict=True):
        unused = unwritten(ones, zeros)
        wide = _as_doubles(first)
        deviations = [_as_doubles(other) - wide for other in others]
        roughly = _ROUGHLY * (wide.abs() + wide.abs().nanmedian())
        counts = torch.stack([d.abs() <= roughly for d in deviations]).all(0)
        counts &= ~(unused.unsqueeze(-1) if first.is_complex() else unused)

        def square(values: torch.Tensor, counts: torch.Tensor = counts) -> float:
            return float(torch.where(counts, values, 0).square().sum())

        error += square(_as_doubles(ones) - wide)
        spread = [total + square(d) for total, d in zip(spread, deviations, strict=True)]
        norm += square(wide)
    if norm == 0:
        return error, max(spread)
    return math.sqrt(error / norm), math.sqrt(max(spread) / norm)


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
