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

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pygraph.callables.host import probes
from pygraph.callables.host import visit_code as code
from pygraph.callables.host import visit_containers as containers
from pygraph.callables.host import visit_objects as objects
from pygraph.callables.host.walk import Reachable, Unseen, Walk

_MOST_PLACES = 200_000


def reachable_from(roots: Mapping[str, Any], unwatched: Iterable[tuple[int, str]] = ()) -> Reachable:
    """Walks from the roots, by their names. unwatched: dictionaries by identity, each with a key whose
    value is left out, as it is looked at otherwise. Raises Unseen."""
    walk = Walk(frozenset(unwatched))
    for name, root in roots.items():
        walk.later(root, name)
    walk.later(torch.Tensor, "torch.Tensor")  # whose methods the program may replace
    while walk.pending:
        _visit(walk, *walk.pending.popleft())
        if len(walk.found.slots) > _MOST_PLACES:
            raise Unseen(f"it reaches more than {_MOST_PLACES} objects")
    return walk.found


# The first of these kinds that an object is of; what is of none is an instance, or opaque.
_VIEWS = (dict.keys, dict.values, dict.items)
_VISITS: tuple[tuple[Any, Callable[[Walk, Any, str], None]], ...] = (
    (dict, containers.visit_dict),
    (list, containers.visit_list),
    (tuple, containers.visit_items),
    ((set, frozenset), containers.visit_set),
    (collections.deque, containers.visit_deque),
    ((types.MappingProxyType, *(type(of({})) for of in _VIEWS)), containers.visit_proxy),
    (types.FunctionType, code.visit_function),
    (types.ModuleType, code.visit_module),
    (types.MethodType, code.visit_method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), code.visit_builtin),
    ((staticmethod, classmethod), code.visit_wrapped),
    (property, code.visit_property),
    (functools.partial, code.visit_partial),
    (weakref.ReferenceType, code.visit_reference),
    (type, code.visit_class),
)


def _visit(walk: Walk, value: Any, path: str) -> None:
    type_ = type(value)
    if type_ in probes.ATOMS:
        walk.note(path, value)
    elif not walk.is_new_at(value, path):
        return
    elif isinstance(value, torch.Tensor):
        objects.visit_tensor(walk, value, path)
    else:
        visit = next((of for kinds, of in _VISITS if isinstance(value, kinds)), None)
        if visit is not None:
            visit(walk, value, path)
        if not isinstance(value, code.CODE):
            objects.visit_instance(walk, value, path, is_opaque=visit is None)
