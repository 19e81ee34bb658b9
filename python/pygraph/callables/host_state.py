"""The state of the host that a callable can see: what it is, whether it has changed, and undoing that.

A replay does not run the callable's Python. So a graph serves a call only if everything that Python
would have read is what it was when the graph was recorded; and only a callable that leaves all of it as
it was can have a graph, because a replay changes nothing of it either. *Leaves as it was* means: after
the first calls, in which state is made, no slot changes in a call (a new container with equal contents
is no change).
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables.reachable import Reachable, reachable_from


class HostState:
    """What a callable can read on the host, as it is when this is made. Not thread-safe."""

    def __init__(self, roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> None:
        """roots: the callable, and objects that are passed to it, by name. unwatched: as
        ``reachable_from`` has it. Raises TooMuch."""
        self._roots = roots
        self._unwatched = tuple(unwatched)
        self.found: Reachable = reachable_from(roots, self._unwatched)
        self._probed = self._probe()
        self._watch = runtime.engine().HostWatch()
        for dictionary, keys in self.found.dicts:
            self._watch.add_dict(dictionary, keys)
        for items in self.found.lists:
            self._watch.add_list(items)
        for cell in self.found.cells:
            self._watch.add_cell(cell)
        for tensor in self.found.tensors.values():
            self._watch.add_tensor(tensor)

    def _probe(self) -> list[Any]:
        return [probe() for _, probe in self.found.probes]

    def holds(self) -> bool:
        """Whether everything is the same object, or the same number or text. Fast; False does not mean
        that the callable would see a difference: see ``changes``."""
        return bool(self._watch.holds()) and (not self.found.probes or self._probe() == self._probed)

    def changes(self, later: HostState) -> list[str]:
        """Paths of what differs in a later state of the same roots, the most telling ones first."""
        before, after = self._values(), later._values()
        paths = [
            path
            for path in before.keys() | after.keys()
            if not _is_same(before.get(path, _Missing), after.get(path, _Missing))
        ]
        return sorted(paths, key=lambda path: (path.endswith("#len"), len(path), path))

    def now(self) -> HostState:
        """The state of the same roots as it is now."""
        return HostState(self._roots, self._unwatched)

    def restore(self) -> None:
        """Puts back what dictionaries, lists and closures had. What was written to tensors, files or
        other objects stays."""
        self._watch.restore()

    def _values(self) -> dict[str, Any]:
        probed = zip(self.found.probes, self._probed, strict=True)
        return self.found.slots | {path: value for (path, _), value in probed}


class _Missing:
    """In place of what is not there."""


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def random_state() -> tuple[Any, ...]:
    """Where the host's random number generators stand: Python's, PyTorch's, and NumPy's if loaded."""
    numpy = sys.modules.get("numpy.random")
    parts = () if numpy is None else numpy.get_state()
    state = tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in parts)
    return (random.getstate(), state, torch.get_rng_state().numpy().tobytes())
