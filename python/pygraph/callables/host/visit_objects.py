"""Tensors and other instances that a callable can reach."""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pygraph import runtime
from pygraph.callables.host import probes
from pygraph.callables.host.kinds import attributes_of_instance, hides_attributes, is_of, items_of_dict
from pygraph.callables.host.schedulers import is_told
from pygraph.callables.host.shared_objects import flag_of, names_set_by
from pygraph.callables.host.user_code import is_of_compiler
from pygraph.callables.host.visit_code import visit_class
from pygraph.callables.host.visit_containers import visit_dict, visit_held
from pygraph.callables.host.walk import (
    Object,
    Unseen,
    Walk,
    free_path,
    may_change_its_class,
    may_have_slots,
)

# torch._ops keeps the overloads that were asked for, to which C++ refers: none may be taken away again.
_LEFT_ALONE = ("torch._ops.", "pygraph.")
# Of these, what a program has given them is visited.
_OF_PYTHONS_THREADS = ("logging.", "threading.", "multiprocessing.", "concurrent.")
_VISITED = (torch.nn.Module, logging.LoggerAdapter)  # like other objects, wherever they are from
_LOCK = type(threading.Lock())
# Of all optimizers (register_optimizer_step_pre_hook).
_HOOKS_OF_OPTIMIZERS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def visit_tensor(walk: Walk, tensor: torch.Tensor, path: str) -> None:
    path = free_path(path, walk.found.tensors)
    type_ = type(tensor)
    walk.add_slot(path, Object(type_, id(tensor)))
    if walk.is_new(type_):
        visit_class(walk, type_, type_.__name__)
    if type_ not in (torch.Tensor, torch.nn.Parameter):
        _visit_slots(walk, tensor, path)
    walk.add_slot(f"{path}.requires_grad", tensor.requires_grad)
    # Before 2.15 PyTorch tells the type of a leaf's gradient only.
    grad_dtype = getattr(tensor, "grad_dtype", None) if tensor.is_leaf else None
    walk.add_slot(f"{path}.grad_dtype", (grad_dtype, tensor.retains_grad))
    walk.add_slot(f"{path}.grad#hooks", runtime.engine().has_accumulator_hooks(tensor))
    if tensor.layout == torch.strided:
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        walk.add_slot(f"{path}.layout", (*layout, tensor.is_conj(), tensor.is_neg()))
    walk.found.tensors[path] = tensor
    hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    walk.pending.extend((of, f"{path}.hooks") for of in hooks if of is not None)
    visit_dict(walk, vars(tensor), f"{path}.", attributes=True)
    if probes.is_on_host(tensor):
        walk.add_probe(f"{path}#values", functools.partial(probes.values_of, tensor))


def visit_instance(walk: Walk, value: Any, path: str, is_opaque: bool) -> None:
    type_ = type(value)
    if is_of(value, (torch.Event, torch.cuda.Event)):
        walk.found.events.append(path)
    walk.add_slot(f"{path}.__class__", Object(type, id(type_)))
    if type_.__name__ == "cython_function_or_method":  # as NumPy's are
        walk.found.builtins.add(value.__name__)
    if hasattr(type_, "graphed_attributes"):  # a graphed callable inside of this one
        _visit_graphed(walk, value, path)
    if is_of(value, torch.jit.ScriptModule):
        _visit_script(walk, value, path)
    if _is_left_alone(type_) and not is_of(value, _VISITED):
        if is_of(value, logging.Logger):
            walk.loggers.append(value)
        flag = flag_of(value)
        if flag is not None:
            walk.add_probe(path, flag)
        visit_held(walk, probes.contents_of(value), path)
        walk.add_slot(path, Object(type_, id(value)))
        _visit_given(walk, value, path)
        return
    if is_told(type_):
        walk.found.schedulers[free_path(path, walk.found.schedulers)] = value
        walk.add_slot(path, Object(type_, id(value)))
        if walk.is_new(type_):
            visit_class(walk, type_, type_.__name__)
        return
    if (type_.__module__ != "builtins" or may_have_slots(type_)) and walk.is_new(type_):
        visit_class(walk, type_, type_.__name__)
    if is_of(value, torch.optim.Optimizer):
        walk.found.optimizers[free_path(path, walk.found.optimizers)] = value
        walk.pending.extend((of, "torch.optim.optimizer hooks") for of in _HOOKS_OF_OPTIMIZERS)
    attributes = attributes_of_instance(value)
    if attributes is None and hides_attributes(type_):
        raise Unseen(f"{path} has a class that hides its attributes")
    if is_of(attributes, dict):
        walk.found.instances.append(value)
        _visit_attributes(walk, value, attributes, path)
    elif may_change_its_class(value):
        walk.found.instances.append(value)
    has_slots = _visit_slots(walk, value, path)
    if is_of(value, _LOCK):
        walk.locks.append((path, value))
    probe = probes.probe_of(value)
    if probe is not None:
        walk.add_probe(path, probe)
    visit_held(walk, probes.contents_of(value), path)
    if probe is None and is_opaque and not has_slots and not is_of(attributes, dict):
        if hasattr(type_, "__next__"):
            raise Unseen(f"{path} is an iterator whose position cannot be read")
        walk.add_slot(path, Object(type_, id(value)))


def _visit_graphed(walk: Walk, value: Any, path: str) -> None:
    """What the program has stored in its attributes."""
    names = tuple(value.graphed_attributes())
    walk.add_probe(f"{path}#attributes", value.graphed_attributes)
    walk.found.dicts.append((vars(value), names, ()))
    walk.pending.extend((vars(value)[name], f"{path}.{name}") for name in names)
    walk.visit_later(value.__wrapped__, path)


def _visit_attributes(walk: Walk, value: Any, attributes: dict[str, Any], path: str) -> None:
    if not walk.is_new_at(attributes, f"{path}.__dict__"):
        return
    if is_of(value, torch.nn.Module):  # with the paths that a program would write
        for name in ("_parameters", "_buffers", "_modules"):
            children: Any = attributes.get(name)
            if is_of(children, dict) and walk.is_new(children):
                visit_dict(walk, children, f"{path}.", attributes=True)
    visit_dict(walk, attributes, f"{path}.", attributes=True)


def _visit_script(walk: Walk, module: Any, path: str) -> None:
    """Its modes, values and tensors are not among its attributes."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    walk.pending.extend((tensor, f"{path}.{name}") for name, tensor in tensors)
    every: Callable[[], list[Any]] = lambda: [*module.parameters(), *module.buffers()]  # noqa: E731
    walk.add_probe(f"{path}#tensors", lambda: tuple(map(id, every())))
    for name, part in module.named_modules(prefix=path):
        type_: Any = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
        for attribute, (kind, _) in type_.get_attributes().items():
            get = functools.partial(part._c.getattr, attribute)
            if "__torch__" in str(kind):  # a module
                continue
            if "Tensor" not in str(kind):
                walk.add_probe(f"{name}.{attribute}", functools.partial(probes.text_of, get))
                continue
            walk.add_probe(f"{name}.{attribute}", functools.partial(_tensors_in, get))
            walk.pending.extend((of, f"{name}.{attribute}") for of in pytree.tree_leaves(get()))


def _tensors_in(get: Callable[[], Any]) -> Any:
    """Which tensors are in a container that is made anew each time, and what is beside them."""
    leaves, structure = pytree.tree_flatten(get())
    return structure, tuple(map(probes.key, leaves))


def _visit_slots(walk: Walk, value: Any, path: str) -> bool:
    """Also private ones, whose names have the class's in them; and what exceptions have in C, such as
    the value of a ``StopIteration``. Returns whether there are any that tell all that it has."""
    found = False
    for class_ in type(value).__mro__:
        is_told = "__slots__" in vars(class_) or issubclass(class_, BaseException)
        if not is_told and not may_have_slots(class_):
            continue
        for name, member in list(vars(class_).items()):
            if isinstance(member, types.MemberDescriptorType):
                found = found or is_told
                walk.add_member(value, member, f"{path}.{name}")
    return found


def _is_left_alone(type_: type) -> bool:
    is_named = f"{type_.__module__}.".startswith((*_LEFT_ALONE, *_OF_PYTHONS_THREADS))
    return is_named or is_of_compiler(type_)


def _visit_given(walk: Walk, value: Any, path: str) -> None:
    """Of an object that is left alone: attributes that its class does not set."""
    type_ = type(value)
    attributes = attributes_of_instance(value)
    if not is_of(attributes, dict):
        return
    if is_of(value, torch.fx.Interpreter):
        names = tuple(name for name in ("module", "submodules") if name in attributes)
        walk.found.dicts.append((attributes, names, ()))
        walk.pending.extend((attributes[name], f"{path}.{name}") for name in names)
    elif f"{type_.__module__}.".startswith(_OF_PYTHONS_THREADS):
        kind: Any = type_
        own = names_set_by(kind)
        given = {name: of for name, of in items_of_dict(attributes) if name not in own}
        walk.found.instances.append(value)
        walk.found.dicts.append((attributes, None, own))
        walk.add_slot(f"{path}#attributes", tuple(given))
        walk.pending.extend((of, f"{path}.{name}") for name, of in given.items())
