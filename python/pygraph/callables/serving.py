"""Whether calls of graphed callables can have graphs now: in this process, in this thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.utils import parametrize

from pygraph import runtime

# Of the thread. `is_calling`: whether it is in a call of a graphed callable. `is_made`: whether that
# call is made, by a replay or else, so that it must not be made again.
inside = threading.local()


def is_calling() -> bool:
    """Whether this thread is in a call of a graphed callable."""
    return getattr(inside, "is_calling", False)


def may_be_served() -> bool:
    """Whether calls of this thread can have graphs now."""
    if torch.autograd.forward_ad._current_level >= 0:  # tensors may have tangents
        return False
    if runtime.unavailable_reason() is not None or torch.compiler.is_compiling():
        return False
    if runtime.engine().are_operators_watched() or torch._C._functorch.peek_interpreter_stack():
        return False
    if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return False
    if parametrize._cache_enabled:  # parametrized weights may be those of an earlier call
        return False
    return not torch.cuda.is_current_stream_capturing()


def look_at_memory() -> None:
    """Before a call that may not be served. Graphs drop their blocks if memory is short."""
    if torch.compiler.is_compiling() or runtime.unavailable_reason() is not None:
        return
    if not torch.cuda.is_current_stream_capturing():
        runtime.engine().drop_blocks_if_short()


def served_calls() -> Any:
    """Of one callable: those that the engine makes without Python (bindings/callables/served_calls.h).
    The engine asks what ``may_be_served`` asks, but for what is the same as long as a process lives."""
    hooks: Any = torch.nn.modules.module
    variables = [
        (vars(torch.autograd.forward_ad), "_current_level", -1),
        (vars(torch.compiler), "_is_compiling_flag", False),
        (vars(parametrize), "_cache_enabled", 0),
        *((vars(hooks), name, None) for name in hooks._has_any_global_hook.__code__.co_names),
    ]
    transform = torch._C._functorch.peek_interpreter_stack
    try:
        return runtime.engine().served_calls(inside, runtime._own, variables, transform)
    except ImportError:  # there is none for this PyTorch
        return lambda args, kwargs: None
