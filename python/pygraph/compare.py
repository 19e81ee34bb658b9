"""Is one result equal to another, or as close as results of the same computation come?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pygraph.fingerprint import as_integers, fingerprint

# Tensors beyond this are compared by fingerprint, which takes no memory.
LARGE_BYTES = 1 << 26
# How far outside the spread of uncaptured runs a replay may lie, as they are only three samples.
_SPREAD_FACTOR = 2.0
# Two uncaptured runs that differ by more than this share of a value do not compute that value.
_ROUGHLY = 0.05


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


def is_within_spread(
    replayed: torch.Tensor, expected: torch.Tensor, samples: Sequence[torch.Tensor]
) -> bool:
    """Whether the replay is as close to one uncaptured run as further uncaptured runs are.

    Elements that uncaptured runs do not agree on even roughly are left out.
    """
    if all(same_bits(sample, expected) for sample in samples):
        return same_bits(replayed, expected)  # the uncaptured runs agree with each other
    wide = _as_doubles(expected)
    deviations = [_as_doubles(sample) - wide for sample in samples]
    roughly = _ROUGHLY * (wide.abs() + wide.abs().nanmedian())
    meaningful = torch.stack([d.abs() <= roughly for d in deviations]).all(0)
    spread = max(float(torch.where(meaningful, d, 0).norm()) for d in deviations)
    error = float(torch.where(meaningful, _as_doubles(replayed) - wide, 0).norm())
    return error <= _SPREAD_FACTOR * spread  # false for NaN


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
