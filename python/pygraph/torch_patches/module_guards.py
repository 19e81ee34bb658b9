"""Makes three kinds of Dynamo's guards cheaper, at the price that they miss some changes.

Only where the user asks for it: option ``pygraph.patches`` "all".

    attributes of modules  a loop over a Sequential or a ModuleList asks for ``__iter__``, and so does a
                           guard. In many models that is all that keeps Dynamo from checking the tree of
                           modules at once: it skips a module, and all in it, as long as none of its
                           dictionaries has changed, but only if nothing in it is looked up in other
                           ways. A method of a module's class is one of all such modules, so the class
                           is guarded instead.
    classes of modules     what a program looks up in a module's class is guarded once for each module
                           of the class, by way of the module, which keeps it from being skipped, too.
                           The module's class is guarded instead, and the class's attribute once.
    attributes behind      whether an object has an attribute is asked of its ``__getattribute__``,
    Python                 which in configurations of transformers is Python, and raises an exception
                           if it has none. Dynamo traces that function when the program asks, and
                           guards what it reads; so ``object``'s is asked instead.

Not noticed are a method deleted from a class, a module whose ``__class__`` or ``__dict__`` is replaced
in place, and an attribute given later to the class of an object of the third kind.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import guards
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import (
    AttrSource,
    CellContentsSource,
    ChainedSource,
    ClosureSource,
    DictGetItemSource,
    GenericAttrSource,
    GetItemSource,
    GlobalSource,
    LocalSource,
    TypeDictSource,
    TypeMROSource,
    TypeSource,
)
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._guards import Guard, Source

from pygraph.source_digest import digest_of

_dynamos_guard_attribute = getattr(guards.GuardBuilder, "HASATTR", None)
_DIGEST_OF_ATTRIBUTE = "15d8a69b7d7198cd"  # of its source

# What may be guarded by way of a class: values of these types, by these guards, found in these ways.
# Other guards know values by their source, as that of a tensor does.
_BY_CLASS = {
    "CLOSURE_MATCH": (types.FunctionType,),
    "CONSTANT_MATCH": (bool, int, float, str, type(None)),
}
_LINKS = (
    *(AttrSource, CellContentsSource, ClosureSource, DictGetItemSource, GetItemSource),
    *(TypeDictSource, TypeMROSource),
)


def makes_for(output: OutputGraph) -> dict[Any, Callable[[guards.GuardBuilder, Guard], bool]]:
    """By the methods of Dynamo's that would make such guards: what makes them here, or returns False.

    output: of the program that is being compiled, which has been traced.
    """
    makes: dict[Any, Callable[[guards.GuardBuilder, Guard], bool]] = {}
    if _dynamos_guard_attribute and digest_of((_dynamos_guard_attribute,)) == _DIGEST_OF_ATTRIBUTE:
        makes[_dynamos_guard_attribute] = functools.partial(
            _guard_attribute, _writes_to_modules(output)
        )
    for kind in _BY_CLASS:
        dynamos = getattr(guards.GuardBuilder, kind, None)
        if dynamos is not None:
            makes[dynamos] = functools.partial(_guard_by_class, weakref.ref(output), dynamos)
    return makes


def _writes_to_modules(output: OutputGraph) -> bool:
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


def _guard_attribute(writes_to_modules: bool, builder: guards.GuardBuilder, guard: Guard) -> bool:
    """As Dynamo's, that an object has an attribute, or has none of that name."""
    source: Any = guard.originating_source
    if type(source) is not AttrSource:
        return False
    owner, name = builder.get(source.base), source.member
    if not writes_to_modules and _is_method(owner, name):
        builder.TYPE_MATCH(Guard(source.base, guards.GuardBuilder.TYPE_MATCH))
        _keep_apart(builder, source)
        return True
    if not _is_behind_python(owner, name):
        return False
    builder.TYPE_MATCH(Guard(source.base, guards.GuardBuilder.TYPE_MATCH))
    if hasattr(owner, name):
        builder.get_guard_manager_from_source(GenericAttrSource(source.base, name))
    else:
        absence = functools.partial(guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
        absence(builder, Guard(source.base, absence))
    return True


def _guard_by_class(
    output: weakref.ref[OutputGraph], dynamos: Any, builder: guards.GuardBuilder, guard: Guard
) -> bool:
    """The guard of the same attribute of a module's class, as something that all its modules share."""
    chain: list[Any] = [guard.originating_source]
    while type(chain[-1]) in _LINKS:
        chain.append(chain[-1].base)
    to_class, graph = chain.pop(), output()
    if not chain or type(to_class) is not TypeSource or graph is None:
        return False
    module = builder.get(to_class.base)
    if not isinstance(module, torch.nn.Module):
        return False
    if type(builder.get(guard)) not in _BY_CLASS[guard.create_fn_name()]:
        return False
    name = graph.install_global_by_id("__pygraph_class", type(module))
    source: Source = GlobalSource(name)
    for link in reversed(chain):
        source = dataclasses.replace(link, base=source)
    builder.TYPE_MATCH(Guard(to_class.base, guards.GuardBuilder.TYPE_MATCH))
    dynamos(builder, dataclasses.replace(guard, originating_source=source, create_fn=dynamos))
    return True


def _is_method(value: Any, name: str) -> bool:
    """Whether a module has this attribute from its class, whatever else it has."""
    if not isinstance(value, torch.nn.Module) or name in value.__dict__:
        return False
    return isinstance(inspect.getattr_static(type(value), name, None), types.FunctionType)


def _is_behind_python(owner: Any, name: str) -> bool:
    """Whether an object's ``__getattribute__`` is Python, and does as ``object``'s for this name: has
    what that finds, or has nothing of the name."""
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


def _keep_apart(builder: guards.GuardBuilder, source: Source) -> None:
    """Lets the model itself be checked at each call, and what it consists of be skipped.

    Once a dictionary in a tree has changed, Dynamo checks all of that tree at each call from then on,
    and it is the model itself that programs set attributes of. A look-up that always succeeds does it.
    """
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
