"""The side effects of a function, observed from outside in one uncaptured call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.gpu.fingerprint import fingerprint, forget
from pygraph.gpu.fingerprints import Fingerprints
from pygraph.runtime import log
from pygraph.undoing import Undo

if TYPE_CHECKING:
    from pygraph import _engine

_Positions = tuple[int, ...]  # of arguments that share a fingerprint


class Watch:
    """Observes one uncaptured call: which inputs does it write, and does it draw random numbers?

    The inputs are fingerprinted before and after the call; those that the call gives away, when it
    frees them (docs/explanation/verification.md).
    """

    def __init__(self, args: list[Any], device: int, undo: Undo) -> None:
        """undo: gets a step that ends the watch."""
        engine = runtime.engine()
        given_away = [tuple(group.positions) for group in engine.given_away(args)]
        freed = {i for positions in given_away for i in positions}
        self._kept: dict[int, torch.Tensor] = {
            i: arg
            for i, arg in enumerate(args)
            if i not in freed and isinstance(arg, torch.Tensor) and arg.is_cuda
        }
        self._generator = torch.cuda.default_generators[device]
        self._offset = self._generator.get_offset()
        self._kept_before = Fingerprints(self._kept.values())
        self._kept_before.flush()
        self._before: dict[_Positions, torch.Tensor] = {
            positions: fingerprint(engine.memory_of(args[positions[0]])) for positions in given_away
        }
        self._after: dict[_Positions, torch.Tensor] = {}
        forget()  # the call finds the memory as it was

        after = self._after  # not this object, which has the callback

        def look(number: int, memory: torch.Tensor) -> None:
            try:
                after[given_away[number]] = fingerprint(memory)
                forget()
            except torch.OutOfMemoryError:
                log.info("no room to look at input %d, which counts as written", given_away[number][0])

        watched = [args[positions[0]] for positions in given_away]
        undo.append(self._stop)
        self._observer: _engine.FreeObserver | None = engine.FreeObserver(watched, look)

    def _stop(self) -> None:
        self._observer = None  # it ends without a last look

    def mutated(self) -> frozenset[int]:
        """Positions of the inputs that were written. Waits for the device."""
        assert self._observer is not None
        self._observer.end()
        kept_after = Fingerprints(self._kept.values())
        kept_after.flush()
        forget()
        pairs = zip(self._kept, self._kept_before.values(), kept_after.values(), strict=True)
        written = {i for i, before, after in pairs if before != after}
        changed = [after != self._before[positions] for positions, after in self._after.items()]
        flags = torch.stack(changed).tolist() if changed else []
        for positions, is_changed in zip(self._after, flags, strict=True):
            written.update(positions if is_changed else ())
        for positions in self._before.keys() - self._after.keys():  # no room for a fingerprint
            written.update(positions)
        return frozenset(written)

    def draws(self) -> bool:
        """Whether the default generator was used. Use by another thread also gives True, which is
        harmless."""
        return bool(self._generator.get_offset() != self._offset)
