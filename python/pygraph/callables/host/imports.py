"""What a function imports when it runs, found in its instructions."""

from __future__ import annotations

import dataclasses
import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from pygraph.callables.host.user_code import with_inner

_BY_TEXT = ("import_module", "__import__")
_WITHOUT_EFFECT = ("CACHE", "EXTENDED_ARG", "NOP", "PRECALL")


@dataclasses.dataclass(frozen=True)
class Import:
    """``from ..name import names`` with the level 2; without names, the module itself."""

    name: str
    level: int = 0
    names: tuple[str, ...] = ()

    def module_of(self, scope: Mapping[str, Any]) -> str:
        """The module's whole name. scope: the globals of the function that imports it."""
        if self.level == 0:
            return self.name
        package = scope.get("__package__")
        if package is None:
            package = str(scope.get("__name__", ""))
            package = package if "__path__" in scope else package.rpartition(".")[0]
        parents = str(package).split(".")
        base = parents[: len(parents) - self.level + 1]
        return ".".join((*base, self.name) if self.name else base)


@functools.lru_cache(maxsize=4096)
def imports_in(code: CodeType) -> tuple[Import, ...]:
    """The imports of a function and of functions inside of it, and those that it may make by text, with
    ``importlib.import_module``."""
    found: dict[Import, None] = {}
    for part in with_inner(code):
        found.update(dict.fromkeys(_imports_of(part)))
        if any(name in part.co_names for name in _BY_TEXT):
            found.update(dict.fromkeys(_imports_by_text(part)))
    return tuple(found)


def _imports_of(code: CodeType) -> Iterator[Import]:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _WITHOUT_EFFECT]
    for i, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME":
            continue
        level, names = instructions[i - 2].argval, instructions[i - 1].argval
        names = () if not isinstance(names, tuple) or "*" in names else names
        yield Import(str(instruction.argval), level if isinstance(level, int) else 0, names)


def _imports_by_text(code: CodeType) -> Iterator[Import]:
    for text in code.co_consts:
        if isinstance(text, str) and text.replace(".", "_").isidentifier():
            name = text.lstrip(".")
            yield Import(name, len(text) - len(name))
