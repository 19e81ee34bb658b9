"""What PyGraph changes in PyTorch to make calls cheaper: how much of it, and what ends a change.

Two kinds of changes are made. Those of one *compilation* change objects that belong to it: its guards,
its graph's arguments, its OutputGraph. They are gone with these objects; no other compilation sees
them, be it around this one, within it, or in another thread. Those of the *process* replace a function
by an equal one, which gives the same result for every program of every backend.

Programs do not need any of them. So an error in one never reaches the user: it is logged once, and
the rest of the compilation goes on as PyTorch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pygraph import runtime
from pygraph.options import ALL, EXACT, NONE


class Changes:
    """The changes of one compilation, which runs in one thread."""

    def __init__(self, level: str = EXACT) -> None:
        """level: "exact" for those with which guards notice what Dynamo's notice, "all" for those with
        which they do not notice some changes of classes and of ``__dict__``, too."""
        self.misses_some = level == ALL
        self.goes_on = level != NONE

    @contextlib.contextmanager
    def trying(self, change: str) -> Iterator[None]:
        """Errors end here, and with them the compilation's changes."""
        try:
            yield
        except Exception as error:
            self.goes_on = False
            note_failure(change, error)


def note_failure(change: str, error: Exception) -> None:
    """Logs it, once for each kind of error."""
    runtime.notice_once(f"PyGraph leaves {change} to PyTorch: {type(error).__name__}: {error}")
