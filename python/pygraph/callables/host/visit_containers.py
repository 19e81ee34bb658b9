"""Containers that a callable can reach: their items have places of their own."""

from __future__ import annotations

import collections
import gc
from collections.abc import Collection, Iterable
from typing import Any

from pygraph.callables.host import probes
from pygraph.callables.host.kinds import elements_of, is_of, items_of_dict
from pygraph.callables.host.walk import Walk

# Of modules: the names of buffers that are not saved, which no forward reads.
_UNREAD = ("_non_persistent_buffers_set",)

_ORDER: Any = collections.OrderedDict.__iter__
_FACTORY: Any = vars(collections.defaultdict)["default_factory"]  # its descriptor


def visit_dict(walk: Walk, value: dict[Any, Any], path: str, attributes: bool = False) -> None:
    """attributes: whether it holds an object's, of which ``path`` is the beginning."""
    left_out = [
        key
        for key, _ in items_of_dict(value)
        if type(key) is str and (key in _UNREAD or (id(value), key) in walk.unwatched)
    ]
    kept = {key: item for key, item in items_of_dict(value) if not (left_out and key in left_out)}
    walk.found.dicts.append((value, None, tuple(left_out)))
    names = []
    for number, (key, item) in enumerate(kept.items()):
        # Others than plain keys, such as tensors in the state of an optimizer, by their place.
        is_plain = type(key) in (str, int, bool, float, type(None))
        text = repr(key) if is_plain else f"key {number}"
        names.append(f"{path}{key}" if attributes else f"{path}[{text}]")
        if not is_plain:
            walk.visit_later(key, f"{path}#{text}")
        walk.visit_later(item, names[-1])
    place = path.rstrip(".")
    walk.add_slot(f"{place}#keys", tuple(names))
    if is_of(value, collections.defaultdict):
        walk.add_member(value, _FACTORY, f"{place}#factory")
    if is_of(value, collections.OrderedDict) and len(kept) > 1:  # has an order of its own
        walk.add_probe(f"{place}#order", lambda: tuple(map(probes.key, _ORDER(value))))


def visit_list(walk: Walk, value: list[Any], path: str) -> None:
    walk.found.lists.append(value)
    visit_items(walk, value, path)


def visit_items(walk: Walk, value: Collection[Any], path: str) -> None:
    items = elements_of(value)
    walk.add_slot(f"{path}#len", len(items))
    walk.pending.extend((item, f"{path}[{i}]") for i, item in enumerate(items))


def visit_set(walk: Walk, value: Any, path: str) -> None:
    items = items_of_set(value)
    walk.add_slot(f"{path}#items", tuple(map(probes.key, items)))  # a program can see their order
    if is_of(value, set):
        walk.found.sets.append(value)
    visit_held(walk, (item for item in items if type(item) not in probes.ATOMS), f"{path}#item")


def items_of_set(value: set[Any] | frozenset[Any]) -> tuple[Any, ...]:
    """In the order of its table, which a class that derives from it may not list them in."""
    kind: Any = set if is_of(value, set) else frozenset
    return tuple(kind.__iter__(value))


def visit_deque(walk: Walk, value: Any, path: str) -> None:
    walk.add_probe(f"{path}#items", lambda: tuple(map(probes.key, elements_of(value))))
    walk.add_slot(f"{path}#maxlen", value.maxlen)
    walk.found.held.extend(elements_of(value))
    walk.found.deques.append(value)
    visit_items(walk, value, path)


def visit_held(walk: Walk, items: Iterable[Any], path: str) -> None:
    for item in items:
        walk.found.held.append(item)
        walk.visit_later(item, path)


def visit_proxy(walk: Walk, value: Any, path: str) -> None:
    """Also the view of a dictionary."""
    walk.pending.extend((of, path) for of in gc.get_referents(value))
