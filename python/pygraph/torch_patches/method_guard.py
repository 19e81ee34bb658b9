"""Guards methods of modules, such as ``__iter__`` of a ModuleList, through their class, so that Dynamo
can skip the modules (docs/explanation/before-each-call.md).

Two changes are not noticed: a method deleted from a class, and a module whose ``__class__`` or
``__dict__`` is replaced in place.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.source import AttrSource, ChainedSource, LocalSource
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._guards import Guard, Source

from pygraph.torch_patches.guards import make_by
from pygraph.torch_patches.state import Attempt


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    if not _writes_to_modules(output):
        make_by(output, "HASATTR", _make, attempt)


def _make(builder: guards.GuardBuilder, guard: Guard) -> bool:
    """As Dynamo's, that an object has an attribute."""
    source: Any = guard.originating_source
    if type(source) is not AttrSource or not _is_method(builder.get(source.base), source.member):
        return False
    builder.TYPE_MATCH(Guard(source.base, guards.GuardBuilder.TYPE_MATCH))
    _keep_apart(builder, source)
    return True


def _is_method(value: Any, name: str) -> bool:
    """Whether a module has this attribute from its class, whatever else it has."""
    if not isinstance(value, torch.nn.Module) or name in value.__dict__:
        return False
    return isinstance(inspect.getattr_static(type(value), name, None), types.FunctionType)


def _keep_apart(builder: guards.GuardBuilder, source: Source) -> None:
    """Lets the model itself, whose attributes programs set, be checked at each call, and what it
    consists of be skipped. A look-up that always succeeds does it."""
    while isinstance(source, ChainedSource):
        source = source.base
    model = builder.get(source)
    if isinstance(model, torch.nn.Module):
        builder.get_guard_manager_from_source(source).getattr_manager(
            attr="__class__",
            source=f"{source.name}.__class__",
            example_value=type(model),
            guard_manager_enum=guards.GuardManagerType.GUARD_MANAGER,
        )


def _writes_to_modules(output: Any) -> bool:
    """Whether the program changes modules that it found, or what may be part of one. The module's
    dictionaries change at every call then, so that it must be checked apart from others."""
    effects = output.side_effects
    written = filter(effects.is_modified, effects.id_to_variable.values())
    return any(_may_be_of_a_module(variable, output.root_tx) for variable in written)


def _may_be_of_a_module(variable: VariableTracker, frame: Any) -> bool:
    """Whether writing to what the program found may change a dictionary of a module."""
    if isinstance(variable.mutation_type, AttributeMutationExisting):
        written = getattr(variable, "value", None)
        return written is None or isinstance(written, torch.nn.Module)
    if not isinstance(variable.mutation_type, ValueMutationExisting):
        return False
    source = variable.source
    is_keywords = isinstance(source, LocalSource) and source.local_name == _keywords_of(frame.f_code)
    return not is_keywords  # which are a new dictionary at each call


def _keywords_of(code: types.CodeType) -> str:
    """The name of a function's ``**`` argument, or an empty one."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return ""
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + has_more]
