"""What an object really is, and what it holds: neither is asked of the object, whose class may be the
program's own and answer otherwise, or change something when it is asked.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Collection
from typing import Any

_IN_C = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)


def is_of(value: Any, kinds: type | tuple[Any, ...]) -> bool:
    """Whether its class is one of these, or derives from one. ``isinstance`` believes an object that
    names another class (``weakref.proxy``, a mock), as which the engine cannot use it."""
    return issubclass(type(value), kinds)


def attributes_of_instance(value: Any) -> Any:
    """The dictionary of its attributes, or None. Not as the program's classes answer for it."""
    classes = type(value).__mro__
    members = [vars(class_)["__dict__"] for class_ in classes if "__dict__" in vars(class_)]
    try:
        if members and type(members[0]) not in _IN_C:
            return next(of for of in members if type(of) in _IN_C).__get__(value)
        getters: Any = (vars(class_).get("__getattribute__") for class_ in classes)
        return next(of for of in getters if type(of) in _IN_C)(value, "__dict__")
    except (AttributeError, StopIteration):
        return None


def hides_attributes(class_: Any) -> bool:
    """Whether its instances have attributes in a dictionary that nobody can ask for: a class has
    defined another ``__dict__`` from the beginning."""
    members = [vars(of)["__dict__"] for of in class_.__mro__ if "__dict__" in vars(of)]
    return class_.__dictoffset__ != 0 and bool(members) and not any(type(of) in _IN_C for of in members)


def items_of_dict(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """In the order in which it is kept."""
    of: Any = collections.OrderedDict if is_of(value, collections.OrderedDict) else dict
    return list(of.items(value))


def elements_of(value: Collection[Any]) -> list[Any]:
    """Of a list, a tuple or a deque."""
    kind: Any = next(of for of in (list, tuple, collections.deque) if is_of(value, of))
    return list(kind.__iter__(value))
