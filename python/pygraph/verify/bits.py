"""Compares results by their bits: the quick check of a graph, and audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.gpu.fingerprint import as_integers, distinct
from pygraph.gpu.fingerprints import Fingerprints, fingerprints
from pygraph.gpu.queued import read

# Tensors beyond this are compared by fingerprint, which takes no memory.
LARGE_BYTES = 1 << 22


def summary(results: Sequence[torch.Tensor], in_bits: bool) -> Sequence[Any]:
    """What is kept of results for ``differing``: themselves, or fingerprints, which take no memory."""
    return results if in_bits else fingerprints(results)


def differing(seen: Sequence[Any], results: Sequence[torch.Tensor], in_bits: bool) -> list[int]:
    """Positions of results that differ from those of which ``seen`` was kept: in layout, dtype or bits.
    Waits for the device. (Attention's random state is on the CPU in an uncaptured run.)"""
    if not in_bits:
        pairs = enumerate(zip(seen, fingerprints(results), strict=True))
        return [i for i, (a, b) in pairs if a != b]
    found: list[int] = []
    small: list[tuple[int, torch.Tensor]] = []  # and whether the results differ, on their device
    large, of_large = list[int](), Fingerprints()
    for i, (a, b) in enumerate(zip(seen, results, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            found.append(i)
        elif a.nbytes > LARGE_BYTES:
            large.append(i)
            of_large.add(a)
            of_large.add(b)
        else:
            other = distinct(as_integers(b.to(a.device)))
            small.append((i, (distinct(as_integers(a)) != other).any().view(1)))
    for (i, _), (differs,) in zip(small, read([flag for _, flag in small]), strict=True):
        if differs:
            found.append(i)
    values = of_large.values()
    found += [i for i, a, b in zip(large, values[::2], values[1::2], strict=True) if a != b]
    return sorted(found)
