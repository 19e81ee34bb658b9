"""Which calls of a callable run uncaptured from now on, and why."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from pygraph.callables.host.host_state import HostState

_MOST_KINDS = 256  # of calls that are remembered
_MOST_WITH_OBJECTS = 8  # of these, those that hold the objects that were passed
_CALLS_PER_OBSERVATION = 100  # once observing has stopped: one call in so many


class RefusedCalls:
    """why_not_observed: why calls that no variant fits are not observed any more; empty while they are.
    Not thread-safe."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """tell: is called with each reason, once."""
        self.why_not_observed = ""
        self._tell = tell
        self._kinds: dict[Hashable, tuple[str, Any]] = {}
        self._with_objects = 0  # kinds of calls
        self._passed = 0  # calls since then
        self._incomparable = ""  # why some calls have no key

    def __len__(self) -> int:
        return len(self._kinds)

    def refuse(
        self, key: Hashable, reason: str, host: HostState | None, holds_objects: bool = False
    ) -> None:
        """Calls with this key run uncaptured, until a switch on the host changes: a module's mode,
        say. holds_objects: whether the host's state has objects that were passed, which may be new ones
        in each call."""
        if key not in self._kinds and len(self._kinds) < _MOST_KINDS:
            if holds_objects:
                self._with_objects += 1
                host = host if self._with_objects <= _MOST_WITH_OBJECTS else None
            self._kinds[key] = (reason, None if host is None else host.switches())
            self._tell(reason)

    def has(self, key: Hashable) -> bool:
        found = self._kinds.get(key)
        if found is None:
            return False
        are_same = found[1]
        if are_same is None or are_same():
            return True
        self._kinds.pop(key, None)
        return False

    def refuse_incomparable(self) -> None:
        """A call whose arguments have no key."""
        if not self._incomparable:
            reason = (
                "an argument is a tensor with attributes, or has a structure that cannot be compared"
            )
            self._incomparable = reason
            self._tell(reason)

    def stop_observing(self, reason: str) -> None:
        if not self.why_not_observed:
            self.why_not_observed = reason
            # Their switches are of no use any more, and hold what was passed.
            self._kinds = {key: (why, None) for key, (why, _) in self._kinds.items()}
            self._tell(reason)

    def is_to_be_observed(self) -> bool:
        """Counts a call that no variant is known to serve. False if it just runs uncaptured."""
        if not self.why_not_observed:
            return True
        self._passed += 1
        return self._passed % _CALLS_PER_OBSERVATION == 0

    def reasons(self) -> dict[Any, str]:
        """All of them, each with something that identifies it."""
        found: dict[Any, str] = {key: reason for key, (reason, _) in self._kinds.items()}
        return found | {r: r for r in (self.why_not_observed, self._incomparable) if r}
