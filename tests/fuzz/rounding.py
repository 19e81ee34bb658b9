"""How far rounding alone moves the results of a program.

Two compilations of one program may round differently: Inductor measures for each kernel which block
size is the fastest, and the block size says in which order a sum is taken. Most results move by a few
units of the last place. A result that is the small difference of large numbers may move by its whole
size: the gradient of ``F.normalize`` for rows that are all alike is zero, and what is computed is what
rounding has left over. No limit relative to the result covers that, and an absolute one covers nothing
else, so the limit is measured (Monte Carlo arithmetic): the program runs, not compiled, with all that
its operators round being rounded anew at random, a few times, and each result has the distance by which
that moves it. The noise enters where numbers are rounded, so it has the size of what was cancelled.

* What an elementwise operator computes changes in the last place.
* For an operator that sums, such as a product, so do the elements it takes: a sum taken in another
  order is the exact sum of such elements.
* Operators that move elements, choose among them or compare them do not round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import compiled_level
from .observe import Seen, gaps
from .program import Program
from .series import series, synchronize

_RUNS = 4
_EXACT = """
clone copy copy_ _to_copy cat stack index index_select gather scatter slice_scatter select_scatter
flip roll repeat sort topk max min amax amin argmax argmin embedding constant_pad_nd relu neg abs
clamp clamp_min clamp_max where masked_fill floor ceil round trunc sign maximum minimum fill fill_
zero_ empty_like zeros_like ones_like full_like empty zeros ones full new_empty new_zeros new_ones
new_full empty_strided new_empty_strided scalar_tensor arange tril triu _unsafe_view lift_fresh
max_pool2d_with_indices
"""


class _RoundedAnew(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name in _EXACT.split() or func.is_view:
            return func(*args, **(kwargs or {}))
        if torch.Tag.pointwise not in func.tags:
            written = [a.alias_info is not None for a in func._schema.arguments]
            args = [x if is_written else self._changed(x) for x, is_written in zip(args, written)]  # noqa: B905
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if _is_rounded(t) and not _overlaps(t):
                t.mul_(self._factor(t.shape, t))
        return out

    def _changed(self, value: Any) -> Any:
        """The tensors in it with other last places, laid out as they are."""
        if isinstance(value, list | tuple):
            return [self._changed(x) for x in value]
        if not _is_rounded(value):
            return value
        once = value
        for dim, stride in enumerate(value.stride()):
            if stride == 0 and value.shape[dim] > 1:  # one element in memory has one rounding
                once = once.narrow(dim, 0, 1)
        return (once * self._factor(once.shape, once)).expand(value.shape)

    def _factor(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Each 1, or 1 with another last place."""
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        noise = torch.rand(
            shape, generator=self._generators[device], device=device, dtype=torch.float64
        )
        unit = torch.finfo(like.dtype).eps
        return (1 + ((noise * 3).floor() - 1) * unit).to(like.dtype)


def _is_rounded(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _overlaps(t: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def moved_by_rounding(program: Program, device: str) -> dict[tuple[int, str], float]:
    """By call and value, the norm of the furthest move. Empty if the program raises, not compiled."""
    exact = _series(program, device, None)
    if any(seen.error for seen in exact):
        return {}
    found: dict[tuple[int, str], float] = {}
    for seed in range(_RUNS):
        for place, gap in gaps(exact, _series(program, device, seed)).items():
            found[place] = max(gap, found.get(place, 0.0))
    return found


def _series(program: Program, device: str, seed: int | None) -> list[Seen]:
    run = compiled_level.make(program, device, "eager")
    found = series(program, device, run if seed is None else _noisy(run, seed))
    synchronize(device)
    return found


def _noisy(run: Callable[[list[Any]], list[Any]], seed: int) -> Callable[[list[Any]], list[Any]]:
    modes = threading.local()

    def noisy(args: list[Any]) -> list[Any]:
        if not hasattr(modes, "own"):
            modes.own = _RoundedAnew(seed)
        with modes.own:
            return run(args)

    return noisy
