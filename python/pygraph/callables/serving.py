"""Whether calls of graphed callables can have graphs now: in this process, in this thread."""

from __future__ import annotations

import os
import threading

import torch

from pygraph import runtime

_USE_UNTESTED = "PYGRAPH_UNTESTED_GRAPH"  # environment variable

inside = threading.local()  # `is_calling`: whether the thread is in a call of a graphed callable


def why_not() -> str | None:
    """Why no callable has a graph in this process; None if callables may have one."""
    reason = runtime.unavailable_reason()
    if reason is None and os.environ.get(_USE_UNTESTED) != "1":
        return f"pygraph.graph is off by default ({_USE_UNTESTED}=1 switches it on)"
    return reason


def is_calling() -> bool:
    """Whether this thread is in a call of a graphed callable."""
    return getattr(inside, "is_calling", False)


def may_be_served() -> bool:
    """Whether calls of this thread can have graphs now."""
    if torch.autograd.forward_ad._current_level >= 0:  # tensors may have tangents
        return False
    if why_not() is not None or torch.compiler.is_compiling():
        return False
    if runtime.engine().are_operators_watched() or torch._C._functorch.peek_interpreter_stack():
        return False
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    return not torch.cuda.is_current_stream_capturing()
