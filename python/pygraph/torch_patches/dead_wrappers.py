"""Arguments of torch.autograd.Function: the engine checks whether one of them has to be unwrapped.

PyTorch checks each argument, in Python, for wrappers that function transforms have left. The forward of
a compiled program that is trained is a torch.autograd.Function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.utils as functorch_utils
from torch._dynamo import eval_frame

from pygraph import runtime

pytorchs_unwrap = functorch_utils.unwrap_dead_wrappers


def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """As PyTorch's, which makes a new tuple, and which Dynamo can trace."""
    may_be_left = torch.compiler.is_compiling() or runtime.engine().has_transform_wrapper(args)
    return pytorchs_unwrap(args) if may_be_left else args


def apply() -> None:
    eval_frame.skip_code(unwrap_dead_wrappers.__code__)  # as frames of PyTorch's own
    functorch_utils.unwrap_dead_wrappers = unwrap_dead_wrappers
