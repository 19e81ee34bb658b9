"""What a callable can read on the host: found, watched, compared, put back."""

from __future__ import annotations

import collections
import gc
import itertools
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.random_states import random_state
from pygraph.callables.host.reachable import reachable_from
from pygraph.callables.host.user_code import globals_used_by
from pygraph.callables.host.walk import Unseen

flag = False
step = 0
last: int


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class WithClassAttribute:
    scale = 1.0

    def read(self) -> float:
        return self.scale


def changes(function: Callable[..., Any], change: Callable[[], object]) -> list[str]:
    before = HostState({"f": function})
    assert before.holds()
    change()
    found = before.changes(before.now())
    assert bool(found) != before.holds() or not found, "the fast check misses it"
    return found


def test_attributes_of_what_a_function_refers_to() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    function = lambda x: model(x)  # noqa: E731
    assert changes(function, model[1].eval) == ["model.1.training"]
    assert changes(function, lambda: model[0].requires_grad_(False)) == [
        "model.0.bias.requires_grad",
        "model.0.weight.requires_grad",
    ]


def test_a_parameter_that_is_replaced() -> None:
    model = torch.nn.Linear(2, 2)

    def replace() -> None:
        model.weight = torch.nn.Parameter(torch.ones(2, 2))

    assert "model.weight" in changes(lambda x: model(x), replace)


def test_numbers_of_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)

    def move() -> None:
        optimizer.param_groups[0]["lr"] = 0.01

    assert changes(lambda: optimizer.step(), move) == ["optimizer.param_groups[0]['lr']"]


def test_globals_that_the_code_reads_and_no_others() -> None:
    model = SimpleNamespace(step=lambda: None)

    def reads() -> bool:
        return flag

    def reads_an_attribute_of_that_name() -> None:
        model.step()

    def turn(name: str, value: object) -> Callable[[], None]:
        return lambda: globals().__setitem__(name, value)

    assert changes(reads, turn("flag", True)) == ["flag"]
    assert changes(reads_an_attribute_of_that_name, turn("step", 1)) == []
    turn("flag", False)()
    turn("step", 0)()


def test_names_inside_of_inner_functions_are_read() -> None:
    def outer() -> Callable[[], bool]:
        def inner() -> bool:
            return flag

        return inner

    assert ("flag",) in globals_used_by(outer.__code__)


def test_what_must_be_asked() -> None:
    counter, numbers, items = itertools.count(), random.Random(1), {1, 2}
    queue, slotted = collections.deque([1], maxlen=1), Slotted()
    generator = (i for i in range(3))
    small = torch.zeros(2)

    def function() -> object:
        return counter, numbers, items, queue, slotted, generator, small

    assert changes(function, lambda: next(counter)) == ["counter"]
    assert changes(function, numbers.random) == ["numbers"]
    assert changes(function, lambda: items.add(3)) == ["items#items"]
    assert changes(function, lambda: queue.append(2)) == ["queue[0]", "queue#items"]
    assert changes(function, lambda: next(generator)) == ["generator"]
    assert changes(function, lambda: setattr(slotted, "value", 2)) == ["slotted.value"]
    assert changes(function, lambda: small.numpy().__setitem__(0, 1.0)) == ["small#values"]


def test_attributes_of_the_programs_classes() -> None:
    thing = WithClassAttribute()
    change = lambda: setattr(WithClassAttribute, "scale", 2.0)  # noqa: E731
    assert changes(lambda: thing.read(), change) == ["WithClassAttribute.scale"]
    WithClassAttribute.scale = 1.0


def test_lists_and_closures() -> None:
    losses: list[float] = []
    total = 0

    def function() -> None:
        nonlocal total
        total += 1
        losses.append(0.5)

    assert changes(function, function) == ["total", "losses[0]", "losses#len"]


def test_globals_that_are_only_written() -> None:
    def function() -> None:
        global last
        last = 1

    assert changes(function, function) == ["last"]
    del globals()["last"]


def test_the_order_of_a_dictionary() -> None:
    scales = {"a": 1, "b": 2}

    def reverse() -> None:
        scales["a"] = scales.pop("a")

    assert changes(lambda: scales, reverse) == ["scales#keys"]


def test_hooks_of_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    found = changes(lambda: parameter, lambda: parameter.register_hook(lambda grad: None))
    assert any(path.startswith("parameter.hooks") for path in found)


def test_attributes_of_functions_and_tensors() -> None:
    tensor = torch.ones(1)
    tensor.note = 1  # type: ignore[attr-defined]

    def inner() -> None:
        pass

    def function() -> object:
        return inner, tensor

    assert changes(function, lambda: setattr(inner, "calls", 1)) == ["inner.calls", "inner#keys"]
    assert changes(function, lambda: setattr(tensor, "note", 2)) == ["tensor.note"]


def test_an_iterator_whose_place_cannot_be_seen_is_refused() -> None:
    pairs = zip([1], [2], strict=True)
    with pytest.raises(Unseen, match="pairs is an iterator"):
        HostState({"f": lambda: pairs})


def test_what_is_watched_is_collected_as_garbage() -> None:
    def use() -> Any:
        model = torch.nn.Linear(1, 1)
        model.function = lambda: model
        model.state = HostState({"f": model.function})
        return weakref.ref(model)

    weak = use()
    gc.collect()
    assert weak() is None


def test_an_equal_new_container_is_no_change() -> None:
    holder = SimpleNamespace(states={"a": [1, 2]})
    before = HostState({"f": lambda: holder})
    holder.states = {"a": [1, 2]}
    assert not before.holds()
    assert before.changes(before.now()) == []


def test_an_equal_number_is_no_change_and_another_zero_is() -> None:
    holder = SimpleNamespace(value=0.0, text="a" * 10)
    before = HostState({"f": lambda: holder})
    holder.text = "".join(["a"] * 10)
    holder.value = float("0")
    assert before.holds()
    holder.value = -0.0
    assert not before.holds()
    assert before.changes(before.now()) == ["holder.value"]
    holder.value = 0
    assert not before.holds()


def test_everything_is_put_back() -> None:
    holder = SimpleNamespace(value=1, items=[1, 2], more={"a": 1})
    count = 5

    def function() -> None:
        nonlocal count
        count += 1
        holder.value = 2
        holder.items.append(3)
        holder.new = 1
        del holder.more["a"]

    before = HostState({"f": function})
    function()
    before.restore()
    assert before.holds() and count == 5
    assert vars(holder) == {"value": 1, "items": [1, 2], "more": {"a": 1}}


def test_random_numbers_that_are_drawn_on_the_host() -> None:
    for draw in (random.random, lambda: torch.rand(1)):
        before = random_state()
        assert random_state() == before
        draw()
        assert random_state() != before


def test_a_callable_that_reaches_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraph.callables.host.reachable._MOST_PLACES", 10)
    items = list(range(100))
    with pytest.raises(Unseen):
        reachable_from({"f": lambda: items})


def test_what_is_left_out_may_change_and_nothing_else() -> None:
    group = {"lr": 0.1, "betas": 0.9}
    state = HostState({"group": group}, [(id(group), "lr")])
    assert state.holds()
    group["lr"] = 0.2
    assert state.holds()
    group["more"] = 1.0
    assert not state.holds()
    state.restore()
    assert group == {"lr": 0.2, "betas": 0.9} and state.holds()
    del group["lr"]
    assert state.holds()
    del group["betas"]
    assert not state.holds()
    state.restore()
    assert group == {"betas": 0.9} and state.holds()


def test_a_change_that_is_undone_between_two_looks_is_none() -> None:
    holder = SimpleNamespace(number=1.0, items={"a": 1})
    state = HostState({"holder": holder})
    for _ in range(3):
        assert state.holds()
        holder.number, holder.items["a"] = 2.0, 2
        assert not state.holds()
        holder.number, holder.items["a"] = float("1.0"), 1
        assert state.holds()
