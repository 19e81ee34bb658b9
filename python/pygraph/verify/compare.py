"""Compares results: by bits, and by the spread of several uncaptured runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from pygraph.gpu import allocator
from pygraph.gpu.fingerprint import as_integers, distinct, fingerprint
from pygraph.gpu.fingerprints import fingerprints
from pygraph.gpu.host_memory import has_room
from pygraph.verify.distance import Distance, agree, distance, with_outliers

# Tensors beyond this are compared by fingerprint, which takes no memory.
LARGE_BYTES = 1 << 22
# How far outside the spread of uncaptured runs a replay may lie, because the runs are only samples.
_SPREAD_FACTOR = 2.0
# The share of its norm by which a result may differ if the order of additions varies. A changed last
# bit can flip roundings to TF32 or bfloat16 in everything computed from it.
_ROUNDING = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-7}
_ROUNDING_OF_OTHERS = 2.0**-10


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same layout, dtype and bits. Waits for the device."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.nbytes > LARGE_BYTES:
        return bool(fingerprint(a) == fingerprint(b))
    return torch.equal(distinct(as_integers(a)), distinct(as_integers(b)))


def summary(results: Sequence[torch.Tensor], in_bits: bool) -> Sequence[Any]:
    """What is kept of results for ``differing``: themselves, or fingerprints, which take no memory."""
    return results if in_bits else fingerprints(results)


def differing(seen: Sequence[Any], results: Sequence[torch.Tensor], in_bits: bool) -> list[int]:
    """Positions of results that differ from those of which ``seen`` was kept. (Attention's random state
    is on the CPU in an uncaptured run.)"""
    found = summary(results, in_bits)
    pairs = enumerate(zip(seen, found, strict=True))
    if in_bits:
        return [i for i, (a, b) in pairs if not same_bits(a, b.to(a.device))]
    return [i for i, (a, b) in pairs if a != b]


def unwritten(with_ones: torch.Tensor, with_zeros: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that still hold the bits (ones, zeros) that two runs started with.

    Kernels leave padding of their results unwritten (attention's log-sum-exp). It is not compared.
    """
    ones, zeros = as_integers(with_ones), as_integers(with_zeros)
    mask = (ones == torch.zeros_like(ones).bitwise_not_()) & (zeros == 0)
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

    Keeps the results of one execution, and masks for each; results that were added can be freed. Where
    the device's memory is scarce, they are kept in host memory, and each result is on the device only
    while it is compared.
    """

    def __init__(self, ones: Sequence[torch.Tensor]) -> None:
        """A replay whose fresh outputs held ones. ``find_unwritten`` comes next."""
        ones = list(map(distinct, ones))
        # Of what is kept at the most: a result, a mask of what is not written, two more if it differs.
        kept_bytes = sum(t.nbytes + 3 * t.numel() for t in ones if t.is_cuda)
        self._waits_in_host_memory = allocator.is_scarce(kept_bytes) and has_room(kept_bytes)
        self._devices = [t.device for t in ones]
        self._first = list(map(self._keep, ones))  # the replay, then the first run
        self._unwritten: list[torch.Tensor] = []
        self._replay: list[int] = []
        self._run: list[int] = []
        # By result: NaN in the replay, and numbers in all runs; and those where runs agree on a number.
        self._nan: list[torch.Tensor] = []
        self._garbage: list[torch.Tensor] = []
        # By result: elements that do not agree between runs.
        self._unsettled: list[torch.Tensor | None] = [None] * len(self._first)
        self._of_replay: list[Distance] = []  # of the last one that was added
        self._of_runs = [Distance(0, 0.0)] * len(self._first)
        self._is_left_to_chance = False

    def find_unwritten(self, zeros: Sequence[torch.Tensor]) -> None:
        """The same replay, whose fresh outputs held zeros."""
        self._unwritten = [
            self._keep(unwritten(first, distinct(other)))
            for first, other in zip(self._on_device(self._first), zeros, strict=True)
        ]
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
            kept = (self._on_device(self._first), results, self._on_device(self._unwritten))
            self._nan = [self._keep(_nan(*of)) for of in zip(*kept, strict=True)]
            self._garbage = list(self._nan)
            replay, self._first = self._first, list(map(self._keep, results))
            self._of_replay = self._distances(self._on_device(replay), self._replay)
            return
        self._is_left_to_chance |= bits != self._run
        for i, new in enumerate(self._distances(results, bits)):
            old = self._of_runs[i]
            self._of_runs[i] = Distance(max(old.outliers, new.outliers), max(old.error, new.error))
            if new.outliers > 0:
                self._note_unsettled(i, results[i])
            if self._nan[i].any():
                device = self._devices[i]
                agrees = agree(results[i], self._first[i].to(device))
                self._nan[i] = self._keep(self._nan[i].to(device) & ~results[i].isnan())
                self._garbage[i] = self._keep(self._garbage[i].to(device) & agrees)

    def _note_unsettled(self, i: int, result: torch.Tensor) -> None:
        device, mask = self._devices[i], self._unsettled[i]
        kept = (self._first[i].to(device), self._unwritten[i].to(device))
        known = None if mask is None else mask.to(device)
        self._unsettled[i] = self._keep(with_outliers(known, result, *kept))

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._waits_in_host_memory else tensor

    def _on_device(self, kept: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Moves the kept results to the device, one after the other."""
        return (tensor.to(device) for tensor, device in zip(kept, self._devices, strict=True))

    def mismatches(self) -> list[Mismatch]:
        """The results that may be wrong, judged by the executions added so far. The rules, and why they
        are these, are in docs/explanation/verification.md."""
        found = []
        for i, (replay, runs) in enumerate(zip(self._of_replay, self._of_runs, strict=True)):
            rounding = _ROUNDING.get(self._first[i].dtype, _ROUNDING_OF_OTHERS)
            allowed = rounding if self._is_left_to_chance else 0.0
            is_plausible = (  # NaN that is not plausible is poison, read through a missed address
                replay.outliers <= _SPREAD_FACTOR * runs.outliers
                and replay.error <= max(_SPREAD_FACTOR * runs.error, allowed)
                and not self._garbage[i].any()
                and 2 * int(self._nan[i].sum()) <= self._first[i].numel()
            )
            if not is_plausible:
                found.append(Mismatch(i, replay, runs))
        return found

    def _written_bits(self, results: Iterable[torch.Tensor]) -> list[int]:
        """A fingerprint per result, of the elements that kernels write."""
        return fingerprints(map(_with_zeros, results, self._on_device(self._unwritten)))

    def _distances(self, results: Iterable[torch.Tensor], bits: Sequence[int]) -> list[Distance]:
        """From the first run. bits: the fingerprints of the results."""
        return [
            Distance(0, 0.0) if bits[i] == self._run[i] else self._distance(i, result)
            for i, result in enumerate(results)
        ]

    def _distance(self, i: int, result: torch.Tensor) -> Distance:
        device, mask = self._devices[i], self._unsettled[i]
        kept = (self._first[i].to(device), self._unwritten[i].to(device))
        return distance(result, *kept, None if mask is None else mask.to(device))


def _with_zeros(result: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The result's bits as integers, zero where the mask is set."""
    return torch.where(mask.unsqueeze(-1) if result.is_complex() else mask, 0, as_integers(result))


def _nan(replay: torch.Tensor, run: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
    """A mask of the elements where the replay is NaN and the run is not; of one element if none is.

    ``unused``: elements that no kernel writes, which are left out.
    """
    if not (run.is_floating_point() or run.is_complex()):
        return torch.zeros(1, dtype=torch.bool, device=run.device)
    mask = replay.isnan() & ~run.isnan() & ~unused
    return mask if mask.any() else torch.zeros(1, dtype=torch.bool, device=run.device)
