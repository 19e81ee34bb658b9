"""Whether a call prints or logs: the host's state has no trace of it, and a replay does not do it."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from typing import Any

from pygraph.undoing import Undo


class _Counting:
    """A stream that notes writes of one thread, and passes all on."""

    def __init__(self, stream: Any, seen: set[str]) -> None:
        self.of = stream
        self._seen = seen
        self._thread = threading.get_ident()

    def write(self, text: str) -> Any:
        if threading.get_ident() == self._thread:
            self._seen.add("what is printed")
        return self.of.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def watch_output(undo: Undo) -> set[str]:
    """What this thread does from now on: "what is printed", "what is logged", "what it warns of". (Not
    of streams that were looked up before, nor of files.)"""
    seen: set[str] = set()
    thread = threading.get_ident()
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    make_record = logging.getLogRecordFactory()

    def noting(*args: Any, **kwargs: Any) -> logging.LogRecord:
        if threading.get_ident() == thread:
            seen.add("what is logged")
        return make_record(*args, **kwargs)

    def noting_warning(message: Any) -> Any:
        if threading.get_ident() == thread:
            seen.add("what it warns of")  # a program may collect it, and print nothing
        return show_warning(message)

    def put_back() -> None:
        if of_warnings.get("_showwarnmsg") is noting_warning:
            of_warnings["_showwarnmsg"] = show_warning
        for name, stream in own.items():
            if getattr(sys, name) is stream:  # nobody has redirected it meanwhile
                setattr(sys, name, streams[name])
        if logging.getLogRecordFactory() is noting:
            logging.setLogRecordFactory(make_record)
        for handler in [of() for of in logging._handlerList]:  # type: ignore[attr-defined]
            kept = vars(handler).get("stream") if handler is not None else None
            if type(kept) is _Counting:  # of a handler that was made meanwhile
                vars(handler)["stream"] = kept.of

    of_warnings = vars(warnings)
    show_warning: Any = of_warnings.get("_showwarnmsg")
    own = {n: _Counting(s, seen) for n, s in streams.items() if s is not None}
    undo.append(put_back)
    for name, stream in own.items():
        setattr(sys, name, stream)
    logging.setLogRecordFactory(noting)
    if show_warning is not None:
        of_warnings["_showwarnmsg"] = noting_warning
    return seen
