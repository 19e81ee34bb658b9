"""Makes four of Dynamo's guards cheaper, for programs that PyGraph compiles.

    saved tensors' hooks   every program has a guard, in Python, that looks for default hooks on saved
                           tensors. Where there are none, the engine says so.
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

Guards know the method of Dynamo's that will make them from the time they are noted, which is before the
backend is called. So it is the call of that method which is replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import guards, symbolic_convert
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import (
    AttrSource,
    ChainedSource,
    GenericAttrSource,
    GlobalSource,
    LocalSource,
    TypeSource,
)
from torch._dynamo.variables.base import (
    AttributeMutationExisting,
    ValueMutationExisting,
    VariableTracker,
)
from torch._functorch._aot_autograd import utils as aot_utils
from torch._guards import Guard, Source

from pygraph import runtime
from pygraph.learned_cuts import Compilation
from pygraph.substitutes import digest_of

_dynamos_create = Guard.create
_dynamos_guard_hooks = getattr(guards.GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", None)
_dynamos_guard_attribute = getattr(guards.GuardBuilder, "HASATTR", None)

# Of the source of what is replaced.
_DIGEST_OF_HOOKS = "4cd8c804ac8105b6"
_DIGEST_OF_ATTRIBUTE = "15d8a69b7d7198cd"
_DIGEST_OF_CREATE = "e6b2f0a0f5c226e3"


def make_cheaper(compilation: Compilation | None = None) -> None:
    """The guards of the program that is being compiled; until :func:`set_back`. One of them fails when
    the compilation is to be made anew."""
    if digest_of((_dynamos_create,)) != _DIGEST_OF_CREATE:
        return
    ours: dict[Any, Callable[[guards.GuardBuilder, Guard], None]] = {}
    if _dynamos_guard_hooks and digest_of((_dynamos_guard_hooks,)) == _DIGEST_OF_HOOKS:
        ours[_dynamos_guard_hooks] = functools.partial(_guard_hooks, compilation)
    if _dynamos_guard_attribute and digest_of((_dynamos_guard_attribute,)) == _DIGEST_OF_ATTRIBUTE:
        ours[_dynamos_guard_attribute] = functools.partial(_guard_attribute, _writes_to_modules())

    translator = getattr(symbolic_convert.tls, "current_tx", None)
    output = translator.output if translator is not None else None

    def create(guard: Guard, builder: guards.GuardBuilder) -> Any:
        make = ours.get(guard.create_fn)
        if make:
            return make(builder, guard)
        if output is not None and not builder.save_guards:  # which can only store what has a name
            guard = _by_class(builder, guard, output)
        return _dynamos_create(guard, builder)

    Guard.create = create  # type: ignore[assignment,method-assign]


def set_back() -> None:
    """At the compilation's end."""
    Guard.create = _dynamos_create  # type: ignore[method-assign]


def _writes_to_modules() -> bool:
    """Whether the program changes modules that it found, or what may be part of one. The module's
    dictionaries change at every call then, so that it must be checked apart from others."""
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if translator is None:
        return True
    effects = translator.output.side_effects
    written = filter(effects.is_modified, effects.id_to_variable.values())
    return any(_may_be_of_a_module(variable, translator.output.root_tx) for variable in written)


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


def _guard_attribute(writes_to_modules: bool, builder: guards.GuardBuilder, guard: Guard) -> None:
    """As Dynamo's, that an object has an attribute, or has none of that name."""
    source = guard.originating_source
    if isinstance(source, AttrSource):
        owner, name = builder.get(source.base), source.member
        if not writes_to_modules and _is_method(owner, name):
            builder.TYPE_MATCH(Guard(source.base, guards.GuardBuilder.TYPE_MATCH))
            _keep_apart(builder, source)
            return
        if _is_behind_python(owner, name):
            builder.TYPE_MATCH(Guard(source.base, guards.GuardBuilder.TYPE_MATCH))
            if hasattr(owner, name):
                builder.get_guard_manager_from_source(GenericAttrSource(source.base, name))
            else:
                absence = functools.partial(guards.GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=name)
                absence(builder, Guard(source.base, absence))
            return
    assert _dynamos_guard_attribute is not None
    _dynamos_guard_attribute(builder, guard)


def _by_class(builder: guards.GuardBuilder, guard: Guard, output: OutputGraph) -> Guard:
    """The guard of the same attribute of a module's class, as something that all its modules share."""
    chain = [guard.originating_source]
    while isinstance(chain[-1], ChainedSource) and not isinstance(chain[-1], TypeSource):
        chain.append(chain[-1].base)
    to_class = chain.pop()
    if not chain or not isinstance(to_class, TypeSource):
        return guard
    module = builder.get(to_class.base)
    if not isinstance(module, torch.nn.Module):
        return guard
    builder.TYPE_MATCH(Guard(to_class.base, guards.GuardBuilder.TYPE_MATCH))
    source: Source = GlobalSource(output.install_global_by_id("__pygraph_class", type(module)))
    for link in reversed(chain):
        source = dataclasses.replace(link, base=source)  # type: ignore[call-arg]
    return dataclasses.replace(guard, originating_source=source)


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


def _has_inlineable_hooks() -> bool:
    hooks = aot_utils.top_saved_tensors_hooks()
    return bool(aot_utils.saved_tensors_hooks_are_inlineable(hooks))


def _guard_hooks(compilation: Compilation | None, builder: guards.GuardBuilder, guard: Guard) -> None:
    """As Dynamo's, for what is compiled without such hooks that could be inlined."""
    if _has_inlineable_hooks():
        assert _dynamos_guard_hooks is not None
        _dynamos_guard_hooks(builder, guard)
        return
    code = ["torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None"]
    builder._set_guard_export_info(guard, code, provided_func_name=guard.create_fn_name())

    def holds(_: object) -> bool:
        return not _has_inlineable_hooks() and (compilation is None or compilation.holds())

    builder.guard_manager.root.add_lambda_guard(
        runtime.engine().saved_hooks_guard(compilation.expired if compilation else [], holds),
        guards.get_verbose_code_parts([f"{code[0]}, and PyGraph has learned of no cut"], guard),
        guard.user_stack,
    )
    if compilation is not None:
        compilation.has_guard = True
