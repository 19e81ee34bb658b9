"""What an object really is, and what it holds: neither is asked of the object, whose class may be the
program's own and answer otherwise, or change something when it is asked.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any


def is_of(value: Any, kinds: type | tuple[Any, ...]) -> bool:
    """Whether its class is one of these, or derives from one. ``isinstance`` believes an object that
    names another class (``weakref.proxy``, a mock), as which the engine cannot use it."""
    return issubclass(type(value), kinds)


def items_of_dict(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """In the order in which it is kept."""
    of: Any = collections.OrderedDict if is_of(value, collections.OrderedDict) else dict
    return list(of.items(value))


def elements_of(value: Collection[Any]) -> list[Any]:
    """Of a list, a tuple or a deque."""
    kind: Any = next(of for of in (list, tuple, collections.deque) if is_of(value, of))
    return list(kind.__iter__(value))
