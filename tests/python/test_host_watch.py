"""Changes between two looks at the host's state, however often it has been looked at before: Python may
have been asked to tell about them by then (bindings/callables/dict_changes.h)."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pygraph.callables.host.host_state import HostState

Change = Callable[["Program"], object]


class Program:
    def __init__(self) -> None:
        layers = [torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout()]
        self.model: Any = torch.nn.Sequential(*layers)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.plain: dict[Any, Any] = {"a": 1, "b": [1.0], 3: "c"}
        self.ordered = collections.OrderedDict(x=1, y=2)
        self.names: set[Any] = {"a", 1, (1, 2)}
        self.numbers = {0, 8}  # of which the first comer is the first

    def state(self) -> HostState:
        return HostState({"program": self})


def _delete_and_add(program: Program) -> None:
    value = program.plain.pop("a")
    program.plain["a"] = value  # now the last one


def _set_data(program: Program) -> None:
    program.model[0].weight.data = torch.zeros(3, 2)


def _reorder(program: Program) -> None:
    """Makes a set list its items in another order."""
    before = list(program.numbers)
    program.numbers.clear()
    program.numbers.update(reversed(before))
    assert list(program.numbers) != before


CHANGES: dict[str, Change] = {
    "attribute": lambda of: setattr(of.model[1], "momentum", 0.5),
    "attribute, by its dictionary": lambda of: vars(of.model[1]).update(momentum=0.5),
    "new attribute": lambda of: setattr(of.model[1], "another", 1),
    "deleted attribute": lambda of: delattr(of.model[1], "momentum"),
    "dictionary of attributes": lambda of: setattr(of.model[1], "__dict__", vars(of.model[1]).copy()),
    "class": lambda of: setattr(of.model[2], "__class__", torch.nn.Identity),
    "mode": lambda of: of.model.eval(),
    "parameter": lambda of: setattr(of.model[0], "weight", torch.nn.Parameter(torch.ones(2, 2))),
    "parameter, by its dictionary": lambda of: of.model[0]._parameters.update(bias=None),
    "parameters": lambda of: setattr(of.model[0], "_parameters", dict(of.model[0]._parameters)),
    "buffer": lambda of: setattr(of.model[1], "running_mean", torch.ones(2)),
    "module": lambda of: of.model.__setitem__(1, torch.nn.BatchNorm1d(2)),
    "cleared modules": lambda of: of.model._modules.clear(),
    "dtype": lambda of: of.model.to(torch.float64),
    "data": _set_data,
    "set_": lambda of: of.model[1].running_mean.set_(torch.ones(3)),
    "resize_": lambda of: of.model[1].running_mean.resize_(1),
    "as_strided_": lambda of: of.model[1].running_mean.as_strided_((2,), (0,)),
    "requires_grad": lambda of: of.model[0].weight.requires_grad_(False),
    "hook": lambda of: of.model[0].register_forward_hook(lambda *_: None),
    "hook of a tensor": lambda of: of.model[0].weight.register_hook(lambda g: g),
    "rate": lambda of: of.optimizer.param_groups[0].update(lr=0.2),
    "state of the optimizer": lambda of: of.optimizer.state.clear() or of.optimizer.state.update(a=1),
    "group": lambda of: of.optimizer.param_groups.append({"params": []}),
    "value": lambda of: of.plain.update(a=2),
    "value that is equal": lambda of: of.plain.update(a=True),
    "no value": lambda of: of.plain.update(a=None),
    "deletion": lambda of: of.plain.pop("a"),
    "order": _delete_and_add,
    "key": lambda of: of.plain.setdefault("z"),
    "clear": lambda of: of.plain.clear(),
    "last item": lambda of: of.ordered.popitem(),
    "list": lambda of: of.plain["b"].append(1),
    "dictionary": lambda of: setattr(of, "plain", dict(of.plain)),
    "set": lambda of: setattr(of, "names", set(of.names)),
    "one item more": lambda of: of.names.add("b"),
    "many items more": lambda of: of.names.update(range(100)),
    "one item less": lambda of: of.names.discard("a"),
    "another item": lambda of: of.names.symmetric_difference_update({"a", "b"}),
    "item that is equal": lambda of: of.names.discard(1) or of.names.add(True),
    "another item that is equal": lambda of: of.names.discard((1, 2)) or of.names.add(tuple([1, 2])),
    "no items": lambda of: of.names.clear(),
    "order of items": _reorder,
}


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change: Change, looks: int) -> None:
    program = Program()
    state = program.state()
    for _ in range(looks):
        assert state.holds()
    change(program)
    for _ in range(3):  # as long as it is there
        assert not state.holds()
    assert program.state().holds()


def test_what_changes_nothing() -> None:
    program = Program()
    state = program.state()
    for _ in range(9):
        assert state.holds()
        program.plain["a"] = program.plain["a"]
        program.plain["a"], kept = 5, program.plain["a"]
        program.plain["a"] = kept
        program.model.eval()
        program.model.train()
        program.model[1].momentum = float("0.1")
        program.optimizer.zero_grad()
        program.names.add("".join(["a"]))
        program.names.discard("a")
        program.names.add("".join(["a"]))  # another string


def test_classes_that_have_been_modified_often() -> None:
    """Python has no version for them from 3.13 on."""

    class Base:
        scale = 1.0

    class Thing(Base):
        pass

    for i in range(1200):
        Thing.scale = float(i)
        assert Thing().scale == i
    state = HostState({"class": Thing})
    for _ in range(5):
        assert state.holds()
    Thing.__doc__ = "another one, which no program reads"
    Thing.scale = 2.0
    assert not state.holds()
    state.restore()
    assert Thing.scale == 2.0
    del Thing.scale
    assert Thing.scale == 1.0
    for change in (lambda: setattr(Base, "scale", 3.0), lambda: setattr(Thing, "__bases__", (Other,))):
        state = HostState({"class": Thing})
        assert state.holds()
        change()
        assert not state.holds()


class Other:
    pass


def test_sets_are_compared_without_python() -> None:
    class Sorted(set[Any]):
        def __iter__(self) -> Any:
            return iter(sorted(set.__iter__(self), key=repr, reverse=True))

    items = {"own order": Sorted(range(9)), "plain": {1, 2}, "empty": set(), "frozen": frozenset({1})}
    state = HostState({"items": items})
    assert state.found.probes == []
    for _ in range(9):
        assert state.holds()
    items["own order"].add(9)
    assert not state.holds()
    items["own order"].discard(9)
    assert state.holds()
    items["empty"].add(1)
    assert not state.holds()


def test_a_dictionary_that_is_always_modified() -> None:
    program = Program()
    states = [program.state(), program.state()]
    for i in range(250):
        program.plain["a"] = -1
        program.plain["a"] = 1
        assert states[0].holds()
        if i % 2:
            assert states[1].holds()
    for _ in range(3):
        program.plain["a"] = 2
        assert not any(state.holds() for state in states)
        program.plain["a"] = 1
        assert all(state.holds() for state in states)


def test_a_change_is_seen_again_after_it_was_undone() -> None:
    program = Program()
    state = program.state()
    for _ in range(6):
        assert state.holds()
        program.model[1].momentum = 0.5
        program.plain["a"] = 2
        assert not state.holds()
        program.plain["a"] = 1
        assert not state.holds()
        program.model[1].momentum = 0.1
        assert state.holds()


def test_restore() -> None:
    program = Program()
    state = program.state()
    for _ in range(6):
        assert state.holds()
        program.plain.clear()
        program.model.eval()
        assert not state.holds()
        state.restore()
        assert state.holds() and list(program.plain) == ["a", "b", 3] and program.model.training


def _pop_and_add(ordered: collections.OrderedDict[str, int]) -> None:
    ordered.pop("x")
    ordered["z"] = 3


@pytest.mark.parametrize(
    "change",
    [
        lambda of: of.pop("x"),
        lambda of: of.clear(),
        _pop_and_add,
        lambda of: of.__setitem__("x", 5),
        lambda of: of.move_to_end("x"),
    ],
)
@pytest.mark.parametrize("kind", [collections.OrderedDict, type("Own", (collections.OrderedDict,), {})])
def test_restore_of_ordered_dictionaries(kind: Any, change: Callable[[Any], Any]) -> None:
    """They have a list of their keys of their own."""
    program = Program()
    program.ordered = kind(w=0, x=1, y=2)
    program.ordered.move_to_end("w")
    state = program.state()
    for _ in range(5):
        assert state.holds()
        change(program.ordered)
        state.restore()
        assert list(program.ordered.items()) == [("x", 1), ("y", 2), ("w", 0)]
        assert len(program.ordered) == 3 and list(reversed(program.ordered)) == ["w", "y", "x"]


class _Text(str):
    """Equal to a string, but another key to who reads it."""


@pytest.mark.parametrize(("old", "new"), [(1, True), (0.0, -0.0), ("a", _Text("a"))])
@pytest.mark.parametrize("looks", [1, 4])
def test_another_key_that_is_equal(old: Any, new: Any, looks: int) -> None:
    program = Program()
    program.ordered = collections.OrderedDict({old: "value"})
    state = program.state()
    assert all(state.holds() for _ in range(looks))
    program.ordered[new] = program.ordered.pop(old)
    assert not state.holds()


class _Asking:
    """A key in whose hash another look is taken, as another thread may do then."""

    asks: Callable[[], object] | None = None

    def __hash__(self) -> int:
        asks, self.asks = self.asks, None
        if asks is not None:
            asks()
            self.asks = asks
        return 1


def test_a_look_within_a_look() -> None:
    program = Program()
    key = _Asking()
    program.ordered = collections.OrderedDict({key: 1, "b": 2})
    state = program.state()
    assert all(state.holds() for _ in range(5))
    program.ordered[key] = 3
    found: list[bool] = []
    key.asks = lambda: found.append(state.holds())
    assert not state.holds() and not any(found)
    key.asks = None
    program.ordered[key] = 1
    assert state.holds()


def test_several_states_of_one_program() -> None:
    """One that ends does not keep Python from telling the others."""
    program = Program()
    states = [program.state() for _ in range(4)]
    for _ in range(5):
        assert all(state.holds() for state in states)
    while states:
        program.plain["a"] = 2
        assert not any(state.holds() for state in states)
        program.plain["a"] = 1
        assert all(state.holds() for state in states)
        del states[len(states) // 2]
        gc.collect()


def test_dictionaries_that_end() -> None:
    """Others take their places in memory."""
    for i in range(300):
        program = Program()
        state = program.state()
        for _ in range(4):
            assert state.holds()
        if i % 2:
            state.forget()
        else:
            program.plain = {"a": 1, "b": program.plain["b"], 3: "c"}
            assert not state.holds()
            del state
        del program
    gc.collect()


def test_threads() -> None:
    program = Program()
    failures: list[str] = []
    is_over = threading.Event()

    def own() -> None:
        while not is_over.is_set():
            mine = Program()
            states = [mine.state(), program.state()]
            for i in range(6):
                if not states[0].holds() or not states[1].holds():
                    failures.append(f"not at look {i}")
                mine.plain["a"] = i + 2
                if states[0].holds():
                    failures.append(f"missed after look {i}")
                mine.plain["a"] = 1

    threads = [threading.Thread(target=own) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(200):
        program.plain["b"] = program.plain["b"]
        program.model.another = i  # what is added and deleted again between two bytecodes
        del program.model.another
    is_over.wait(1)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not [failure for failure in failures if failure.startswith("missed")]


def _run_this_file(**environment: str) -> None:
    names = "test_a_change_is_seen or test_restore or several"
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", names]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]


def test_without_short_checks() -> None:
    _run_this_file(PYGRAPH_SHORT_CHECKS="0")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 does not tell about dictionaries")
def test_without_a_watcher_that_is_left() -> None:
    _run_this_file(TEST_TAKES_ALL_WATCHERS="1")


if os.environ.get("TEST_TAKES_ALL_WATCHERS"):
    _KIND = ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p
    )
    _TAKEN = _KIND(lambda *_: 0)
    try:
        while True:
            ctypes.pythonapi.PyDict_AddWatcher(_TAKEN)
    except RuntimeError:
        pass
