"""A profile function that is not told of what Dynamo does while it compiles: that would take several
times as long, and none of it is the program's."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from pygraph.undoing import Undo


def not_while_compiling(look: Callable[..., object], other: Any, undo: Undo) -> None:
    """look: this thread's profile function from now on, until ``undo`` is made. other: the one in its
    place while Dynamo compiles in this thread."""
    handler: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None:  # nothing has been compiled
        return
    thread = threading.get_ident()

    def exchange(one: Any, another: Any, of: Any = None) -> None:
        if threading.get_ident() == thread and sys.getprofile() is one:
            sys.setprofile(another)

    begin, end = functools.partial(exchange, look, other), functools.partial(exchange, other, look)
    for callbacks, callback in ((handler.start_callbacks, begin), (handler.end_callbacks, end)):
        undo.append(functools.partial(_remove, callbacks, callback))
        callbacks.append(callback)


def _remove(callbacks: list[Any], callback: Any) -> None:
    with contextlib.suppress(ValueError):  # removed before, or by torch._dynamo.reset()
        callbacks.remove(callback)
