"""What a callable's Python can read without being passed it. A walk finds it.

The walk begins at the callable and at the objects that are passed to it, and follows

    containers    items of dictionaries, lists, tuples, sets (visit_containers.py)
    code          closures, defaults, attributes of classes, and the globals that the program's own
                  functions use, which are found in their instructions (visit_code.py,
                  visit_modules.py)
    objects       attributes and slots of instances; layouts and hooks of tensors (visit_objects.py)

Each *place* that it comes to has a path, as a program would write it: ``model.layers.0.training``. The
result (``Reachable`` in walk.py) has

    slots         what is at each place, in the order of the walk: numbers and strings themselves;
                  tensors and other opaque objects by identity; containers and instances by type, as
                  their contents have places of their own; for an object that was met before, its place
    probes        functions that tell where an iterator, a counter or an array stands (probes.py)
    the others    what the engine compares at each call (host_state.py)

A call cannot run methods of the program's classes that no code names which it may run. They are walked
last: what they read is watched like all else (names may be computed in ways that are not seen), but it
does not keep a callable from having a graph.

Two walks have the same result if and only if the callable could tell no difference, except for what a
walk cannot see (docs/explanation/whole-steps.md).
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pygraph import signal_exceptions
from pygraph.callables.host import probes
from pygraph.callables.host import visit_code as code
from pygraph.callables.host import visit_containers as containers
from pygraph.callables.host import visit_modules as modules
from pygraph.callables.host import visit_objects as objects
from pygraph.callables.host.generators import GENERATORS
from pygraph.callables.host.installed import note_files_of
from pygraph.callables.host.kinds import is_of
from pygraph.callables.host.readers import visit_asked
from pygraph.callables.host.user_code import count_as_librarys, count_as_programs
from pygraph.callables.host.walk import Reachable, Unseen, Walk

_MOST_PLACES = 200_000
_MOST_OF_PACKAGE = 10_000  # in the globals of an installed callable's package


def reachable_from(roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> Reachable:
    """Walks from the roots, by their names, the callable first. unwatched: dictionaries by identity,
    each with a key whose value is left out, as it is looked at otherwise. Raises Unseen."""
    for beginnings in note_files_of(next(iter(roots.values()), None)):
        _count_if_short(beginnings, roots)
    return _reachable(roots, unwatched, _MOST_PLACES)


def _count_if_short(beginnings: list[str], roots: Mapping[str, Any]) -> None:
    """Counts files whose paths begin so as the program's, if the walk is not much longer then."""
    most = 2 * len(_reachable(roots, (), _MOST_PLACES).slots) + _MOST_OF_PACKAGE
    for beginning in beginnings:
        count_as_programs(beginning)
    try:
        _reachable(roots, (), min(most, _MOST_PLACES))
    except Exception as error:  # of what the walk has met
        for beginning in beginnings:
            count_as_librarys(beginning)
        signal_exceptions.pass_on(error)


def _reachable(roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]], most: int) -> Reachable:
    walk = Walk(frozenset(unwatched))
    for name, root in roots.items():
        walk.visit_later(root, name)
    walk.visit_later(torch.Tensor, "torch.Tensor")  # whose methods the program may replace
    modules.visit_switch(walk, torch.backends.mha, "_is_fastpath_enabled")
    _visit_pending(walk, most)
    walk.visit_unnamed()
    _visit_pending(walk, most)
    visit_asked(walk)
    _visit_pending(walk, most)
    return walk.found


def _visit_pending(walk: Walk, most: int) -> None:
    while walk.pending:
        _visit(walk, *walk.pending.popleft())
        if len(walk.found.slots) > most:
            raise Unseen(f"it reaches more than {most} objects")


# The first of these kinds that an object is of; what is of none is an instance, or opaque.
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_VIEWS = (dict.keys, dict.values, dict.items)
_VISITS: tuple[tuple[Any, Callable[[Walk, Any, str], None]], ...] = (
    (dict, containers.visit_dict),
    (list, containers.visit_list),
    (tuple, containers.visit_items),
    ((set, frozenset), containers.visit_set),
    (collections.deque, containers.visit_deque),
    ((types.MappingProxyType, *(type(of({})) for of in _VIEWS)), containers.visit_proxy),
    (types.FunctionType, code.visit_function),
    (types.ModuleType, modules.visit_module),
    (types.MethodType, code.visit_method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), code.visit_builtin),
    ((staticmethod, classmethod), code.visit_wrapped),
    (property, code.visit_property),
    ((functools.partial, functools.partialmethod), code.visit_partial),
    (GENERATORS, code.visit_generator),
    (types.FrameType, code.visit_frame),
    (weakref.ReferenceType, code.visit_reference),
    (_PROXIES, code.visit_weak_proxy),
    (types.CellType, code.visit_cell),
    (type, code.visit_class),
)


def _visit(walk: Walk, value: Any, path: str) -> None:
    type_ = type(value)
    if type_ in probes.ATOMS:
        walk.add_slot(path, value)
    elif not walk.is_new_at(value, path):
        return
    elif is_of(value, torch.Tensor):
        objects.visit_tensor(walk, value, path)
    else:
        visit = next((of for kinds, of in _VISITS if is_of(value, kinds)), None)
        if visit is not None:
            visit(walk, value, path)
        if not is_of(value, (*modules.CODE, *_PROXIES)):
            objects.visit_instance(walk, value, path, is_opaque=visit is None)
