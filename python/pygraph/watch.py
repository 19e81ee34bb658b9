"""What a function does besides returning results, seen from outside in one uncaptured call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.fingerprint import fingerprint, forget


class Watch:
    """Watches one uncaptured call: which inputs does it write, and does it draw random numbers?

    The compiler knows most of it, but not all (buffers it may overwrite because nobody needs them
    any more), so the contents are compared before and after, by fingerprint.
    """

    def __init__(self, args: Sequence[Any], device: int) -> None:
        self.args = list(args)
        self._generator = torch.cuda.default_generators[device]
        self._offset = self._generator.get_offset()
        self._before = self._fingerprints()

    def mutated(self) -> frozenset[int]:
        """Positions of the inputs that were written. Waits for the device."""
        after = self._fingerprints()
        if not after:
            return frozenset()
        positions = list(after)
        changed = torch.stack([after[i] != self._before[i] for i in positions]).tolist()
        return frozenset(i for i, is_changed in zip(positions, changed, strict=True) if is_changed)

    def draws(self) -> bool:
        """Whether the default generator was used. Another thread's use gives a harmless yes."""
        return bool(self._generator.get_offset() != self._offset)

    def _fingerprints(self) -> dict[int, torch.Tensor]:
        found = {
            i: fingerprint(arg)
            for i, arg in enumerate(self.args)
            if isinstance(arg, torch.Tensor) and arg.is_cuda
        }
        forget()  # the call finds the memory as it was
        return found
