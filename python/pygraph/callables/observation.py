"""What is seen of one uncaptured call (observed_call.py): its result, and what it used and changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.kinds import is_of, items_of_dict
from pygraph.callables.host.user_code import mentions
from pygraph.callables.signature import attributes_of

_PYTORCH = os.path.dirname(torch.__file__) + os.sep


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What a call does to the gradient of one tensor.

    is_used: whether it reads or writes the one from before. is_counted: whether it has increased the
    version of that one. after: "kept" (the same object), "none", or "made" (another object).
    """

    tensor: torch.Tensor
    is_used: bool
    is_counted: bool
    after: str


@dataclasses.dataclass(frozen=True)
class Form:
    """Of a result. spec: its tree. kinds: of its leaves. detached: leaves whose backward is run in the
    call. is_differentiable: whether gradients flow from other results, or could flow to arguments.
    inference: leaves that are tensors of ``torch.inference_mode``."""

    spec: Any
    kinds: tuple[type, ...]
    detached: frozenset[int]
    is_differentiable: bool = False
    inference: frozenset[int] = frozenset()


@dataclasses.dataclass
class Observation:
    """result: the call's. form: of it. host: the host's state afterwards. effects: paths on the host
    that the call changed. state: the memory that it used and that was not passed. refusal: why the
    callable cannot have a graph; empty if it can. is_complete: False if memory was too short to see all
    of this."""

    result: Any
    form: Form
    host: HostState
    effects: list[str] = dataclasses.field(default_factory=list)
    state: Any = None
    gradients: list[Gradient] = dataclasses.field(default_factory=list)
    refusal: str = ""
    is_complete: bool = True


def watched_tensors(host: HostState) -> list[torch.Tensor]:
    """Those that may have gradients of their own: a backward sets them where a tensor requires one, a
    program may set them of any tensor, and optimizers and clipping use all that there are. Nobody
    uses those of an optimizer's moments, unless the code reads gradients by itself."""
    tensors = [t for t in host.found.tensors.values() if t.is_leaf or t.retains_grad]
    codes = [function.__code__ for function in host.found.functions]
    if any(mentions(code, "grad") and not code.co_filename.startswith(_PYTORCH) for code in codes):
        return tensors
    moments = _moments(host.found.optimizers.values())
    return [t for t in tensors if t.requires_grad or id(t) not in moments or t.grad is not None]


def _moments(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """By identity: the tensors of their states."""
    states = [state for of in optimizers for state in of.state.values() if type(state) is dict]
    return {id(item) for state in states for _, item in items_of_dict(state)}


def version_of(tensor: torch.Tensor | None) -> int | None:
    """How often autograd was told that it was written. None for one that was made in inference mode."""
    try:
        return None if tensor is None else int(tensor._version)
    except RuntimeError:
        return None


def attributes_of_gradients(tensors: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [{} if t.grad is None else attributes_of(t.grad) for t in tensors]


def are_marked(gradients: list[Gradient], before: list[dict[str, Any]]) -> bool:
    """Whether a call has given attributes to gradients that it leaves. before: those of the gradients
    from before it."""
    after = attributes_of_gradients([gradient.tensor for gradient in gradients])
    for gradient, old, new in zip(gradients, before, after, strict=True):
        kept = old if gradient.after == "kept" else {}
        if kept.keys() != new.keys() or any(kept[name] is not new[name] for name in new):
            return True
    return False


def kinds_of(leaves: list[Any]) -> tuple[type, ...]:
    return tuple(torch.Tensor if is_of(leaf, torch.Tensor) else type(leaf) for leaf in leaves)


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if is_of(leaf, torch.Tensor)]


def fate(old: torch.Tensor | None, new: torch.Tensor | None) -> str:
    if new is old:
        return "kept"
    return "none" if new is None else "made"
