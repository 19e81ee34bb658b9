"""Compares results by the spread of several uncaptured runs: the thorough check."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch

from pygraph.gpu import allocator
from pygraph.gpu.fingerprint import as_integers, distinct
from pygraph.gpu.fingerprints import fingerprints
from pygraph.gpu.host_memory import has_room
from pygraph.gpu.queued import read
from pygraph.verify.distance import Distance, Pair, agree, distances, with_outliers

# How far outside the spread of uncaptured runs a replay may lie, because the runs are only samples.
_SPREAD_FACTOR = 2.0
# The share of its norm by which a result may differ if the order of additions varies. A changed last
# bit can flip roundings to TF32 or bfloat16 in everything computed from it.
_ROUNDING = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}
_ROUNDING_OF_OTHERS = 2.0**-10

_Mask = torch.Tensor | None  # of the elements of a result; None if it would be False everywhere


def unwritten(with_ones: torch.Tensor, with_zeros: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that still hold the bits (ones, zeros) that two runs started with.

    Kernels leave padding of their results unwritten (attention's log-sum-exp). It is not compared.
    """
    ones, zeros = as_integers(with_ones), as_integers(with_zeros)
    all_ones = 255 if ones.dtype == torch.uint8 else -1
    mask = (ones == all_ones) & (zeros == 0)  # two kernels, of which each must be loaded
    return mask.all(-1) if with_ones.is_complex() else mask


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A result that may be wrong: a replay is further from an uncaptured run than other uncaptured runs
    are."""

    position: int
    replay: Distance
    runs: Distance


class Comparison:
    """Replays of a graph against uncaptured runs of its function, result by result.

    Keeps the results of one execution, and masks of elements where there are such; results that were
    added can be freed. Where the device's memory is scarce, they are kept in host memory, and each
    result is on the device only while it is compared. What is asked about all results is queued for
    all of them, and then waited for once.
    """

    def __init__(self, ones: Sequence[torch.Tensor]) -> None:
        """A replay whose fresh outputs held ones. ``find_unwritten`` comes next."""
        ones = list(map(distinct, ones))
        # Of what is kept at the most: a result, a mask of what is not written, two more if it differs.
        kept_bytes = sum(t.nbytes + 3 * t.numel() for t in ones if t.is_cuda)
        self._waits_in_host_memory = allocator.is_scarce(kept_bytes) and has_room(kept_bytes)
        self._devices = [t.device for t in ones]
        self._first = list(map(self._keep, ones))  # the replay, then the first run
        self._unwritten: list[_Mask] = [None] * len(self._first)
        self._replay: list[int] = []
        self._run: list[int] = []
        # By result: NaN in the replay, and numbers in all runs; and those where runs agree on a number.
        self._nan: list[_Mask] = [None] * len(self._first)
        self._garbage: list[_Mask] = [None] * len(self._first)
        # By result: elements that do not agree between runs.
        self._unsettled: list[_Mask] = [None] * len(self._first)
        self._of_replay: list[Distance] = []  # of the last one that was added
        self._of_runs = [Distance(0, 0.0)] * len(self._first)
        self._is_left_to_chance = False

    def find_unwritten(self, zeros: Sequence[torch.Tensor]) -> None:
        """The same replay, whose fresh outputs held zeros."""
        pairs = zip(self._on_device(self._first), zeros, strict=True)
        masks = ((i, unwritten(first, distinct(other))) for i, (first, other) in enumerate(pairs))
        self._keep_masks(self._unwritten, masks)
        self._replay = self._written_bits(self._on_device(self._first))

    def add_replay(self, results: Sequence[torch.Tensor]) -> None:
        """Adds a replay whose fresh outputs held ones. Added after the runs, it is the replay that is
        judged, because by then it is known which elements differ between runs."""
        results = list(map(distinct, results))
        bits = self._written_bits(results)
        self._is_left_to_chance |= bits != self._replay
        if self._run:
            self._of_replay = self._distances(results, bits)

    def add_run(self, results: Sequence[torch.Tensor]) -> None:
        """Adds an uncaptured run."""
        results = list(map(distinct, results))
        bits = self._written_bits(results)
        if not self._run:
            self._run = bits
            # Where the bits are the same, no number is NaN in one of the two only.
            differ = [
                i
                for i, (result, *of) in enumerate(zip(results, bits, self._replay, strict=True))
                if of[0] != of[1] and (result.is_floating_point() or result.is_complex())
            ]
            self._keep_masks(self._nan, ((i, self._new_nan(i, results[i])) for i in differ))
            self._garbage = list(self._nan)
            replay, self._first = self._first, list(map(self._keep, results))
            self._of_replay = self._distances(replay, self._replay)
            return
        self._is_left_to_chance |= bits != self._run
        for i, new in enumerate(self._distances(results, bits)):
            old = self._of_runs[i]
            self._of_runs[i] = Distance(max(old.outliers, new.outliers), max(old.error, new.error))
            if new.outliers > 0:
                self._note_unsettled(i, results[i])
            nan, garbage = self._to_device(i, self._nan[i]), self._to_device(i, self._garbage[i])
            if nan is not None and garbage is not None:
                agrees = agree(results[i], self._first[i].to(self._devices[i]))
                self._nan[i] = self._keep(nan & ~results[i].isnan())
                self._garbage[i] = self._keep(garbage & agrees)

    def _new_nan(self, i: int, run: torch.Tensor) -> torch.Tensor:
        """A mask of the elements where the replay is NaN and the first run is not. Those that no kernel
        writes are left out."""
        mask = self._first[i].to(self._devices[i]).isnan() & ~run.isnan()
        unused = self._to_device(i, self._unwritten[i])
        return mask if unused is None else mask & ~unused

    def _note_unsettled(self, i: int, result: torch.Tensor) -> None:
        pair = self._pair(i, result)
        mask = with_outliers(pair.unsettled, result, pair.other, pair.unused)
        self._unsettled[i] = self._keep(mask)

    def _pair(self, i: int, result: torch.Tensor) -> Pair:
        """A result, and what is compared with it: the first run's."""
        device = self._devices[i]
        unused, unsettled = (self._to_device(i, m[i]) for m in (self._unwritten, self._unsettled))
        return Pair(result.to(device), self._first[i].to(device), unused, unsettled)

    def _keep_masks(self, kept: list[_Mask], masks: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Keeps the masks of results that have elements which are set."""
        found, flags = [], []
        for i, mask in masks:
            flags.append(mask.any().view(1))
            found.append((i, self._keep(mask)))
        for (i, mask), (is_set,) in zip(found, read(flags), strict=True):
            kept[i] = mask if is_set else None

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._waits_in_host_memory else tensor

    def _on_device(self, kept: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Moves the kept results to the device, one after the other."""
        return (tensor.to(device) for tensor, device in zip(kept, self._devices, strict=True))

    def _to_device(self, i: int, mask: _Mask) -> _Mask:
        return None if mask is None else mask.to(self._devices[i])

    def mismatches(self) -> list[Mismatch]:
        """The results that may be wrong, judged by the executions added so far. The rules, and why they
        are these, are in docs/explanation/verification.md."""
        found = []
        is_garbage = self._are_garbage()
        for i, (replay, runs) in enumerate(zip(self._of_replay, self._of_runs, strict=True)):
            rounding = _ROUNDING.get(self._first[i].dtype, _ROUNDING_OF_OTHERS)
            allowed = rounding if self._is_left_to_chance else 0.0
            is_plausible = (  # NaN that is not plausible is poison, read through a missed address
                replay.outliers <= _SPREAD_FACTOR * runs.outliers
                and replay.error <= max(_SPREAD_FACTOR * runs.error, allowed)
                and i not in is_garbage
            )
            if not is_plausible:
                found.append(Mismatch(i, replay, runs))
        return found

    def _are_garbage(self) -> set[int]:
        """Positions of results with NaN where the runs agree on a number, or in most of their elements
        where all runs have numbers."""
        masks = [(i, *pair) for i, pair in enumerate(zip(self._garbage, self._nan, strict=True))]
        known = [
            (i, garbage, nan) for i, garbage, nan in masks if garbage is not None and nan is not None
        ]
        counts = read([torch.stack([garbage.sum(), nan.sum()]) for _, garbage, nan in known])
        return {
            i
            for (i, _, _), (garbage, nan) in zip(known, counts, strict=True)
            if garbage > 0 or 2 * nan > self._first[i].numel()
        }

    def _written_bits(self, results: Iterable[torch.Tensor]) -> list[int]:
        """A fingerprint per result, of the elements that kernels write."""
        masks = (self._to_device(i, mask) for i, mask in enumerate(self._unwritten))
        return fingerprints(map(_with_zeros, results, masks))

    def _distances(self, results: Sequence[torch.Tensor], bits: Sequence[int]) -> list[Distance]:
        """From the first run. bits: the fingerprints of the results."""
        differ = [i for i, (a, b) in enumerate(zip(bits, self._run, strict=True)) if a != b]
        pairs = [functools.partial(self._pair, i, results[i]) for i in differ]
        found = dict(zip(differ, distances(pairs), strict=True))
        return [found.get(i, Distance(0, 0.0)) for i in range(len(results))]


def _with_zeros(result: torch.Tensor, mask: _Mask) -> torch.Tensor:
    """The result's bits as integers, zero where the mask is set. Without a mask, the result itself."""
    if mask is None:
        return result
    return torch.where(mask.unsqueeze(-1) if result.is_complex() else mask, 0, as_integers(result))
