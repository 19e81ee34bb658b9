"""Which results of a callable a replay can make.

A replay makes tensors of the plain class, in containers that are new. All else of a result is what it
was in the recording: the same objects, in each call.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime, signal_exceptions
from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.walk import may_have_slots
from pygraph.callables.signature import attributes_of

_VALUES = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


def flattened(result: Any) -> tuple[list[Any], Any]:
    """Its leaves and its structure. What cannot be taken apart, as it contains itself, is one leaf."""
    try:
        return pytree.tree_flatten(result)
    except Exception as error:  # of the program's containers
        signal_exceptions.pass_on(error)
        return [result], pytree.tree_structure(None)


def unfit(result: Any, leaves: list[Any], args: Any, host: HostState) -> str:
    """Why a replay could not return what an observed call has returned; empty if it could. args: what
    is passed. host: before the call, which may keep a container of the result from then on."""
    try:
        reason = unfit_result(leaves) or _new_parameter(leaves, pytree.tree_leaves(args))
        containers = _containers_in(result)
        if reason or not containers:
            return reason
        return _own_container(containers, args, host) or _own_container(containers, args, host.now())
    except (MemoryError, torch.OutOfMemoryError):  # the call is looked at no further
        return ""
    except Exception as error:  # of the program's containers
        signal_exceptions.pass_on(error)
        return runtime.brief(error)


def unfit_result(leaves: Iterable[Any]) -> str:
    """Why a replay could not make such a result; empty if it could."""
    for leaf in leaves:
        if is_of(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                return f"it returns a {type(leaf).__name__}"
            attributes = attributes_of(leaf)
            if attributes:
                return (
                    f"it returns a tensor with the attribute {min(attributes)}, which that of a replay "
                    "would not have; return its value beside the tensor"
                )
        elif not is_of(leaf, _VALUES):
            return f"it returns a {type(leaf).__name__}, which may refer to tensors"
        elif type(leaf) not in _VALUES and not is_of(leaf, enum.Enum) and may_have_slots(type(leaf)):
            return (
                f"it returns a {type(leaf).__name__}, which would be the same object in each replay; "
                "return the plain number or text"
            )
    return ""


def _new_parameter(leaves: Iterable[Any], passed: Iterable[Any]) -> str:
    """The reason if a result is a parameter that is not passed; empty if none is."""
    known = set(map(id, passed))
    if any(is_of(leaf, torch.nn.Parameter) and id(leaf) not in known for leaf in leaves):
        return "it returns a Parameter, which would be a plain tensor after a replay; make it outside"
    return ""


def _own_container(containers: list[Any], args: Any, host: HostState) -> str:
    """The reason if a container of the result is one that the callable keeps or was passed, or is in it
    twice, which is not so after a replay; empty if neither. args: what is passed."""
    found = host.found
    kept = (*(of for of, _, _ in found.dicts), *found.lists, *found.deques, *found.instances)
    own = set(map(id, kept))
    passed = set(map(id, _containers_in(args)))
    met: set[int] = set()
    for container in containers:
        if id(container) in own:
            return "it returns a list or a dictionary that it keeps; return a copy"
        if id(container) in passed:
            return "it returns a list or a dictionary that is passed to it; return a copy"
        if id(container) in met:
            return "it returns a list or a dictionary twice; return a copy"
        met.add(id(container))
    return ""


def _containers_in(tree: Any) -> list[Any]:
    """Those that can be changed."""
    found: list[Any] = []

    def note(node: Any) -> bool:
        found.append(node)
        return False

    leaves = pytree.tree_leaves(tree, is_leaf=note)
    others = set(map(id, leaves))
    return [node for node in found if id(node) not in others and not is_of(node, tuple)]
