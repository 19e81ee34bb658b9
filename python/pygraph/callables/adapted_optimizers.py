"""The optimizers of one callable, in the form that its graphs can hold (optimizer_forms.py).

Uncaptured calls compute with them as the graphs do: with tensors as learning rates where a float gives
other bits (rates.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables import optimizer_forms, rates
from pygraph.callables.host.host_state import HostState
from pygraph.callables.variant import device_of, host_state


class AdaptedOptimizers:
    """Of one callable. ``look_at`` is for one thread at a time, ``call`` for any."""

    def __init__(self, name: str, adapts: bool) -> None:
        """name: of the callable, for messages. adapts: whether its optimizers may be given
        another form; without it nothing of them is changed."""
        self._name = name
        self._adapts = adapts
        # Groups that need a tensor as learning rate in uncaptured calls, too.
        self._rated: list[rates.Rated] = []
        # Each with the groups that it had when it was adapted.
        self._adapted: list[tuple[weakref.ref[torch.optim.Optimizer], list[Any]]] = []
        self._device: torch.device | None = None

    def look_at(self, roots: dict[str, Any], follows: rates.Follows) -> HostState:
        """What can be reached from the roots, after its optimizers were adapted."""
        now = host_state(roots, self._adapts, follows)
        if not self._adapts:
            return now
        names = optimizer_forms.adapt(now.found.optimizers.values())
        if names:
            runtime.notice_once(
                f"{self._name}: {', '.join(sorted(set(names)))} counts steps on the GPU from now on "
                "(capturable=True), which rounds differently"
            )
            now = host_state(roots, self._adapts, follows)
        self._follow(list(now.found.optimizers.values()))
        self._device = device_of(list(now.found.tensors.values()))
        return now

    def call(self, call: Callable[[], Any]) -> Any:
        """Makes an uncaptured call."""
        if not all(map(_has_its_groups, self._adapted)):  # a checkpoint was loaded, or one is gone
            optimizers = [of for reference, _ in self._adapted if (of := reference()) is not None]
            optimizer_forms.adapt(optimizers)
            self._follow(optimizers)
        return rates.with_tensors(self._rated, self._device, call)

    def _follow(self, optimizers: list[torch.optim.Optimizer]) -> None:
        groups = rates.followed(optimizers, adapted=True)
        self._rated = [rated for rated in groups if not rated.is_exact]
        self._adapted = [(weakref.ref(of), list(of.param_groups)) for of in optimizers]


def _has_its_groups(adapted: tuple[weakref.ref[torch.optim.Optimizer], list[Any]]) -> bool:
    optimizer, groups = adapted[0](), adapted[1]
    now = [] if optimizer is None else optimizer.param_groups
    return len(now) == len(groups) and all(a is b for a, b in zip(now, groups, strict=True))
