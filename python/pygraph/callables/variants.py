"""The variants of one graphed callable (graphed.py), by what is passed."""

from __future__ import annotations

from collections.abc import Sequence

from pygraph.callables.host.host_state import HostState
from pygraph.callables.signature import Arguments, Key
from pygraph.callables.variant import Variant

_MOST = 64


class Variants:
    """At most 64, of which the oldest go first. To be changed with the callable's lock held; others may
    read meanwhile."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[Variant]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def all(self) -> list[Variant]:
        return [variant for of_key in self._by_key.values() for variant in of_key]

    def of(self, key: Key) -> Sequence[Variant]:
        return self._by_key.get(key, [])

    def add(self, key: Key, variant: Variant, now: HostState) -> None:
        """now: what the callable reads. Others for the key whose tensors are gone never fit again, and
        must not keep them: they are dropped."""
        kept = [
            v
            for v in self._by_key.pop(key, [])
            if v.host is not None and v.is_alive() and now.reaches_tensors_of(v.host)
        ]
        self._by_key[key] = [*kept, variant][-_MOST:]
        while len(self) > _MOST:
            del self._by_key[next(iter(self._by_key))]

    def drop(self, key: Key, variant: Variant) -> None:
        others = [v for v in self._by_key.pop(key, []) if v is not variant]
        if others:
            self._by_key[key] = others

    def drop_all_of(self, key: Key) -> None:
        self._by_key.pop(key, None)

    def clear(self) -> None:
        self._by_key.clear()

    def is_one_of_many(self, arguments: Arguments) -> bool:
        """Whether a call that no variant fits is the first one with the modules that are passed, as of
        a method of many layers, and there is room for its variant."""
        return arguments.passes_modules_only and not self.of(arguments.key) and len(self) < _MOST

    def let_go_of_objects(self, most: int) -> None:
        """Drops variants that hold objects that were passed and that have served no call, but for the
        last ones: each call may pass new objects. most: how many are left."""
        idle = [v for v in self.all() if v.holds_objects and not v.has_served]
        dropped = set(idle[: max(0, len(idle) - most)])
        if dropped:
            kept = {k: [v for v in of if v not in dropped] for k, of in self._by_key.items()}
            self._by_key = {key: variants for key, variants in kept.items() if variants}
