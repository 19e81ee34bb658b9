"""What a callable can reach on the host without being passed: the places that its Python may read.

The walk begins at the callable and at the objects that are passed to it. It follows dictionaries,
lists, attributes, closures, defaults, and the globals that the program's own code reads, which is found
in its instructions. Each place has a path, as a program would write it: ``model.layers.0.training``,
``optimizer.param_groups[0]['lr']``.

    slots       what is at each path: numbers and strings themselves, tensors as objects, of containers
                and instances their type and size, whose contents have paths of their own
    probes      the same for what must be asked: generators, counters, arrays, sets
    containers  the dictionaries, lists and cells themselves, to be watched at each call
    tensors     what lies in them

Nobody can see all: sockets, C extensions, large arrays, what ``print`` has written.
"""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import io
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pygraph.callables.user_code import (
    globals_used_by,
    is_library_file,
    is_of_program,
    modules_imported_by,
)

_MOST_OBJECTS = 200_000
_LARGEST_ARRAY = 4096  # bytes that are compared at each call

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Their inside is PyTorch's compiler's own, and changes while it compiles.
_CODE = (types.FunctionType, types.ModuleType, type)
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._guards", "torch.fx")
_LEFT_ALONE = ("logging", "threading", "_thread", "multiprocessing", "concurrent", "pygraph")
# Of modules: the names of buffers that are not saved, which no forward reads.
_UNREAD = ("_non_persistent_buffers_set",)


class Unseen(RuntimeError):
    """What a callable reaches cannot be looked at: it is too much, or does not tell."""


@dataclasses.dataclass(frozen=True)
class Object:
    """What is at a place and cannot be compared by value: a tensor, a function, a class."""

    type: type
    id: int


@dataclasses.dataclass
class Reachable:
    slots: dict[str, Any] = dataclasses.field(default_factory=dict)
    probes: list[tuple[str, Callable[[], Any]]] = dataclasses.field(default_factory=list)
    dicts: list[tuple[dict[Any, Any], tuple[Any, ...] | None]] = dataclasses.field(default_factory=list)
    lists: list[list[Any]] = dataclasses.field(default_factory=list)
    cells: list[Any] = dataclasses.field(default_factory=list)
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = dataclasses.field(default_factory=dict)


def reachable_from(roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> Reachable:
    """Walks from the roots, by their names. unwatched: dictionaries by identity, each with a key whose
    value is left out, as it is looked at otherwise. Raises Unseen."""
    walk = _Walk(frozenset(unwatched))
    for name, root in roots.items():
        walk.pending.append((root, name))
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, unwatched: frozenset[tuple[int, str]]) -> None:
        self.found = Reachable()
        self.pending: collections.deque[tuple[Any, str]] = collections.deque()
        self._unwatched = unwatched
        self._seen: dict[int, Any] = {}  # holds the objects, so that numbers stay theirs

    def run(self) -> None:
        while self.pending:
            value, path = self.pending.popleft()  # so that paths are short
            self._visit(value, path)
            if len(self.found.slots) > _MOST_OBJECTS:
                raise Unseen(f"it reaches more than {_MOST_OBJECTS} objects")

    def _visit(self, value: Any, path: str) -> None:
        slots = self.found.slots
        if isinstance(value, _ATOMS):
            slots[path] = value
            return
        if isinstance(value, torch.Tensor):
            slots[path] = Object(type(value), id(value))
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                slots[f"{path}.requires_grad"] = value.requires_grad
                hooks = (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))
                self.pending += [(h, f"{path}.hooks") for h in hooks if h is not None]
                if vars(value):
                    self._visit_dict(vars(value), path, lambda key: f"{path}.{key}")
                self.found.tensors[path] = value
                if is_on_host(value):
                    self._probe(f"{path}#values", functools.partial(_values_of, value))
            return
        slots[path] = type(value)
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if not self._visit_container(value, path) and not self._visit_code(value, path):
            self._visit_instance(value, path)

    def _visit_container(self, value: Any, path: str) -> bool:
        if isinstance(value, dict):
            self._visit_dict(value, path, lambda key: f"{path}[{key!r}]")
        elif isinstance(value, list):
            self.found.lists.append(value)
            self._visit_items(value, path)
        elif isinstance(value, tuple):
            self._visit_items(value, path)
        elif isinstance(value, (set, frozenset)):
            self._probe(f"{path}#items", lambda: frozenset(map(_key, value)))
        elif isinstance(value, collections.deque):
            self._probe(f"{path}#items", lambda: tuple(map(_key, value)))
        else:
            return False
        return True

    def _visit_items(self, values: Iterable[Any], path: str) -> None:
        items = list(values)
        self.found.slots[f"{path}#len"] = len(items)
        self.pending += [(item, f"{path}[{i}]") for i, item in enumerate(items)]

    def _visit_dict(self, value: dict[Any, Any], path: str, name: Callable[[Any], str]) -> None:
        if id(value) not in self._seen:  # which a container that was visited as such is
            self._seen[id(value)] = value
        left_out = [
            key
            for key in value
            if isinstance(key, str) and (key in _UNREAD or (id(value), key) in self._unwatched)
        ]
        kept = {key: item for key, item in value.items() if not (left_out and key in left_out)}
        self.found.dicts.append((value, tuple(kept) if left_out else None))
        names = []
        for number, (key, item) in enumerate(kept.items()):
            # Others than plain keys, such as tensors in the state of an optimizer, by their place.
            names.append(name(key) if isinstance(key, (str, int)) else f"{path}[{number}]")
            self.pending.append((item, names[-1]))
        self.found.slots[f"{path}#keys"] = tuple(names)

    def _visit_code(self, value: Any, path: str) -> bool:
        if isinstance(value, types.FunctionType):
            self._visit_function(value, path)
        elif isinstance(value, types.MethodType):
            self.pending += [(value.__self__, f"{path}.__self__"), (value.__func__, path)]
        elif isinstance(value, (staticmethod, classmethod)):
            self.pending.append((value.__func__, path))
        elif isinstance(value, property):
            self.pending += [(f, path) for f in (value.fget, value.fset) if f is not None]
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
            self.pending += [(part, f"{path}.{name}") for name, part in parts.items()]
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.CodeType)):
            self.found.slots[path] = Object(type(value), id(value))
        else:
            return False
        return True

    def _visit_function(self, function: types.FunctionType, path: str) -> None:
        self.found.slots[path] = Object(types.FunctionType, id(function.__code__))
        is_library = is_library_file(function.__code__.co_filename)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.found.cells.append(cell)
            try:
                content = cell.cell_contents
            except ValueError:  # nothing was assigned yet
                continue
            self.pending.append((content, f"{path}.{name}" if is_library else name))
        for name, default in zip(("defaults", "kwdefaults"), _defaults_of(function), strict=True):
            if default:
                self.pending.append((default, f"{path}.__{name}__"))
        if is_library:
            return
        self._visit_dict(function.__dict__, path, lambda key: f"{path}.{key}")
        for chain in globals_used_by(function.__code__):
            self._visit_chain(function.__globals__, chain)
        for name in modules_imported_by(function.__code__):
            module = sys.modules.get(name)
            if module is not None and is_of_program(module):
                plain = [k for k, v in vars(module).items() if not isinstance(v, _CODE)]
                self._visit_names(vars(module), tuple(plain), f"{name}.")

    def _visit_chain(self, scope: dict[str, Any], chain: tuple[str, ...]) -> None:
        """A global, and attributes of it as long as it is a module of the program's."""
        path = ""
        for name in chain:
            self._visit_names(scope, (name,), path)
            value = scope.get(name)
            if not isinstance(value, types.ModuleType) or not is_of_program(value):
                return
            scope, path = vars(value), f"{path}{name}."

    def _visit_names(self, scope: dict[str, Any], names: tuple[str, ...], prefix: str) -> None:
        self.found.dicts.append((scope, names))
        self.pending += [(scope[name], prefix + name) for name in names if name in scope]

    def _visit_class(self, type_: type) -> None:
        """The methods and attributes of the program's own classes."""
        for class_ in type_.__mro__:
            if not _is_of_program(class_):
                continue
            scope = gc.get_referents(vars(class_))[0]  # of the mappingproxy
            if not isinstance(scope, dict) or id(scope) in self._seen:
                continue
            self._seen[id(scope)] = scope
            names = tuple(name for name in scope if not name.startswith("__") or name == "__call__")
            self._visit_names(scope, names, f"{class_.__name__}.")

    def _visit_instance(self, value: Any, path: str) -> None:
        type_ = type(value)
        if hasattr(type_, "graphed_attributes"):
            self._probe(f"{path}#attributes", value.graphed_attributes)
        if str(type_.__module__).startswith((*_COMPILER, *_LEFT_ALONE)):
            return
        if isinstance(value, torch.optim.Optimizer):
            self.found.optimizers[path] = value
        self._visit_class(type_)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            is_module = isinstance(value, torch.nn.Module)
            self._visit_dict(attributes, path, lambda key: f"{path}.{key}")
            for part in ("_parameters", "_buffers", "_modules") if is_module else ():
                self._visit_children(attributes.get(part), path)
        for class_ in type_.__mro__:
            slots = vars(class_).get("__slots__", ()) if _is_of_program(class_) else ()
            for name in (slots,) if isinstance(slots, str) else slots:
                self._probe(f"{path}.{name}", functools.partial(_key_of_attribute, value, name))
                self.pending.append((getattr(value, name, None), f"{path}.{name}"))
        probe = _probe_of(value)
        if probe is not None:
            self._probe(path, probe)
        elif hasattr(type_, "__next__") and attributes is None:
            raise Unseen(f"{path} is an iterator whose place cannot be seen")

    def _visit_children(self, children: Any, path: str) -> None:
        """A module's, with the paths that a program would write."""
        if isinstance(children, dict) and id(children) not in self._seen:
            self._seen[id(children)] = children
            self._visit_dict(children, path, lambda key: f"{path}.{key}")

    def _probe(self, path: str, probe: Callable[[], Any]) -> None:
        self.found.probes.append((path, probe))


def _defaults_of(function: types.FunctionType) -> tuple[Any, Any]:
    return function.__defaults__, function.__kwdefaults__


def _is_of_program(class_: type) -> bool:
    module = sys.modules.get(class_.__module__)
    if module is None:
        return False
    if class_.__module__ == "__main__":
        return True
    return is_of_program(module)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a graph would have the tensor's values frozen."""
    return tensor.is_cpu and tensor.layout == torch.strided


def _values_of(tensor: torch.Tensor) -> Any:
    """Of a large one, how often operators have written to it."""
    if tensor.nbytes <= _LARGEST_ARRAY:
        return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
    return None if tensor.is_inference() else tensor._version


def _key(value: Any) -> Any:
    """What is compared of an element: itself if that is a value, or else which object it is."""
    return value if isinstance(value, _ATOMS) and value == value else id(value)


def _key_of_attribute(value: Any, name: str) -> Any:
    return _key(getattr(value, name, None))


def _probe_of(value: Any) -> Callable[[], Any] | None:
    """A function that tells where an object stands; None for what needs none, or cannot be asked."""
    if isinstance(value, types.GeneratorType):
        return lambda: value.gi_frame.f_lasti if value.gi_frame is not None else None
    if isinstance(value, itertools.count):
        return lambda: repr(value)
    if isinstance(value, random.Random):
        return lambda: hash(value.getstate())
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return lambda: value.get_state().numpy().tobytes()
    if type(value).__module__.split(".")[0] == "numpy":
        return _probe_of_numpys(value)
    if isinstance(value, (bytearray, array.array)) and len(value) <= _LARGEST_ARRAY:
        return lambda: bytes(value)
    if isinstance(value, contextvars.ContextVar):
        return lambda: _key(value.get(None))
    if isinstance(value, io.IOBase):
        return lambda: value.tell() if not value.closed and value.seekable() else None
    if hasattr(type(value), "__length_hint__"):
        return lambda: value.__length_hint__()
    return None


def _probe_of_numpys(value: Any) -> Callable[[], Any] | None:
    if hasattr(value, "bit_generator"):
        return lambda: repr(value.bit_generator.state)
    if hasattr(value, "tobytes") and value.nbytes <= _LARGEST_ARRAY:
        return lambda: value.tobytes()
    return None
