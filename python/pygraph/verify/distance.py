"""The distance between two results, element by element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from pygraph.gpu.fingerprint import as_integers
from pygraph.gpu.queued import read

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


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two results that are compared.

    unused: mask of elements that no kernel writes; they are left out.
    unsettled: flat mask of elements that differ from run to run; they count as outliers only.
    None: there are no such elements.
    """

    result: torch.Tensor
    other: torch.Tensor
    unused: torch.Tensor | None = None
    unsettled: torch.Tensor | None = None


def distances(pairs: Sequence[Callable[[], Pair]]) -> list[Distance]:
    """For each pair, the distance from ``other`` to ``result``. Waits for the device once, and a second
    time if some elements do not agree at first sight.

    pairs: functions that return a pair each. Only one pair is kept at a time.
    """
    found = read([_measured(pair(), None) for pair in pairs])
    doubtful = [[piece for piece, count in enumerate(sums[::3]) if count > 0] for sums in found]
    again = [i for i, pieces in enumerate(doubtful) if pieces]
    settled = read([_measured(pairs[i](), doubtful[i]) for i in again])
    for i, sums in zip(again, settled, strict=True):
        for number, piece in enumerate(doubtful[i]):
            found[i][3 * piece : 3 * piece + 3] = sums[3 * number : 3 * number + 3]
    return [_total(sums) for sums in found]


def _total(sums: Sequence[float]) -> Distance:
    outliers, error, norm = (float(sum(sums[i::3])) for i in range(3))
    return Distance(int(outliers), math.sqrt(error / norm) if norm > 0 else error)


def _measured(pair: Pair, doubtful: Sequence[int] | None) -> torch.Tensor:
    """Of each piece the number of outliers, and the sums of squares of the error and of ``other``. On
    the device. doubtful: the pieces that are looked at again, by the median; None: all, without."""
    sums: list[torch.Tensor] = []
    dtype = pair.other.dtype
    by_median = doubtful is not None and _has_roundings(dtype)
    for part, deviation, value in _pieces(pair.result, pair.other, pair.unused, doubtful):
        if by_median:
            agrees = _agrees_by_median(deviation, value)
        else:
            agrees = _agrees_at_sight(deviation, value, dtype)
        counts = agrees
        if pair.unused is not None:
            counts = counts & ~_wide(pair.unused.reshape(-1)[part], pair.other)
        if pair.unsettled is not None:
            counts = counts & ~_wide(pair.unsettled[part], pair.other)
        sums.append((~agrees).sum(dtype=torch.double))
        sums.append(torch.where(counts, deviation, 0).square().sum())
        sums.append(torch.where(counts, value, 0).nan_to_num(0, 0, 0).square().sum())
    if not sums:
        return torch.zeros(0, dtype=torch.double, device=pair.result.device)
    return torch.stack(sums)


def with_outliers(
    mask: torch.Tensor | None,
    result: torch.Tensor,
    other: torch.Tensor,
    unused: torch.Tensor | None,
) -> torch.Tensor:
    """Adds to a flat mask, made if it is None, the elements that do not agree even roughly."""
    if mask is None:
        mask = torch.zeros(result.numel(), dtype=torch.bool, device=result.device)
    for part, deviation, value in _pieces(result, other, unused):
        agrees = _agrees(deviation, value, other.dtype)
        mask[part] |= ~(agrees.all(-1) if other.is_complex() else agrees)
    return mask


def _pieces(
    result: torch.Tensor,
    other: torch.Tensor,
    unused: torch.Tensor | None,
    numbers: Sequence[int] | None = None,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Which elements, the deviation of ``result`` there, and the value of ``other``.

    As doubles, in pairs for complex numbers. numbers: of the wanted pieces; None: all.
    """
    # (Detached: sums would keep a graph of all pieces.)
    flat = [tensor.detach().reshape(-1) for tensor in (result, other)]
    chunks, references = (torch.split(tensor, _CHUNK) for tensor in flat)
    bits, other_bits = (torch.split(as_integers(tensor), _CHUNK) for tensor in flat)
    for number in range(-(-result.numel() // _CHUNK)) if numbers is None else numbers:
        part = slice(number * _CHUNK, (number + 1) * _CHUNK)
        value = _as_doubles(references[number])
        is_same = bits[number] == other_bits[number]
        if unused is not None:
            is_same |= _wide(unused.reshape(-1)[part], other)
        yield part, torch.where(is_same, 0, _as_doubles(chunks[number]) - value), value


def _wide(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A mask of elements for tensors as of ``_as_doubles``."""
    return mask.unsqueeze(-1) if like.is_complex() else mask


def _agrees(deviation: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask of the elements that are equal up to roundings. NaN never is. Waits for the device."""
    agrees = _agrees_at_sight(deviation, value, dtype)
    if not _has_roundings(dtype) or agrees.all():  # in most cases, and the median takes longer
        return agrees
    return _agrees_by_median(deviation, value)


def _has_roundings(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _agrees_at_sight(deviation: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As ``_agrees``, but without elements that are small beside the others."""
    if not _has_roundings(dtype):
        return deviation == 0
    return deviation.abs() <= _ROUGHLY * value.abs().nan_to_num(0, 0, 0)


def _agrees_by_median(deviation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    size = value.abs()
    return deviation.abs() <= _ROUGHLY * (size + size.nanmedian()).nan_to_num(0, 0, 0)


def _as_doubles(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def agree(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A mask of the elements that agree roughly."""
    value = _as_doubles(other)
    deviation = torch.where(as_integers(result) == as_integers(other), 0, _as_doubles(result) - value)
    agrees = _agrees(deviation, value, other.dtype)
    return agrees.all(-1) if other.is_complex() else agrees
