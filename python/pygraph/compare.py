"""Is one result equal to another, or as close as results of the same computation come?"""

from __future__ import annotations

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


def implausible(
    replays: Sequence[Sequence[torch.Tensor]], runs: Sequence[Sequence[torch.Tensor]]
) -> list[int]:
    """Positions of the results that the graph may have got wrong.

    replays: the results of three replays, whose fresh outputs held ones, zeros, and ones again.
    runs: the same results of several uncaptured runs.
    """
    of_replays, of_runs = (list(zip(*kind, strict=True)) for kind in (replays, runs))
    repeated = [*of_runs, *((first, again) for first, _, again in of_replays)]
    is_left_to_chance = any(
        not same_bits(first, other) for first, *others in repeated for other in others
    )
    return [
        i
        for i, (replayed, run) in enumerate(zip(of_replays, of_runs, strict=True))
        if not _is_plausible(replayed[:2], run, is_left_to_chance)
    ]


def _is_plausible(
    replays: Sequence[torch.Tensor], runs: Sequence[torch.Tensor], is_left_to_chance: bool
) -> bool:
    """Whether a replay is as close to an uncaptured run as further uncaptured runs are.

    Elements that no kernel writes, or that uncaptured runs do not agree on even roughly, are left out.
    is_left_to_chance: whether any result of the function differs between equal runs or replays. Then
    a difference of the size of a rounding proves nothing, even if this result did not differ in the
    few runs there were: of many sums by atomic additions, some come out another way now and then.
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
    if error == 0 or error <= _SPREAD_FACTOR**2 * max(spread):
        return True
    share = _ROUNDING.get(runs[0].dtype, _ROUNDING_OF_OTHERS)
    is_number = runs[0].is_floating_point() or runs[0].is_complex()
    return is_left_to_chance and is_number and error <= share**2 * norm  # false for NaN


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
