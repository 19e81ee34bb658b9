"""The distance between two results, element by element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from pygraph.gpu.fingerprint import as_integers

# Elements that differ by more than this share of their value do not agree even roughly.
_ROUGHLY = 0.05
_CHUNK = 1 << 20  # elements compared at a time


@dataclasses.dataclass(frozen=True)
class Distance:
    """The distance of one execution's result from another's.

    outliers: the number of elements that do not agree even roughly. error: the error of the other
    elements, as a share of the norm, without those that differ between runs.
    """

    outliers: int
    error: float

    def __str__(self) -> str:
        return f"{self.outliers} elements and {self.error:.1e} of the norm"


def distance(
    result: torch.Tensor, other: torch.Tensor, unused: torch.Tensor, unsettled: torch.Tensor | None
) -> Distance:
    """The distance from ``other`` to ``result``.

    unused: mask of elements that no kernel writes; they are left out.
    unsettled: mask of elements that differ from run to run; they count as outliers only.
    """
    result, other = result.detach(), other.detach()  # the sums would keep a graph of all pieces
    found = torch.zeros(3, dtype=torch.double, device=result.device)  # on the device until the end
    for part, deviation, value, agrees in _pieces(result, other, unused):
        counts = agrees & ~_wide(unused.reshape(-1)[part], other)
        if unsettled is not None:
            counts &= ~_wide(unsettled[part], other)
        found[0] += (~agrees).sum()
        found[1] += torch.where(counts, deviation, 0).square().sum()
        found[2] += torch.where(counts, value, 0).nan_to_num(0, 0, 0).square().sum()
    outliers, error, norm = found.tolist()
    return Distance(int(outliers), math.sqrt(error / norm) if norm > 0 else error)


def with_outliers(
    mask: torch.Tensor | None, result: torch.Tensor, other: torch.Tensor, unused: torch.Tensor
) -> torch.Tensor:
    """Adds to a flat mask, made if it is None, the elements that do not agree even roughly."""
    if mask is None:
        mask = torch.zeros(result.numel(), dtype=torch.bool, device=result.device)
    for part, _, _, agrees in _pieces(result, other, unused):
        mask[part] |= ~(agrees.all(-1) if other.is_complex() else agrees)
    return mask


def _pieces(
    result: torch.Tensor, other: torch.Tensor, unused: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Which elements, the deviation of ``result`` there, the value of ``other``, and where both agree
    roughly; as doubles, complex numbers as pairs."""
    flat = [tensor.reshape(-1) for tensor in (result, other, unused)]
    for start in range(0, result.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        chunk, reference, left_out = (tensor[part] for tensor in flat)
        value = _as_doubles(reference)
        is_same = _wide(left_out, reference) | (as_integers(chunk) == as_integers(reference))
        deviation = torch.where(is_same, 0, _as_doubles(chunk) - value)
        yield part, deviation, value, _agrees(deviation, value, reference.dtype)


def _wide(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of elements for tensors as of ``_as_doubles``."""
    return mask.unsqueeze(-1) if like.is_complex() else mask


def _agrees(deviation: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of the elements that are equal up to roundings. NaN never is."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return deviation == 0
    size = value.abs()
    agrees = deviation.abs() <= _ROUGHLY * size.nan_to_num(0, 0, 0)
    if agrees.all():  # in most cases, and the median takes longer
        return agrees
    return deviation.abs() <= _ROUGHLY * (size + size.nanmedian()).nan_to_num(0, 0, 0)


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def agree(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that agree roughly."""
    value = _as_doubles(other)
    deviation = torch.where(as_integers(result) == as_integers(other), 0, _as_doubles(result) - value)
    agrees = _agrees(deviation, value, other.dtype)
    return agrees.all(-1) if other.is_complex() else agrees
