"""The state of the host that a callable can see: finds it, compares it, undoes changes to it.

A replay does not run the callable's Python. So a graph serves a call only if everything that Python
would have read is what it was when the graph was recorded; and only a callable that leaves all of it as
it was can have a graph (docs/explanation/whole-steps.md).
"""

from __future__ import annotations

import collections
import gc
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.callables.host.kinds import elements_of, items_of_dict
from pygraph.callables.host.reachable import reachable_from
from pygraph.callables.host.visit_code import OF_PYTHON, content_of
from pygraph.callables.host.visit_containers import items_of_set
from pygraph.callables.host.walk import Object, Reachable, content_of_member


class HostState:
    """What a callable can read on the host, as it is when this is made. Not thread-safe."""

    def __init__(self, roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> None:
        """roots: the callable, and objects that are passed to it, by name. unwatched: as
        ``reachable_from`` has it. Raises Unseen."""
        self._roots = roots
        self._unwatched = tuple(unwatched)
        self.found: Reachable = reachable_from(roots, self._unwatched)
        self._probed = self._probe()
        self.watch = watch = runtime.engine().HostWatch()
        self._held: list[Any] = []  # what the watch refers to, for the garbage collector to see
        for dictionary, keys, left_out in self.found.dicts:
            if keys is None:
                kept = {k: v for k, v in items_of_dict(dictionary) if not left_out or k not in left_out}
                self._hold(
                    watch.add_whole_dict, dictionary, tuple(kept), tuple(kept.values()), left_out
                )
            else:
                of = {
                    k: dict.__getitem__(dictionary, k) for k in keys if dict.__contains__(dictionary, k)
                }
                absent = tuple(k for k in keys if k not in of)
                self._hold(watch.add_dict_items, dictionary, tuple(of), tuple(of.values()), absent)
        for items in self.found.lists:
            self._hold(watch.add_list, items, tuple(elements_of(items)))
        self._sets = [(elements, items_of_set(elements)) for elements in self.found.sets]
        for elements, in_order in self._sets:
            self._hold(watch.add_set, elements, in_order)
        self._deques = [(queue, tuple(elements_of(queue))) for queue in self.found.deques]
        for cell in self.found.cells:
            self._hold(watch.add_cell, cell, content_of(cell))
        members = self.found.members
        self._members = [(of, member, content_of_member(of, member)) for of, member in members]
        for watched in self._members:
            self._hold(watch.add_member, *watched)
        for tensor in self.found.tensors.values():
            watch.add_tensor(tensor)
        for function in self.found.functions:
            parts = (function.__code__, function.__defaults__, function.__kwdefaults__)
            self._held.append((function, parts))
            watch.add_function(function)
        for instance in self.found.instances:
            watch.add_instance(instance)
        for class_ in self.found.classes:
            if not watch.add_class(class_):
                self._hold_contents(class_)

    def _hold(self, add: Callable[..., None], *parts: Any) -> None:
        """Adds something to the watch, which borrows its parts."""
        self._held.append(parts)
        add(*parts)

    def _hold_contents(self, class_: type) -> None:
        """Watches the attributes and the bases of a class that Python has no version for."""
        (attributes,) = gc.get_referents(vars(class_))  # the dictionary behind the proxy
        kept = {key: value for key, value in attributes.items() if key not in OF_PYTHON}
        keys, values, left_out = tuple(kept), tuple(kept.values()), tuple(OF_PYTHON)
        add = self.watch.add_class_contents
        self._hold(add, class_, class_.__mro__, attributes, keys, values, left_out)

    def _probe(self) -> list[Any]:
        return [probe() for _, probe in self.found.probes]

    def holds(self) -> bool:
        """Whether everything is the same object, or the same number or text. Fast; False does not mean
        that the callable would see a difference: see ``changes``."""
        return bool(self.watch.holds()) and self.probes_hold()

    def probes_hold(self) -> bool:
        """Whether the probes tell what they told. False if one raises."""
        try:
            return self._probe() == self._probed
        except Exception as error:
            signal_exceptions.pass_on(error)
            return False

    def changes(self, later: HostState) -> list[str]:
        """Paths of what differs in a later state of the same roots, the most telling ones first."""
        before, after = self._places(), later._places()
        if len(before) == len(after) and all(map(_is_same, before, after)):
            return []
        # The order of the walk tells which places belong together, the paths only what to call them.
        first = next((b for a, b in zip(before, after, strict=False) if not _is_same(a, b)), None)
        old, new = dict(before), dict(after)
        paths = [
            path
            for path in old.keys() | new.keys()
            if not _is_same(("", old.get(path, _Missing)), ("", new.get(path, _Missing)))
        ]
        found = paths or [first[0] if first is not None else before[-1][0]]
        return sorted(found, key=lambda path: ("#" in path, "__class__" in path, len(path), path))

    def new_numbers(self, later: HostState) -> list[str]:
        """Paths of places of a later state where tensors are, or numbers of a class of their own, that
        are nowhere in this one: the forms that learning rates and their kin have in a recording."""
        known = {value.id for _, value in self.found.slots if isinstance(value, Object)}
        return [
            path
            for path, value in later.found.slots
            if isinstance(value, Object)
            and issubclass(value.type, (torch.Tensor, float))
            and value.id not in known
        ]

    def reaches_tensors_of(self, other: HostState) -> bool:
        """Whether all tensors of another state can still be reached."""
        known = {id(tensor) for tensor in self.found.tensors.values()}
        return all(id(tensor) in known for tensor in other.found.tensors.values())

    def switches(self) -> Callable[[], bool]:
        """Tells whether the truth values alone are what they are now: the modes of modules, flags."""
        watch = runtime.engine().HostWatch()
        held: list[Any] = []  # as in __init__
        for dictionary, keys, _ in self.found.dicts:
            of = {
                key: item
                for key, item in items_of_dict(dictionary)
                if type(item) is bool and (keys is None or key in keys)
            }
            if of:
                held.append((dictionary, tuple(of), tuple(of.values()), ()))
                watch.add_dict_items(*held[-1])
        return lambda: not held or watch.holds()

    def now(self) -> HostState:
        """The state of the same roots as it is now."""
        return HostState(self._roots, self._unwatched)

    def forget(self) -> None:
        """Keeps nothing alive any more. Not to be used afterwards."""
        self.found, self.watch = Reachable(), runtime.engine().HostWatch()
        self._probed, self._held = [], []
        self._sets, self._deques, self._members = [], [], []

    @property
    def held(self) -> Any:
        """What the watch refers to."""
        return self.found, self._held

    def restore(self) -> None:
        """Puts back what dictionaries, lists, sets, deques, slots and closures had. What was written to
        tensors, classes, files or other objects stays."""
        self.watch.restore()
        for elements, items in self._sets:
            if not _are_same(items_of_set(elements), items):
                set.clear(elements)
                set.update(elements, items)
        for queue, items in self._deques:
            if not _are_same(elements_of(queue), items):
                collections.deque.clear(queue)
                collections.deque.extend(queue, items)
        for value, member, content in self._members:
            if _are_same(content_of_member(value, member), content):
                continue
            if content:
                member.__set__(value, content[0])
            else:
                member.__delete__(value)

    def restore_if_changed(self) -> None:
        if not self.holds():
            self.restore()

    def _places(self) -> list[tuple[str, Any]]:
        probed = zip(self.found.probes, self._probed, strict=True)
        return [*self.found.slots, *((path, value) for (path, _), value in probed)]


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the same objects."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Missing:
    """In place of what is not there."""


def _is_same(a: tuple[str, Any], b: tuple[str, Any]) -> bool:
    """Of two places with what is there."""
    (path, value), (other_path, other) = a, b
    if path != other_path or type(value) is not type(other):
        return False
    if isinstance(value, float):
        return struct.pack("d", value) == struct.pack("d", other)
    if isinstance(value, complex):
        return struct.pack("dd", value.real, value.imag) == struct.pack("dd", other.real, other.imag)
    return bool(value == other)
