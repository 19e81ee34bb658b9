"""The range that marks the loading of a graph's arguments for profilers: skipped without a profiler.

Dynamo calls two Python functions for it, whether a profiler runs or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo import utils as dynamo_utils

_pytorchs_enter = dynamo_utils.record_pregraph_bytecode_enter
_pytorchs_exit = dynamo_utils.record_pregraph_bytecode_exit


def enter_range() -> Any:
    """As Dynamo's function; without a profiler it returns a context that does nothing."""
    return _pytorchs_enter() if torch.autograd.profiler._is_profiler_enabled else None


def exit_range(context: Any) -> None:
    if context is not None:
        _pytorchs_exit(context)


def apply() -> None:
    for ours in (enter_range, exit_range):  # frames of PyTorch's own are not traced either
        eval_frame.skip_code(ours.__code__)
    dynamo_utils.record_pregraph_bytecode_enter = enter_range
    dynamo_utils.record_pregraph_bytecode_exit = exit_range
