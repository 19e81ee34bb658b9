"""What distinguishes calls of a callable by what is passed, and by PyTorch's modes.

``take_apart`` looks at all that can be passed, and takes some 10 us for it. Arguments of the same form
as earlier ones are taken apart by the engine (``Forms``), with equal results.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pygraph import runtime, signal_exceptions
from pygraph.callables.host.kinds import is_of

_MOST_FORMS = 8

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_DERIVED = (int, float, complex, str, bytes)  # which classes of the program's may derive from
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class Key:
    """Anything hashable, whose hash is computed once. Keys that were found equal share their parts from
    then on, so that the next comparison is short."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: Hashable) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        try:
            if not isinstance(other, Key) or self._hash != other._hash:
                return False
            if self.parts is not other.parts:
                if not self.parts == other.parts:
                    return False
                other.parts = self.parts
            return True
        except Exception as error:  # of keys of the program's in a dictionary
            signal_exceptions.pass_on(error)
            return False


@dataclasses.dataclass
class Arguments:
    """The arguments of one call, taken apart.

    tensors: those among the leaves, each once. numbers: by leaf, which of them it is. objects: leaves
    that are neither tensors nor values, by name; the callable may read and change them. kinds: of
    containers and values that are not Python's own, classes, and what flattening has noted.
    key: equal for calls that differ in nothing but their tensors' contents, addresses and layouts.
    form: by which the engine has taken them apart, or None.
    """

    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]
    numbers: dict[int, int]
    objects: dict[str, Any]
    kinds: dict[str, Any]
    key: Key
    form: Form | None = None

    @property
    def passes_modules_only(self) -> bool:
        """Whether there are objects, and all are modules, which usually live as long as the program."""
        objects = self.objects.values()
        return bool(objects) and all(is_of(of, torch.nn.Module) for of in objects)


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """None for arguments that cannot be compared: a structure without a hash, or that contains itself,
    or tensors of a class of the program's, or with attributes."""
    try:
        return _taken_apart(args, kwargs)
    except Exception as error:  # of what is passed: of its hash, of its class
        signal_exceptions.pass_on(error)
        return None


def _taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    objects: dict[str, Any] = {}
    kinds = _kinds(spec)
    places: list[Hashable] = []
    numbers: dict[int, int] = {}
    known: dict[int, int] = {}  # by identity
    for i, leaf in enumerate(leaves):
        if is_of(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or attributes_of(leaf):
                return None
            numbers[i] = number = known.setdefault(id(leaf), len(tensors))
            if number == len(tensors):
                tensors.append(leaf)
            is_differentiated = leaf.requires_grad and torch.is_grad_enabled()
            has_gradient = not is_differentiated and leaf.is_leaf and leaf.grad is not None
            of = (leaf.requires_grad, leaf.is_leaf, has_gradient, leaf.is_inference())
            places.append((type(leaf), number, *of, special_layout(leaf)))
        elif type(leaf) in _VALUES:
            places.append((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf))
        elif isinstance(leaf, _DERIVED) and not getattr(leaf, "__dict__", None):
            # Its class may compare and show it as it likes.
            plain = next(of for of in _DERIVED if isinstance(leaf, of))
            places.append((type(leaf), plain.__repr__(leaf)))
            kinds[f"class of argument {i}"] = type(leaf)
        elif type(leaf) is torch.Size:
            places.append((torch.Size, tuple(leaf)))
        else:
            objects[f"argument {i}"] = leaf
            places.append((object, id(leaf)))
    key = Key((spec, tuple(_odd_keys(spec)), tuple(places), runtime.engine().modes()))
    return Arguments(leaves, spec, tensors, numbers, objects, kinds, key)


def _kinds(spec: Any) -> dict[str, Any]:
    """Of containers, by name: classes, and what flattening notes of them."""
    kinds: dict[str, Any] = {}
    pending = [spec]
    while pending:
        node = pending.pop()
        pending += node.children()
        parts: tuple[Any, ...] = (node.type, node.context)
        if node.type is collections.defaultdict:
            parts = node.context[:1]  # what makes missing items
        elif node.type is collections.namedtuple:
            parts = (node.context,)
        elif node.type in (dict, collections.OrderedDict, tuple, list, collections.deque, None):
            parts = ()
        for part in parts:
            kinds[f"container {len(kinds)} of arguments"] = part
    return kinds


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """The program's. Dynamo marks tensors that its programs have seen: with dimensions that vary."""
    return {k: value for k, value in vars(tensor).items() if not k.startswith("_dynamo_")}


def special_layout(tensor: torch.Tensor) -> str:
    """Of a tensor that no graph can be given: without memory of its own, or not in one piece. Empty for
    others."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "meta"
    wraps = torch._is_functional_tensor(tensor) or tensor._is_zerotensor()
    return "memoryless" if wraps or not torch._C._has_storage(tensor) else ""


def _odd_keys(spec: Any) -> Iterator[Hashable]:
    """Of dictionaries' keys that may be equal to other ones, what tells them apart."""
    if spec.type in _DICTS:
        keys = spec.context[1] if spec.type is collections.defaultdict else spec.context
        for key in keys:
            if type(key) is not str:
                yield type(key), repr(key) if type(key) in (float, complex, tuple, frozenset) else None
    for child in spec.children():
        yield from _odd_keys(child)


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


def unflattener(spec: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a tree of its leaves, as ``tree_unflatten`` does."""
    if spec.num_nodes == 1 and spec.num_leaves == 1:
        return lambda leaves: leaves[0]
    is_flat = spec.num_nodes == 1 + spec.num_leaves
    if is_flat and spec.type is tuple:
        return tuple
    if is_flat and spec.type is list:
        return list
    if is_flat and spec.type is dict:
        keys = list(spec.context)
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: pytree.tree_unflatten(list(leaves), spec)


def layouts_of(arguments: Arguments) -> list[Any]:
    """What a callable could change of the tensors that are passed, besides their contents."""
    return [_layout_of(tensor) for tensor in arguments.tensors]


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    # None has attributes before the call.
    of = (tuple(attributes_of(tensor)), tensor.requires_grad, tensor.is_leaf, tensor.dtype)
    special = special_layout(tensor)
    if special:
        return *of, special
    gradient = id(tensor.grad) if tensor.is_leaf else None  # PyTorch warns of other tensors' gradients
    return *of, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), gradient


class Forms:
    """The forms of the last arguments that were added. Thread-safe."""

    def __init__(self) -> None:
        self._forms: list[Form] = []

    def take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """As the function does, for arguments of one of these forms; None for others."""
        for form in self._forms:
            found = form.engine.match(args, kwargs)
            if found is not None:
                return form.arguments(*found)
        return None

    def add(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """arguments: those that are passed, taken apart. Not all have a form."""
        form = runtime.engine().argument_form(args, kwargs, pytree.SUPPORTED_NODES)
        if form is not None:
            self._forms = [Form(form, arguments), *self._forms[: _MOST_FORMS - 1]]


class Form:
    """What all arguments of one form have in common. Keeps no object that is passed."""

    def __init__(self, form: Any, arguments: Arguments) -> None:
        self._held = form.leaf_types  # which the engine refers to
        self.engine = form
        self._spec, self._numbers, self._key = arguments.spec, arguments.numbers, arguments.key
        self._kinds = arguments.kinds
        objects = {id(leaf) for leaf in arguments.objects.values()}
        self._objects = [i for i, leaf in enumerate(arguments.leaves) if id(leaf) in objects]

    def arguments(self, leaves: list[Any], tensors: list[torch.Tensor]) -> Arguments:
        objects = {f"argument {i}": leaves[i] for i in self._objects}
        return Arguments(
            leaves, self._spec, tensors, self._numbers, objects, self._kinds, self._key, self
        )
