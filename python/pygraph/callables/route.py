"""The way from a function of PyTorch's in a plain loop to its graph, and back where there is none."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from pygraph import runtime, signal_exceptions
from pygraph.callables import serving
from pygraph.callables.graphed import Graphed
from pygraph.options import Options


class _Call(threading.local):
    """passed: the list that is passed in the call under way. has_begun: whether the function itself has
    been called with it, in place of a replay."""

    passed: Any = None
    has_begun = False

    def begin(self, passed: Any) -> None:
        """The function is called, in a rehearsal maybe, which has a list of its own."""
        if passed is self.passed:
            self.has_begun = True


class Route:
    """Thread-safe as far as the function is."""

    def __init__(
        self, name: str, make: Callable[[Callable[[Any], None]], Callable[..., Any]], options: Options
    ) -> None:
        """make: makes the function that has a graph, which passes its first argument, a list, to the
        given one when it begins."""
        self._own = _Call()
        run = make(self._own.begin)
        run.__name__ = run.__qualname__ = name
        self.graphed = Graphed(run, dataclasses.replace(options, lanes=1), level=logging.INFO)

    @property
    def has_given_up(self) -> bool:
        return self.graphed.has_given_up

    def call(self, passed: list[Any], *rest: Any) -> tuple[Any] | None:
        """Makes a call, by a graph where there is one. Returns its result in a tuple, or None if
        nothing has been done. Raises what the function raises."""
        own = self._own
        own.passed, own.has_begun = passed, False
        serving.inside.is_made = False
        try:
            return (self.graphed(passed, *rest),)
        except Exception as error:
            if own.has_begun or serving.inside.is_made:
                raise  # the program's, or that of a signal's handler: nothing may be done twice
            signal_exceptions.pass_on(error)
            self.graphed.give_up(runtime.brief(error))
            return None
        finally:
            own.passed = None
