"""Answers the guard on default hooks for saved tensors without Python if there are none.

Every program has this guard. If there are such hooks, Dynamo's own function decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import guards
from torch._functorch._aot_autograd import utils as aot_utils
from torch._guards import Guard

from pygraph import runtime
from pygraph.torch_patches.guards import make_by
from pygraph.torch_patches.state import Attempt

_CODE = "torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None"


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    make_by(output, "AUTOGRAD_SAVED_TENSORS_HOOKS", _make, attempt)


def _make(builder: guards.GuardBuilder, guard: Guard) -> bool:
    """As Dynamo's, for what is compiled without such hooks that could be inlined."""
    if _has_inlineable_hooks(None):
        return False
    check = runtime.engine().saved_hooks_guard(lambda argument: not _has_inlineable_hooks(argument))
    parts = guards.get_verbose_code_parts([_CODE], guard)
    builder._set_guard_export_info(guard, [_CODE], provided_func_name=guard.create_fn_name())
    builder.guard_manager.root.add_lambda_guard(check, parts, guard.user_stack)
    return True


def _has_inlineable_hooks(_: object) -> bool:
    hooks = aot_utils.top_saved_tensors_hooks()
    return bool(aot_utils.saved_tensors_hooks_are_inlineable(hooks))
