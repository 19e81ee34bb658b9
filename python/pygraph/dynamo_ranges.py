"""Leaves Dynamo's own ranges for profilers out of what is compiled for PyGraph.

Dynamo brackets the code that loads a graph's arguments with a range ("Pregraph bytecode"). Entering and
leaving it takes two calls of Python functions, profiler or not: 2 us of the 12 us that Dynamo takes for
a call of a small module. ``torch._dynamo.config.record_runtime_overhead`` turns it off. Dynamo reads it
once the backend has returned, so it is off from then to the end of the compilation, for which Dynamo
has callbacks.
"""

from __future__ import annotations

import torch._dynamo.config as dynamo_config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._guards import CompileContext

_is_left_out = False  # whether the value is to be set back; Dynamo compiles under one lock


def leave_out() -> None:
    """Until the end of the compilation that is going on, if there is one."""
    global _is_left_out
    if CompileContext.current_compile_id() is None or not dynamo_config.record_runtime_overhead:
        return
    if _set_back not in callback_handler.end_callbacks:  # torch._dynamo.reset() removes it
        callback_handler.register_end_callback(_set_back)
    dynamo_config.record_runtime_overhead = False
    _is_left_out = True


def _set_back(_: CallbackArgs) -> None:
    global _is_left_out
    if _is_left_out:
        dynamo_config.record_runtime_overhead = True
        _is_left_out = False
