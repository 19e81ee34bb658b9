"""Arguments of a known form are taken apart by the engine as they are in Python."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import random
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pygraph import runtime
from pygraph.callables.signature import Arguments, Forms, Key, take_apart, unflattener


class _Number(enum.IntEnum):
    ONE = 1


class _Pair(collections.namedtuple("_Pair", "a b")):
    pass


class _Subclass(torch.Tensor):
    pass


class _Mapping(dict):  # type: ignore[type-arg]
    pass


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.label = "x"  # type: ignore[attr-defined]
    return tensor


def _with_gradient() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.grad = torch.ones(1)
    return tensor


_SHARED = [
    _with_gradient(),
    torch.ones(1),
    torch.nn.Parameter(torch.ones(1)),
    torch.ones(1, requires_grad=True),
]
_OBJECTS = [SimpleNamespace(a=1), object(), len, _Number, torch.nn.Linear(1, 1), _Mapping(a=1)]
_NOT_A_NUMBER = float("nan")
_VALUES = [
    *(None, True, False, 1, 0, 2**70, 1.0, 0.0, -0.0, _NOT_A_NUMBER, 1j, complex(0.0, -0.0)),
    *("a", "", b"a", torch.float32, torch.float64, torch.device("cpu"), torch.device("cuda", 0)),
    *(_Number.ONE, torch.Size([1])),
]
_KEYS = ["a", "b", "c", 1, 2, True, (1,), 1.0]


class _Maker:
    """Random arguments. Those of one seed differ in their tensors alone, and, with a probability, in
    leaves and containers."""

    def __init__(self, seed: int, change: float, is_plain: bool) -> None:
        self._random = random.Random(seed)
        self._changes = random.Random()
        self._changes.seed(seed * 1000 + int(change * 100))
        self._change = change
        self._is_plain = is_plain

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._tree(0) for _ in range(self._pick(range(4))))
        return args, {name: self._tree(0) for name in ("x", "y") if self._pick((True, False))}

    def _pick(self, among: Any) -> Any:
        chosen = self._random.choice(among)
        return self._changes.choice(among) if self._changes.random() < self._change else chosen

    def _tree(self, depth: int) -> Any:
        if depth > 2 or self._pick((0, 0, 1)) == 0:
            return self._leaf()
        kinds: list[Any] = [tuple, list, dict]
        if not self._is_plain:
            kinds += [collections.OrderedDict, _Pair, collections.deque]
        kind = self._pick(kinds)
        items = [self._tree(depth + 1) for _ in range(self._pick(range(4)))]
        if kind is _Pair:
            return _Pair(self._leaf(), items)
        if kind in (dict, collections.OrderedDict):
            keys = _KEYS[:3] if self._is_plain else _KEYS
            return kind((self._pick(keys), item) for item in items)
        return kind(items)

    def _leaf(self) -> Any:
        kind = self._pick("tttvo" if self._is_plain else "tttvoas")
        if kind == "t":
            return self._pick([torch.ones(2), torch.ones(2), *_SHARED])
        if kind == "v":
            return self._pick(_VALUES[:-2] if self._is_plain else _VALUES)
        if kind == "o":
            return self._pick(_OBJECTS[:-1] if self._is_plain else _OBJECTS)
        return _with_attribute() if kind == "a" else torch.ones(1).as_subclass(_Subclass)


def _assert_equal(ours: Arguments, theirs: Arguments) -> None:
    for name in ("leaves", "tensors"):
        pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
        assert all(a is b for a, b in pairs), name
    assert ours.spec == theirs.spec and ours.numbers == theirs.numbers and ours.key == theirs.key
    assert hash(ours.key) == hash(theirs.key)
    assert list(ours.objects) == list(theirs.objects)
    assert all(a is b for a, b in zip(ours.objects.values(), theirs.objects.values(), strict=True))


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("change", [0.0, 0.02, 0.2])
def test_what_the_engine_takes_apart_is_what_python_does(is_plain: bool, change: float) -> None:
    known = compared = 0
    for seed in range(400):
        first = _Maker(seed, 0.0, is_plain).arguments()
        second = _Maker(seed, change, is_plain).arguments()
        arguments, expected = take_apart(*first), take_apart(*second)
        if arguments is None:
            continue
        compared += 1
        forms = Forms()
        forms.add(arguments, *first)
        found = forms.take_apart(*second)
        if found is not None:
            assert expected is not None
            _assert_equal(found, expected)
            known += 1
        elif is_plain:
            assert expected is None or expected.key != arguments.key
    assert known >= (compared if is_plain and change == 0.0 else compared // 10) > 0


def test_parameters_and_gradients_belong_to_the_form() -> None:
    """Python may ask a tensor for both, and a recording's stand-ins have neither."""
    tensors = [torch.ones(1), torch.nn.Parameter(torch.ones(1), requires_grad=False), _with_gradient()]
    for a in tensors:
        forms, arguments = Forms(), take_apart((a,), {})
        assert arguments is not None
        forms.add(arguments, (a,), {})
        for b in tensors:
            other = take_apart((b,), {})
            assert other is not None and (other.key == arguments.key) == (a is b)
            assert (forms.take_apart((b,), {}) is not None) == (a is b)


def test_modes_belong_to_the_form() -> None:
    forms, args = Forms(), (torch.ones(2),)
    arguments = take_apart(args, {})
    assert arguments is not None
    forms.add(arguments, args, {})
    modes: list[Any] = [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.float16),
        torch.autocast("cuda", enabled=False, dtype=torch.bfloat16),
    ]
    for mode in modes:
        with mode:
            other = take_apart(args, {})
            assert forms.take_apart(args, {}) is None and other is not None
            assert other.key != arguments.key
    assert forms.take_apart(args, {}) is not None


def test_a_class_that_becomes_a_container_has_no_form_any_more() -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    forms, args = Forms(), (Batch(torch.ones(2)),)
    arguments = take_apart(args, {})
    assert arguments is not None
    forms.add(arguments, args, {})
    assert forms.take_apart(args, {}) is not None
    pytree.register_pytree_node(Batch, lambda b: ([b.x], None), lambda x, _: Batch(*x))
    try:
        assert forms.take_apart(args, {}) is None
        forms.add(arguments, args, {})
        assert forms.take_apart(args, {}) is None
    finally:
        pytree._deregister_pytree_node(Batch)


def test_the_last_forms_are_known() -> None:
    forms = Forms()
    calls = [tuple(torch.ones(1) for _ in range(count)) for count in range(12)]
    for args in calls:
        arguments = take_apart(args, {})
        assert arguments is not None
        forms.add(arguments, args, {})
    assert [forms.take_apart(args, {}) is not None for args in calls] == [False] * 4 + [True] * 8


def test_a_form_keeps_nothing_of_the_programs() -> None:
    class Thing:
        pass

    thing, tensor = Thing(), torch.ones(2)
    forms = Forms()
    arguments = take_apart((thing, [tensor]), {})
    assert arguments is not None
    forms.add(arguments, (thing, [tensor]), {})
    found = forms.take_apart((thing, [tensor]), {})
    assert found is not None and found.objects == {"argument 0": thing}
    kept = weakref.ref(thing), weakref.ref(tensor)
    del thing, tensor, arguments, found
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_trees_of_results_are_made_as_pytree_makes_them() -> None:
    trees: list[Any] = [
        *(1, None, (), (1,), (1, 2), [], [1, 2], {}, {"a": 1, "b": 2}, {2: 1, "a": 2}),
        *((1, (2, 3)), [(1,), {"a": 2}], {"a": [1]}, collections.OrderedDict(b=1, a=2), _Pair(1, 2)),
        *(((),), [[]], {"a": ()}, collections.deque([1, 2]), torch.Size([1])),
    ]
    for tree in trees:
        leaves, spec = pytree.tree_flatten(tree)
        leaves = [object() for _ in leaves]
        for of in (leaves, tuple(leaves)):
            made, expected = unflattener(spec)(of), pytree.tree_unflatten(leaves, spec)
            assert type(made) is type(expected)
            assert pytree.tree_structure(made) == pytree.tree_structure(expected)
            assert all(map(lambda a, b: a is b, pytree.tree_leaves(made), leaves))


@pytest.mark.parametrize("count", [1, 65, 1000])
def test_many_tensors_have_a_form(count: int) -> None:
    """As the gradients of a large model have, which are passed in each step."""

    def arguments(*same: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [torch.ones(1) for _ in range(count)]
        for i, j in same:
            tensors[i] = tensors[j]
        return ([*tensors, tensors[0]], 1.0), {}

    first, other = arguments(), arguments()
    taken = take_apart(*first)
    assert taken is not None
    forms = Forms()
    forms.add(taken, *first)
    found, expected = forms.take_apart(*other), take_apart(*other)
    assert found is not None and expected is not None
    _assert_equal(found, expected)
    if count > 1:  # another of them is there twice
        assert forms.take_apart(*arguments((count - 1, count // 2))) is None
        assert forms.take_apart(*arguments((1, 0))) is None
    args, kwargs = arguments()
    args[0][-1] = torch.ones(1)  # none is there twice
    assert forms.take_apart(args, kwargs) is None


def test_equal_keys_are_compared_once() -> None:
    compared = []

    class Compared(tuple):  # type: ignore[type-arg]
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            compared.append(0)
            return tuple.__eq__(self, other)

        __hash__ = tuple.__hash__

    one, other, third = Key(Compared((1,))), Key(Compared((1,))), Key(Compared((2,)))
    assert one == other and one == other and {one: 1}[other] == 1
    assert len(compared) == 1 and one != third and hash(one) == hash(other)


def test_versions_of_what_is_written_are_counted() -> None:
    with torch.inference_mode():
        inference = torch.ones(1)
    tensors = [torch.ones(1), torch.ones(1), inference, torch.ones(2)[:1]]
    runtime.engine().bump_versions(tensors, [0, 2, 3])
    assert [t._version for t in tensors if not t.is_inference()] == [1, 0, 1]
    with pytest.raises(IndexError):
        runtime.engine().bump_versions(tensors, [4])
