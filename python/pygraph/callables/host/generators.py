"""Generators and coroutines: where their variables are, and what they go through."""

from __future__ import annotations

import gc
import types
from typing import Any

from pygraph.callables.host.kinds import is_of

_GENERATORS = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}
GENERATORS = tuple(_GENERATORS)


def frame_of(generator: Any) -> types.FrameType | None:
    """Of a generator, a coroutine or an asynchronous generator; None if it has ended."""
    frame: types.FrameType | None = getattr(generator, f"{_prefix_of(generator)}_frame")
    return frame


def code_of(generator: Any) -> types.CodeType:
    code: types.CodeType = getattr(generator, f"{_prefix_of(generator)}_code")
    return code


def _prefix_of(generator: Any) -> str:
    return next(prefix for kind, prefix in _GENERATORS.items() if is_of(generator, kind))


def iterators_of(generator: Any) -> list[Any]:
    """Those that its loops go through, and what it yields from or awaits."""
    found = gc.get_referents(generator)
    return [of for of in found if hasattr(type(of), "__next__") or is_of(of, GENERATORS)]
