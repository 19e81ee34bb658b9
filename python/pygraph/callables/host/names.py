"""Which attributes code may ask for: by their names, or by names that it computes."""

from __future__ import annotations

import dis
import functools
import weakref
from types import CodeType, FunctionType
from typing import Any

from pygraph.callables.host.user_code import with_inner

_BY_NAME = ("getattr", "attrgetter", "methodcaller")  # called with an attribute's name
_OF_ALL = frozenset(("vars", "dir", "getmembers", "__dict__", "__getattribute__", "eval", "exec"))
_TEXTS_MADE = ("FORMAT_", "BUILD_STRING", "BINARY_", "CONVERT_VALUE")  # beginnings of instructions


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Attributes, globals, and texts that could be names, of a function and of those inside of it."""
    found: set[str] = set()
    for part in with_inner(code):
        found.update(part.co_names)
        found.update(_texts_in(part.co_consts))
    return frozenset(found)


def _texts_in(constants: tuple[Any, ...]) -> set[str]:
    parts = (part for text in constants if type(text) is str for part in text.split("."))
    found = {part for part in parts if part.isidentifier()}  # attrgetter("model.training")
    nested = (of for of in constants if type(of) in (tuple, frozenset))
    return found.union(*(_texts_in(tuple(of)) for of in nested))


_of_classes: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def names_of_class(class_: type) -> frozenset[str]:
    """What a class of a library's has, and what its methods name."""
    found = _of_classes.get(class_)
    if found is None:
        found = _of_classes[class_] = _names_of_class(class_)
    return found


def _names_of_class(class_: type) -> frozenset[str]:
    values = list(vars(class_).items())
    parts = (of.fget if isinstance(of, property) else getattr(of, "__func__", of) for _, of in values)
    codes = [of.__code__ for of in parts if isinstance(of, FunctionType)]
    return frozenset(name for name, _ in values).union(*map(names_in, codes))


@functools.lru_cache(maxsize=4096)
def computes_names(code: CodeType) -> bool:
    """Whether a function, or one inside of it, may ask for an attribute whose name is not in it."""
    return any(_computes_names(part) for part in with_inner(code))


def _computes_names(code: CodeType) -> bool:
    names = set(code.co_names)
    if names & _OF_ALL:
        return True
    if names.isdisjoint(_BY_NAME):
        return False
    instructions = list(dis.get_instructions(code))
    begins = [i for i, of in enumerate(instructions) if of.argval in _BY_NAME]
    return not all(_has_constant(instructions, i + 1) for i in begins)


def _has_constant(instructions: list[dis.Instruction], begin: int) -> bool:
    """Whether the call that follows is given a text that the function has as a constant."""
    found = False
    for instruction in instructions[begin:]:
        if instruction.opname.startswith(_TEXTS_MADE):
            return False
        if instruction.opname.startswith("CALL"):
            return found
        found = found or (instruction.opname == "LOAD_CONST" and type(instruction.argval) is str)
    return False
