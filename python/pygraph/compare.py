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


class Comparison:
    """Replays of a graph against uncaptured runs of its function, result by result.

    Keeps the results of one execution, and a mask for each; what was added can be freed.
    """

    def __init__(self, ones: Sequence[torch.Tensor], zeros: Sequence[torch.Tensor]) -> None:
        """Two replays, whose fresh outputs held ones and zeros."""
        self._unwritten = [unwritten(a, b) for a, b in zip(ones, zeros, strict=True)]
        self._replay = self._written_bits(ones)
        self._first = list(ones)  # the replay, then the first run
        self._run: list[int] = []
        self._garbage: list[torch.Tensor] = []  # by result: NaN in the replay, runs agree on a number
        self._of_replay: list[Distance] = []
        self._of_runs = [Distance(0, 0.0)] * len(self._first)
        self._is_left_to_chance = False

    def add_replay(self, results: Sequence[torch.Tensor]) -> None:
        """A replay whose fresh outputs held ones."""
        self._is_left_to_chance |= self._written_bits(results) != self._replay

    def add_run(self, results: Sequence[torch.Tensor]) -> None:
        """An uncaptured run."""
        if not self._run:
            self._run = self._written_bits(results)
            self._of_replay = self._distances(self._first, results)
            self._garbage = list(map(_garbage, self._first, results, self._unwritten))
            self._first = list(results)
            return
        self._is_left_to_chance |= self._written_bits(results) != self._run
        self._of_runs = [
            Distance(max(old.outliers, new.outliers), max(old.error, new.error))
            for old, new in zip(self._of_runs, self._distances(results, self._first), strict=True)
        ]
        for garbage, result, first in zip(self._garbage, results, self._first, strict=True):
            if garbage.any():
                garbage &= _agree(result, first)

    def mismatches(self) -> list[Mismatch]:
        """The results that the graph may have got wrong, by what was added until now.

        Outliers are how chance shows where a last bit decides: what lies on either side of a
        comparison, and all that follows from it (masks, whole rows). As many of them as uncaptured
        runs have prove nothing. Where any result differs between equal runs or replays, all that
        depend on it may, even if they did not in the few runs there were: of many sums by atomic
        additions, some come out another way now and then. Then an error of the size of a rounding
        proves nothing either. Nor does any error where most elements do not agree even roughly
        between runs: what such a result holds are roundings (the gradient of a bias in front of a
        normalisation, which is zero but for them). NaN where all runs agree on a number is no chance,
        but poison.
        """
        found = []
        for i, (replay, runs) in enumerate(zip(self._of_replay, self._of_runs, strict=True)):
            rounding = _ROUNDING.get(self._first[i].dtype, _ROUNDING_OF_OTHERS)
            allowed = rounding if self._is_left_to_chance else 0.0
            is_noise = 2 * runs.outliers > self._first[i].numel()
            is_within = replay.outliers <= _SPREAD_FACTOR * runs.outliers and (
                is_noise or replay.error <= max(_SPREAD_FACTOR * runs.error, allowed)
            )
            if not is_within or self._garbage[i].any():
                found.append(Mismatch(i, replay, runs))
        return found

    def _written_bits(self, results: Sequence[torch.Tensor]) -> list[int]:
        """A fingerprint per result, of what kernels write: the rest is whatever was there."""
        return fingerprints(map(_with_zeros, results, self._unwritten))

    def _distances(
        self, results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> list[Distance]:
        return list(map(_distance, results, others, self._unwritten))


def _with_zeros(result: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The result's bits as integers, zero where the mask is set."""
    return torch.where(mask.unsqueeze(-1) if result.is_complex() else mask, 0, as_integers(result))


def _garbage(replay: torch.Tensor, run: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    """A mask of the elements where the replay is NaN and the run is not; of one element if none is.

    ``unused``: elements that no kernel writes, which are left out.
    """
    if not (run.is_floating_point() or run.is_complex()):
        return torch.zeros(1, dtype=torch.bool, device=run.device)
    mask = replay.isnan() & ~run.isnan() & ~unused
    return mask if mask.any() else torch.zeros(1, dtype=torch.bool, device=run.device)


def _agree(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that agree roughly."""
    value = _as_doubles(other)
    deviation = torch.where(as_integers(result) == as_integers(other), 0, _as_doubles(result) - value)
    agrees = _agrees(deviation, value, other.dtype)
    return agrees.all(-1) if other.is_complex() else agrees


def _distance(result: torch.Tensor, other: torch.Tensor, unused: torch.Tensor) -> Distance:
    """From ``other`` to ``result``. Elements that no kernel writes, ``unused``, are left out."""
    outliers, error, norm = 0, 0.0, 0.0
    flat = [torch.split(tensor.reshape(-1), _CHUNK) for tensor in (result, other, unused)]
    for chunk, reference, left_out in zip(*flat, strict=True):
        wide = _as_doubles(reference)
        if reference.is_complex():
            left_out = left_out.unsqueeze(-1)
        is_same = left_out | (as_integers(chunk) == as_integers(reference))
        deviation = torch.where(is_same, 0, _as_doubles(chunk) - wide)
        agrees = _agrees(deviation, wide, reference.dtype)
        outliers += int((~agrees).sum())
        error += float(torch.where(agrees, deviation, 0).square().sum())
        norm += float(torch.where(agrees & ~left_out, wide, 0).nan_to_num(0, 0, 0).square().sum())
    return Distance(outliers, math.sqrt(error / norm) if norm > 0 else error)


def _agrees(deviation: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which elements are the same value, but for roundings. NaN never is."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return deviation == 0
    return deviation.abs() <= _ROUGHLY * (value.abs() + value.abs().nanmedian()).nan_to_num(0, 0, 0)


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
