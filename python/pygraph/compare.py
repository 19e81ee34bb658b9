"""Is one result equal to another, or as close as results of the same computation come?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph.distance import Distance, agree, distance, with_outliers
from pygraph.fingerprint import as_integers, fingerprint

# Tensors beyond this are compared by fingerprint, which takes no memory.
LARGE_BYTES = 1 << 22
# How far outside the spread of uncaptured runs a replay may lie, as they are only samples.
_SPREAD_FACTOR = 2.0
# By how much, of its norm, a result may differ where the order of additions is left to chance. A
# changed last bit can flip roundings to TF32 or bfloat16 in whatever is computed from it.
_ROUNDING = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}
_ROUNDING_OF_OTHERS = 2.0**-10


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
    """A result that the graph may have got wrong: a replay is further from an uncaptured run than other
    uncaptured runs are."""

    position: int
    replay: Distance
    runs: Distance


class Comparison:
    """Replays of a graph against uncaptured runs of its function, result by result.

    Keeps the results of one execution, and masks for each; what was added can be freed.
    """

    def __init__(self, ones: Sequence[torch.Tensor], zeros: Sequence[torch.Tensor]) -> None:
        """Two replays, whose fresh outputs held ones and zeros."""
        self._unwritten = [unwritten(a, b) for a, b in zip(ones, zeros, strict=True)]
        self._replay = self._written_bits(ones)
        self._first = list(ones)  # the replay, then the first run
        self._run: list[int] = []
        self._garbage: list[torch.Tensor] = []  # by result: NaN in the replay, runs agree on a number
        # By result: elements that do not agree between runs.
        self._unsettled: list[torch.Tensor | None] = [None] * len(self._first)
        self._of_replay: list[Distance] = []  # of the last one that was added
        self._of_runs = [Distance(0, 0.0)] * len(self._first)
        self._is_left_to_chance = False

    def add_replay(self, results: Sequence[torch.Tensor]) -> None:
        """A replay whose fresh outputs held ones. After runs it is the one that is judged: by then it
        is known better what differs between runs."""
        self._is_left_to_chance |= self._written_bits(results) != self._replay
        if self._run:
            self._of_replay = self._distances(results, self._first)

    def add_run(self, results: Sequence[torch.Tensor]) -> None:
        """An uncaptured run."""
        if not self._run:
            self._run = self._written_bits(results)
            self._of_replay = self._distances(self._first, results)
            self._garbage = list(map(_garbage, self._first, results, self._unwritten))
            self._first = list(results)
            return
        self._is_left_to_chance |= self._written_bits(results) != self._run
        for i, new in enumerate(self._distances(results, self._first)):
            old = self._of_runs[i]
            self._of_runs[i] = Distance(max(old.outliers, new.outliers), max(old.error, new.error))
            if new.outliers > 0:
                self._unsettled[i] = with_outliers(
                    self._unsettled[i], results[i], self._first[i], self._unwritten[i]
                )
        for garbage, result, first in zip(self._garbage, results, self._first, strict=True):
            if garbage.any():
                garbage &= agree(result, first)

    def mismatches(self) -> list[Mismatch]:
        """The results that the graph may have got wrong, by what was added until now.

        Outliers are how chance shows where a last bit decides: what lies on either side of a
        comparison, and all that follows from it (masks, whole rows). As many of them as uncaptured
        runs have prove nothing. Where any result differs between equal runs or replays, all that
        depend on it may, even if they did not in the few runs there were: of many sums by atomic
        additions, some come out another way now and then. Then an error of the size of a rounding
        proves nothing either. Nor does an error in elements that do not agree between runs: some
        agree roughly, by chance. NaN where all runs agree on a number is no chance, but poison.
        """
        found = []
        for i, (replay, runs) in enumerate(zip(self._of_replay, self._of_runs, strict=True)):
            rounding = _ROUNDING.get(self._first[i].dtype, _ROUNDING_OF_OTHERS)
            allowed = rounding if self._is_left_to_chance else 0.0
            is_plausible = (
                replay.outliers <= _SPREAD_FACTOR * runs.outliers
                and replay.error <= max(_SPREAD_FACTOR * runs.error, allowed)
                and not self._garbage[i].any()
            )
            if not is_plausible:
                found.append(Mismatch(i, replay, runs))
        return found

    def _written_bits(self, results: Sequence[torch.Tensor]) -> list[int]:
        """A fingerprint per result, of what kernels write: the rest is whatever was there."""
        return fingerprints(map(_with_zeros, results, self._unwritten))

    def _distances(
        self, results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> list[Distance]:
        return list(map(distance, results, others, self._unwritten, self._unsettled))


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
