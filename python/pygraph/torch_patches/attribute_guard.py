"""Attributes of objects whose ``__getattribute__`` is Python, guarded without calling it: by
``object.__getattribute__`` (docs/explanation/before-each-call.md).

An attribute that is added to the class of such an object later is not noticed.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.source import AttrSource, GenericAttrSource
from torch._guards import Guard

from pygraph.torch_patches.guards import make_by
from pygraph.torch_patches.state import Attempt


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    make_by(output, "HASATTR", _make, attempt)


def _make(builder: guards.GuardBuilder, guard: Guard) -> bool:
    """The guard of Dynamo's ``HASATTR``: that an object has an attribute of that name, or has none."""
    source, name = _owner_and_name(guard)
    if source is None:
        return False
    owner = builder.get(source)
    if not _is_behind_python(owner, name):
        return False
    builder.TYPE_MATCH(Guard(source, guards.GuardBuilder.TYPE_MATCH))
    if hasattr(owner, name):
        builder.get_guard_manager_from_source(GenericAttrSource(source, name))
    else:
        absence = functools.partial(guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
        absence(builder, Guard(source, absence))
    return True


def _owner_and_name(guard: Guard) -> tuple[Any, str]:
    """The source of the object that is asked for an attribute (None if unknown), and the attribute's
    name."""
    bound = getattr(guard.create_fn, "keywords", {})
    if "attr" in bound:  # from PyTorch 2.12 on
        return guard.originating_source, bound["attr"]
    source: Any = guard.originating_source
    return (source.base, source.member) if type(source) is AttrSource else (None, "")


def _is_behind_python(owner: Any, name: str) -> bool:
    """Whether an object's ``__getattribute__`` is Python, and gives the same result as ``object``'s for
    this name: the same attribute, or none."""
    kind = type(owner)
    lookup = inspect.getattr_static(kind, "__getattribute__")
    is_python = isinstance(lookup, types.FunctionType) and not hasattr(kind, "__getattr__")
    if not is_python or not isinstance(getattr(owner, "__dict__", None), dict):
        return False
    absent = object()
    try:
        found = object.__getattribute__(owner, name)
    except AttributeError:
        if any(name in vars(base) for base in kind.__mro__):  # a property, say, that fails for now
            return False
        found = absent
    return getattr(owner, name, absent) is found
