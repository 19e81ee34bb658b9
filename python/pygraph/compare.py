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
# Elements that differ by more than this share of their value do not agree even roughly.
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
class Distance:
    """How far one execution's result is from another's.

    outliers: elements that do not agree even roughly. error: of the others, as a share of the norm.
    """

    outliers: int
    error: float

    def __str__(self) -> str:
        return f"{self.outliers} elements and {self.error:.1e} of the norm"


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A result that the graph may have got wrong: a replay is further from an uncaptured run than other
    uncaptured runs are."""

    position: int
    replay: Distance
    runs: Distance


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
        replay, spread = _distances(replayed[:2], run)
        rounding = _ROUNDING.get(run[0].dtype, _ROUNDING_OF_OTHERS) if is_left_to_chance else 0.0
        if not _is_plausible(replay, spread, rounding):
            found.append(Mismatch(i, replay, spread))
    return found


def _is_plausible(replay: Distance, runs: Distance, rounding: float) -> bool:
    """Whether a replay is as close to an uncaptured run as further uncaptured runs are.

    rounding: an error that proves nothing. Where any result of the function differs between equal runs
    or replays, all that depend on it may, even if they did not in the few runs there were: of many
    sums by atomic additions, some come out another way now and then.
    """
    return replay.outliers <= _SPREAD_FACTOR * runs.outliers and (
        replay.error <= max(_SPREAD_FACTOR * runs.error, rounding)
    )


def _distances(
    replays: Sequence[torch.Tensor], runs: Sequence[torch.Tensor]
) -> tuple[Distance, Distance]:
    """From the first run to the first replay, and to the furthest other run.

    Outliers are how chance shows where a last bit decides: what lies on either side of a comparison,
    and all that follows from it (masks, whole rows). As many of them as uncaptured runs have prove
    nothing. Elements that no kernel writes are left out.
    """
    outliers = [0] * len(runs)  # of the replay, and of the runs but the first
    errors = [0.0] * len(runs)
    norm = 0.0
    flat = [torch.split(tensor.reshape(-1), _CHUNK) for tensor in (*replays, *runs)]
    for ones, zeros, first, *others in zip(*flat, strict=True):
        unused = unwritten(ones, zeros)
        wide = _as_doubles(first)
        unused = unused.unsqueeze(-1) if first.is_complex() else unused
        deviations = [
            torch.where(
                unused | (as_integers(other) == as_integers(first)), 0, _as_doubles(other) - wide
            )
            for other in (ones, *others)
        ]
        agree = [_agrees(deviation, wide, first.dtype) for deviation in deviations]
        outliers = [n + int((~a).sum()) for n, a in zip(outliers, agree, strict=True)]
        all_agree = torch.stack(agree).all(0)
        errors = [
            error + float(torch.where(all_agree, deviation, 0).square().sum())
            for error, deviation in zip(errors, deviations, strict=True)
        ]
        norm += float(torch.where(all_agree & ~unused, wide, 0).nan_to_num(0, 0, 0).square().sum())
    shares = [math.sqrt(error / norm) if norm > 0 else error for error in errors]
    return Distance(outliers[0], shares[0]), Distance(max(outliers[1:]), max(shares[1:]))


def _agrees(deviation: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which elements are the same value, but for roundings. NaN never is."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return deviation == 0
    return deviation.abs() <= _ROUGHLY * (value.abs() + value.abs().nanmedian()).nan_to_num(0, 0, 0)


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
