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

import collections
import dataclasses
import enum
import functools
import gc
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pygraph.callables.user_code import globals_read_by, is_library_file, is_of_program

_MOST_OBJECTS = 200_000
_LARGEST_ARRAY = 4096  # bytes that are compared at each call

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Their inside is PyTorch's compiler's own, and changes while it compiles.
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._guards", "torch.fx")
_LEFT_ALONE = ("logging", "threading", "_thread", "weakref", "multiprocessing", "concurrent", "pygraph")
# Of modules: the names of buffers that are not saved, which no forward reads.
_UNREAD = ("_non_persistent_buffers_set",)


class TooMuch(RuntimeError):
    """A callable reaches more objects than can be looked at in reasonable time."""


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
    value is left out, as it is looked at otherwise. Raises TooMuch."""
    walk = _Walk(frozenset(unwatched))
    for name, root in roots.items():
        walk.pending.append((root, name))
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, unwatched: frozenset[tuple[int, str]]) -> None:
        self.found = Reachable()
        self.pending: list[tuple[Any, str]] = []
        self._unwatched = unwatched
        self._seen: dict[int, Any] = {}  # holds the objects, so that numbers stay theirs

    def run(self) -> None:
        while self.pending:
            value, path = self.pending.pop()
            self._visit(value, path)
            if len(self.found.slots) > _MOST_OBJECTS:
                raise TooMuch(f"it reaches more than {_MOST_OBJECTS} objects")

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
        left_out = [
            key for key in value if isinstance(key, str) and (id(value), key) in self._unwatched
        ]
        keys = tuple(key for key in value if key not in left_out) if left_out else None
        self.found.dicts.append((value, keys))
        self.found.slots[f"{path}#len"] = len(value)
        for number, (key, item) in enumerate(list(value.items())):
            if isinstance(key, str) and key in left_out:
                continue
            # A tensor as a key, as in the state of an optimizer.
            text = f"{path}[{number}]" if isinstance(key, torch.Tensor) else name(key)
            self.pending.append((item, text))

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
        read = dict(globals_read_by(function.__code__))
        self._visit_names(function.__globals__, tuple(read), "")
        for name, attributes in read.items():
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and is_of_program(module):
                self._visit_names(vars(module), attributes, f"{name}.")

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
        if type_.__module__.startswith((*_COMPILER, *_LEFT_ALONE)):
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
        probe = _probe_of(value)
        if probe is not None:
            self._probe(path, probe)

    def _visit_children(self, children: Any, path: str) -> None:
        """A module's, with the paths that a program would write. The walk takes the last in first."""
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
    if hasattr(value, "__length_hint__"):
        return lambda: value.__length_hint__()
    return None


def _probe_of_numpys(value: Any) -> Callable[[], Any] | None:
    if hasattr(value, "bit_generator"):
        return lambda: repr(value.bit_generator.state)
    if hasattr(value, "tobytes") and value.nbytes <= _LARGEST_ARRAY:
        return lambda: value.tobytes()
    return None
