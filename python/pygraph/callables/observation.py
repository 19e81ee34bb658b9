"""What is seen of one uncaptured call (observed_call.py): its result, and what it used and changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.kinds import is_of
from pygraph.callables.signature import attributes_of


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
    """Those whose gradients a backward may set."""
    return [t for t in host.found.tensors.values() if t.requires_grad and t.is_leaf]


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
