"""What a callable can reach on the host without being passed: the places that its Python may read.

The walk begins at the callable and at the objects that are passed to it. It follows dictionaries,
lists, attributes, closures, defaults, classes, and the globals that the program's own code uses, which
are found in its instructions. Each place has a path, as a program would write it:
``model.layers.0.training``, ``optimizer.param_groups[0]['lr']``.

    slots       what is at each place, in the order of the walk: numbers and strings themselves; tensors
                and other opaque objects by identity; of containers and instances their type, as their
                contents have places of their own; of what was met before, where that was
    probes      the same for what must be asked: generators, counters, arrays, sets
    the rest    what is to be watched at each call (host_state.py)

Two walks find the same if and only if the callable could tell no difference, as far as can be seen.
Not seen are sockets, the contents of files, clocks, what extensions keep, arrays of more than 64 KiB,
random numbers that a library draws from a state that it puts back, and functions of libraries that only
libraries call.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import functools
import gc
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from pygraph.callables import probes
from pygraph.callables.user_code import (
    closures_used_by,
    globals_used_by,
    is_library_file,
    is_of_program,
    modules_imported_by,
)

_MOST_PLACES = 200_000

_BY_NAME = (("globals",), ("eval",), ("exec",))  # functions by which code reads any global
_VIEWS = (dict.keys, dict.values, dict.items)
_CODE = (types.FunctionType, types.ModuleType, type)
# Their inside is PyTorch's compiler's own, and changes while it compiles.
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._guards", "torch.fx")
_LEFT_ALONE = (*_COMPILER, "logging", "threading", "multiprocessing", "concurrent", "pygraph")
# Of all optimizers (register_optimizer_step_pre_hook).
_HOOKS_OF_OPTIMIZERS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
# Of modules: the names of buffers that are not saved, which no forward reads.
_UNREAD = ("_non_persistent_buffers_set",)
# Of classes: what Python itself puts there, in part when it is asked for.
_OF_PYTHON = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__abstractmethods__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__static_attributes__", "__firstlineno__", "_abc_impl"),
    )
)


class Unseen(RuntimeError):
    """What a callable reaches cannot be looked at: it is too much, or does not tell."""


@dataclasses.dataclass(frozen=True)
class Object:
    """What is at a place and cannot be compared by value."""

    type: type
    id: int


@dataclasses.dataclass
class Reachable:
    """See the module. dicts: each with the keys that are watched, or None for all, and with keys that
    are left out of all. held: what probes know by its identity, which must stay its own."""

    slots: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    probes: list[tuple[str, Callable[[], Any]]] = dataclasses.field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], tuple[Any, ...] | None, tuple[Any, ...]]] = dataclasses.field(
        default_factory=list
    )
    lists: list[list[Any]] = dataclasses.field(default_factory=list)
    cells: list[Any] = dataclasses.field(default_factory=list)
    functions: list[types.FunctionType] = dataclasses.field(default_factory=list)
    instances: list[Any] = dataclasses.field(default_factory=list)
    classes: list[type] = dataclasses.field(default_factory=list)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = dataclasses.field(default_factory=dict)
    held: list[Any] = dataclasses.field(default_factory=list)


def reachable_from(roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> Reachable:
    """Walks from the roots, by their names. unwatched: dictionaries by identity, each with a key whose
    value is left out, as it is looked at otherwise. Raises Unseen."""
    walk = _Walk(frozenset(unwatched))
    walk.pending.extend((root, name) for name, root in roots.items())
    walk.pending.append((torch.Tensor, "torch.Tensor"))  # whose methods the program may replace
    walk.visit_switch(torch.backends.mha, "_is_fastpath_enabled")
    walk.run()
    return walk.found


class _Walk:
    """Breadth first, so that paths are short."""

    def __init__(self, unwatched: frozenset[tuple[int, str]]) -> None:
        self.found = Reachable()
        self.pending: collections.deque[tuple[Any, str]] = collections.deque()
        self._unwatched = unwatched
        self._numbers: dict[int, int] = {}  # of objects, in the order in which they are met
        self._met: list[Any] = []  # holds them, so that identities stay theirs

    def run(self) -> None:
        while self.pending:
            value, path = self.pending.popleft()
            self._visit(value, path)
            if len(self.found.slots) > _MOST_PLACES:
                raise Unseen(f"it reaches more than {_MOST_PLACES} objects")

    def visit_switch(self, module: types.ModuleType, name: str) -> None:
        """A value that functions of a library read from their module."""
        self._visit_chain(vars(module), (name,), f"{module.__name__}.")

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._numbers:
            return False
        self._numbers[id(value)] = len(self._met)
        self._met.append(value)
        return True

    def _note(self, path: str, what: Any) -> None:
        self.found.slots.append((path, what))

    def _probe(self, path: str, probe: Callable[[], Any]) -> None:
        self.found.probes.append((path, probe))

    def _visit(self, value: Any, path: str) -> None:
        type_ = type(value)
        if type_ in probes.ATOMS:
            self._note(path, value)
        elif not self._is_new(value):
            self._note(path, ("met", self._numbers[id(value)]))
        elif isinstance(value, torch.Tensor):
            self._visit_tensor(value, path)
        else:
            self._visit_object(value, path)

    def _visit_tensor(self, tensor: torch.Tensor, path: str) -> None:
        self._note(path, Object(type(tensor), id(tensor)))
        self._note(f"{path}.requires_grad", tensor.requires_grad)
        if tensor.layout == torch.strided:
            layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
            self._note(f"{path}.layout", layout)
        self.found.tensors[path] = tensor
        hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        self.pending.extend((of, f"{path}.hooks") for of in hooks if of is not None)
        if vars(tensor):
            self._visit_dict(vars(tensor), f"{path}.", attributes=True)
        if probes.is_on_host(tensor):
            self._probe(f"{path}#values", functools.partial(probes.values_of, tensor))

    def _visit_object(self, value: Any, path: str) -> None:
        visit = next((of for kinds, of in _VISITS if isinstance(value, kinds)), None)
        if visit is not None:
            visit(self, value, path)
        if not isinstance(value, _CODE):
            self._visit_instance(value, path, is_opaque=visit is None)

    # Containers.

    def _visit_dict(self, value: dict[Any, Any], path: str, attributes: bool = False) -> None:
        """attributes: whether it holds an object's, of which ``path`` is the beginning."""
        left_out = [
            key
            for key in value
            if type(key) is str and (key in _UNREAD or (id(value), key) in self._unwatched)
        ]
        kept = {key: item for key, item in value.items() if not (left_out and key in left_out)}
        self.found.dicts.append((value, None, tuple(left_out)))
        names = []
        for number, (key, item) in enumerate(kept.items()):
            # Others than plain keys, such as tensors in the state of an optimizer, by their place.
            is_plain = type(key) in (str, int, bool, float, type(None))
            text = repr(key) if is_plain else f"key {number}"
            names.append(f"{path}{key}" if attributes else f"{path}[{text}]")
            if not is_plain:
                self.pending.append((key, f"{path}#{text}"))
            self.pending.append((item, names[-1]))
        place = path.rstrip(".")
        self._note(f"{place}#keys", tuple(names))
        if isinstance(value, collections.OrderedDict) and len(value) > 1:  # has an order of its own
            self._probe(f"{place}#order", lambda: tuple(map(probes.key, value)))

    def _visit_list(self, value: list[Any], path: str) -> None:
        self.found.lists.append(value)
        self._visit_items(value, path)

    def _visit_items(self, value: Iterable[Any], path: str) -> None:
        items = list(value)
        self._note(f"{path}#len", len(items))
        self.pending.extend((item, f"{path}[{i}]") for i, item in enumerate(items))

    def _visit_set(self, value: Any, path: str) -> None:
        self._probe(f"{path}#items", lambda: frozenset(map(probes.key, value)))
        self._visit_held((item for item in value if type(item) not in probes.ATOMS), f"{path}#item")

    def _visit_deque(self, value: Any, path: str) -> None:
        self._probe(f"{path}#items", lambda: tuple(map(probes.key, value)))
        self.found.held.extend(value)
        self._visit_items(value, path)

    def _visit_held(self, items: Iterable[Any], path: str) -> None:
        for item in items:
            self.found.held.append(item)
            self.pending.append((item, path))

    def _visit_proxy(self, value: Any, path: str) -> None:
        """Also the view of a dictionary."""
        self.pending.extend((of, path) for of in gc.get_referents(value))

    # Code.

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        code = function.__code__
        self._note(path, Object(types.FunctionType, id(code)))
        self._is_new(code)  # held
        self.found.functions.append(function)
        is_library = is_library_file(code.co_filename)
        if function is os.getenv:
            self.pending.append((os.environ, "os.environ"))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if not self._is_new(cell):
                self._note(name, ("met", self._numbers[id(cell)]))
                continue
            self.found.cells.append(cell)
            content = _content_of(cell)
            if content is _EMPTY:
                self._note(name, "nothing was assigned yet")
            else:
                self.pending.append((content, f"{path}.{name}" if is_library else name))
        for name in ("__defaults__", "__kwdefaults__"):
            self.pending.append((getattr(function, name), f"{path}.{name}"))
        self._visit_dict(vars(function), f"{path}.", attributes=True)
        if not is_library:
            self._visit_globals(function)

    def _visit_globals(self, function: types.FunctionType) -> None:
        scope = function.__globals__
        for chain in globals_used_by(function.__code__):
            self._visit_chain(scope, chain)
            if chain in _BY_NAME:
                self._visit_plain(scope, "")
        inner = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for chain in closures_used_by(function.__code__):
            cell = inner.get(chain[0])  # none: a variable of the function's own
            if cell is not None and len(chain) > 1 and isinstance(_content_of(cell), types.ModuleType):
                self._visit_chain(vars(cell.cell_contents), chain[1:], f"{chain[0]}.")
        for name in modules_imported_by(function.__code__):
            if name in sys.modules:
                self.pending.append((sys.modules[name], name))

    def _visit_chain(self, scope: dict[str, Any], chain: tuple[str, ...], path: str = "") -> None:
        """A global, and attributes of it as long as it is a module. path: of the scope. A module at the
        end of the chain, or whose dictionary is read, is a value."""
        module: types.ModuleType | None = None
        if not path and chain[0] not in scope:  # one of Python's
            self.found.dicts.append((scope, chain[:1], ()))
            scope = vars(builtins)
        for name in chain:
            if name == "__dict__" and module is not None:
                break
            self.found.dicts.append((scope, (name,), ()))
            value = scope.get(name, self)
            if value is self:
                self._note(path + name, "it is not there")
                return
            if not isinstance(value, types.ModuleType):
                self.pending.append((value, path + name))
                return
            self._note(path + name, Object(type(value), id(value)))
            module, scope, path = value, vars(value), f"{path}{name}."
        if module is not None:
            self.pending.append((module, path.rstrip(".")))

    def _visit_module(self, module: types.ModuleType, path: str) -> None:
        """A module as a value. The program's own may have any attribute read."""
        self._note(path, Object(type(module), id(module)))
        if is_of_program(module):
            self._visit_plain(vars(module), f"{path}.")

    def _visit_plain(self, scope: dict[str, Any], path: str) -> None:
        """What a module has besides code, any of which may be read."""
        plain = tuple(k for k, v in scope.items() if not isinstance(v, _CODE) and k[:2] != "__")
        self.found.dicts.append((scope, plain, ()))
        self.pending.extend((scope[name], f"{path}{name}") for name in plain)

    def _visit_method(self, method: types.MethodType, path: str) -> None:
        self.pending.append((method.__self__, f"{path}.__self__"))
        self.pending.append((method.__func__, path))

    def _visit_builtin(self, function: Any, path: str) -> None:
        self._note(path, function.__qualname__)
        if not isinstance(function.__self__, (types.ModuleType, type(None))):
            self.pending.append((function.__self__, f"{path}.__self__"))

    def _visit_wrapped(self, value: Any, path: str) -> None:
        self.pending.append((value.__func__, path))

    def _visit_property(self, value: property, path: str) -> None:
        self.pending.extend((of, path) for of in (value.fget, value.fset) if of is not None)

    def _visit_partial(self, value: Any, path: str) -> None:
        for name in ("func", "args", "keywords"):
            self.pending.append((getattr(value, name), f"{path}.{name}"))

    def _visit_generator(self, generator: Any, path: str) -> None:
        """Its variables, what its loops go through, and the globals that it reads."""
        frame = generator.gi_frame
        if frame is None:  # it has ended
            return
        self._visit_held(probes.iterators_of(generator), path)
        for name, value in frame.f_locals.items():
            if type(value) not in probes.ATOMS:
                self._visit_held([value], f"{path}.{name}")
        if not is_library_file(generator.gi_code.co_filename):
            for chain in globals_used_by(generator.gi_code):
                self._visit_chain(frame.f_globals, chain)

    def _visit_reference(self, value: Any, path: str) -> None:
        self._probe(f"{path}()", lambda: id(value()))
        self.pending.append((value(), f"{path}()"))

    def _visit_class(self, type_: type, path: str) -> None:
        """Attributes of the program's own classes; of others which objects they are, and functions of
        the program's among them."""
        self._note(path, Object(type, id(type_)))
        metaclass: type = type(type_)
        if isinstance(type_, abc.ABCMeta) and _is_of_program(type_):
            self._probe(f"{path}#registered", abc.get_cache_token)
        for class_ in itertools.chain(type_.__mro__, metaclass.__mro__):
            if class_ in (object, type) or not (class_ is type_ or self._is_new(class_)):
                continue
            getattr(class_, "__doc__", None)  # gives it a version
            self.found.classes.append(class_)
            names = [name for name in vars(class_) if name not in _OF_PYTHON]
            values = [vars(class_)[name] for name in names]
            if _is_of_program(class_):
                self._note(f"{class_.__name__}#attributes", tuple(names))
                self.pending.extend(
                    (value, f"{class_.__name__}.{name}")
                    for name, value in zip(names, values, strict=True)
                )
            else:
                self._note(f"{class_.__name__}#attributes", hash(tuple(map(id, values))))
                self.pending.extend(  # methods that the program has replaced
                    (value, f"{class_.__name__}.{name}")
                    for name, value in zip(names, values, strict=True)
                    if isinstance(value, types.FunctionType)
                    and not is_library_file(value.__code__.co_filename)
                )

    # Instances.

    def _visit_instance(self, value: Any, path: str, is_opaque: bool) -> None:
        type_ = type(value)
        self._note(f"{path}.__class__", Object(type, id(type_)))
        if hasattr(type_, "graphed_attributes"):  # a graphed callable inside of this one
            self._visit_graphed(value, path)
        if isinstance(value, torch.jit.ScriptModule):
            self._visit_script(value, path)
        if _is_left_alone(type_) and not isinstance(value, torch.nn.Module):
            flag = probes.flag_of(value)
            if flag is not None:
                self._probe(path, flag)
            self._note(path, Object(type_, id(value)))
            return
        if type_.__module__ != "builtins" and self._is_new(type_):
            self._visit_class(type_, type_.__name__)
        if isinstance(value, torch.optim.Optimizer):
            self.found.optimizers[path] = value
            self.pending.extend((of, "torch.optim.optimizer hooks") for of in _HOOKS_OF_OPTIMIZERS)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.found.instances.append(value)
            self._visit_attributes(value, attributes, path)
        has_slots = self._visit_slots(value, path)
        probe = probes.probe_of(value)
        if probe is not None:
            self._probe(path, probe)
        self._visit_held(probes.contents_of(value), path)
        if probe is None and is_opaque and not has_slots and not isinstance(attributes, dict):
            if hasattr(type_, "__next__"):
                raise Unseen(f"{path} is an iterator whose place cannot be seen")
            self._note(path, Object(type_, id(value)))

    def _visit_graphed(self, value: Any, path: str) -> None:
        """What the program has stored in its attributes."""
        names = tuple(value.graphed_attributes())
        self._probe(f"{path}#attributes", value.graphed_attributes)
        self.found.dicts.append((vars(value), names, ()))
        self.pending.extend((vars(value)[name], f"{path}.{name}") for name in names)
        self.pending.append((value.__wrapped__, path))

    def _visit_attributes(self, value: Any, attributes: dict[str, Any], path: str) -> None:
        if not self._is_new(attributes):
            self._note(f"{path}.__dict__", ("met", self._numbers[id(attributes)]))
            return
        if isinstance(value, torch.nn.Module):  # with the paths that a program would write
            for name in ("_parameters", "_buffers", "_modules"):
                children = attributes.get(name)
                if isinstance(children, dict) and self._is_new(children):
                    self._visit_dict(children, f"{path}.", attributes=True)
        self._visit_dict(attributes, f"{path}.", attributes=True)

    def _visit_script(self, module: Any, path: str) -> None:
        """Its modes, values and tensors are not among its attributes."""
        for name, part in module.named_modules(prefix=path):
            type_: Any = torch._C.ConcreteModuleType.from_jit_type(part._c._type())
            for attribute, (kind, _) in type_.get_attributes().items():
                if "Tensor" not in str(kind) and "__torch__" not in str(kind):
                    get = functools.partial(part._c.getattr, attribute)
                    self._probe(f"{name}.{attribute}", functools.partial(probes.text_of, get))
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self.pending.extend((tensor, f"{path}.{name}") for name, tensor in tensors)

    def _visit_slots(self, value: Any, path: str) -> bool:
        """Also private ones, whose names have the class's in them."""
        found = False
        for class_ in type(value).__mro__:
            if "__slots__" not in vars(class_):
                continue
            for name, member in list(vars(class_).items()):
                if isinstance(member, types.MemberDescriptorType):
                    found = True
                    get = functools.partial(probes.slot_of, value, member)
                    self._probe(f"{path}.{name}", functools.partial(probes.key_of, get))
                    self._visit_held([get()], f"{path}.{name}")
        return found


# The first of these kinds that an object is of; what is of none is an instance, or opaque.
_VISITS: tuple[tuple[Any, Callable[[_Walk, Any, str], None]], ...] = (
    (dict, _Walk._visit_dict),
    (list, _Walk._visit_list),
    (tuple, _Walk._visit_items),
    ((set, frozenset), _Walk._visit_set),
    (collections.deque, _Walk._visit_deque),
    ((types.MappingProxyType, *(type(of({})) for of in _VIEWS)), _Walk._visit_proxy),
    (types.FunctionType, _Walk._visit_function),
    (types.ModuleType, _Walk._visit_module),
    (types.MethodType, _Walk._visit_method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _Walk._visit_builtin),
    ((staticmethod, classmethod), _Walk._visit_wrapped),
    (property, _Walk._visit_property),
    (functools.partial, _Walk._visit_partial),
    (types.GeneratorType, _Walk._visit_generator),
    (weakref.ReferenceType, _Walk._visit_reference),
    (type, _Walk._visit_class),
)


_EMPTY = object()


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_left_alone(type_: type) -> bool:
    module = str(type_.__module__)
    return any(module == name or module.startswith(f"{name}.") for name in _LEFT_ALONE)


def _is_of_program(class_: type) -> bool:
    module = sys.modules.get(str(class_.__module__))
    return class_.__module__ == "__main__" or (module is not None and is_of_program(module))
