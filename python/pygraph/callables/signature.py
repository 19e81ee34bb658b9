"""What distinguishes calls of a callable by what is passed, and by PyTorch's modes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call, taken apart.

    tensors: those among the leaves, each once. numbers: by leaf, which of them it is. objects: leaves
    that are neither tensors nor values, by name; the callable may read and change them.
    key: equal for calls that differ in nothing but their tensors' contents, addresses and layouts.
    """

    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]
    numbers: dict[int, int]
    objects: dict[str, Any]
    key: Hashable


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """None for arguments that cannot be compared: a structure without a hash, or tensors of a class of
    the program's, or with attributes."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    objects: dict[str, Any] = {}
    places: list[Hashable] = []
    numbers: dict[int, int] = {}
    known: dict[int, int] = {}  # by identity
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or vars(leaf):
                return None
            numbers[i] = number = known.setdefault(id(leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
            places.append((torch.Tensor, number, leaf.requires_grad))
        elif isinstance(leaf, _VALUES):
            places.append((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf))
        else:
            objects[f"argument {i}"] = leaf
            places.append((object, id(leaf)))
    key = (spec, tuple(places), modes())
    try:
        hash(key)
    except TypeError:
        return None
    return Arguments(leaves, spec, tensors, numbers, objects, key)


def is_same_structure(arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the containers that are passed still have what they had."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    pairs = zip(leaves, arguments.leaves, strict=False)
    return spec == arguments.spec and all(a is b for a, b in pairs)


def put_together(arguments: Arguments, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other tensors, for a call."""
    numbers = arguments.numbers
    leaves = [tensors[numbers[i]] if i in numbers else leaf for i, leaf in enumerate(arguments.leaves)]
    args, kwargs = pytree.tree_unflatten(leaves, arguments.spec)
    return args, kwargs


def layouts_of(arguments: Arguments) -> list[Any]:
    """What a callable could change of the tensors that are passed, besides their contents."""
    return [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.data_ptr(), id(t.grad))
        if t.layout == torch.strided and t.is_leaf
        else t.layout
        for t in arguments.tensors
    ]


def modes() -> Hashable:
    """PyTorch's, of this thread, that Python and operators obey, and that are no switches of the
    engine's (bindings/tensors/switches.h)."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.initial_seed(),
        torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cuda", "cpu")),
    )
