"""What a function imports when it runs, and which attributes of it the function reads.

Both are found in the instructions. ``import a.b`` binds a name, mostly a local variable. Where each use
of the variable is followed by the name of an attribute, only these attributes are read. Else, the
module is used as a value: it is passed on, or kept in a closure.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from pygraph.callables.host.user_code import ATTRIBUTES, WITHOUT_EFFECT, with_inner

_BY_TEXT = ("import_module", "__import__")
_LOADS = (
    *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"),
    *("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST"),
)
_BY_NAME = ("locals", "vars", "dir", "eval", "exec")  # functions by which code reads any variable
_BETWEEN_IMPORTS = ("SWAP", "POP_TOP", "ROT_TWO")
_Chain = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Import:
    """A module, with its whole name or, if ``level`` is not 0, relative to the package.

    chains: attributes that are read of it, ``("nn", "functional", "relu")``; the empty chain: the
    module itself, as a value. is_from: ``from module import name``, which finds submodules, too.
    """

    name: str
    level: int
    chains: tuple[_Chain, ...]
    is_from: bool = False

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
        imports = list(_imports_of(part))
        if any(name in part.co_names for name in _BY_NAME):
            imports = [dataclasses.replace(of, chains=((),), is_from=False) for of in imports]
        found.update(dict.fromkeys(imports))
        if any(name in part.co_names for name in _BY_TEXT):
            found.update(dict.fromkeys(_imports_by_text(part.co_consts)))
    return tuple(found)


def _imports_of(code: CodeType) -> Iterator[Import]:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in WITHOUT_EFFECT]
    for i, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME":
            continue
        name, level = str(instruction.argval), instructions[i - 2].argval
        level = level if isinstance(level, int) else 0
        names = instructions[i - 1].argval
        if isinstance(names, tuple) and "*" not in names:
            yield Import(name, level, tuple(_taken(instructions, i + 1)), is_from=True)
            continue
        store = i + 1
        while instructions[store].opname in ("IMPORT_FROM", *_BETWEEN_IMPORTS):
            store += 1
        is_renamed = store > i + 1  # import a.b as c
        module = name if is_renamed else name.partition(".")[0]
        yield Import(module, level, _uses(instructions, store))
        if module != name:
            yield Import(name, level, ())


def _taken(instructions: Sequence[dis.Instruction], first: int) -> Iterator[_Chain]:
    """``from m import a, b as c``: what is read of ``a`` and of ``c``."""
    while instructions[first].opname == "IMPORT_FROM":
        name = str(instructions[first].argval)
        for chain in _uses(instructions, first + 1):
            yield (name, *chain)
        first += 2


def _uses(instructions: Sequence[dis.Instruction], store: int) -> tuple[_Chain, ...]:
    """What is read of the variable that an instruction stores; the empty chain: it is used as it is."""
    first = instructions[store]
    if first.opname not in ("STORE_FAST", "STORE_FAST_LOAD_FAST"):
        return ((),)
    variable = _variables(first)[0]
    found: dict[_Chain, None] = {}
    for i, instruction in enumerate(instructions):
        variables = _loaded(instruction)
        if variable not in variables:
            continue
        chain = []
        if (
            instruction.opname in _LOADS
            and variables.count(variable) == 1
            and variables[-1] == variable
        ):
            for read in instructions[i + 1 :]:
                if read.opname not in ATTRIBUTES:
                    break
                chain.append(str(read.argval))
        found[tuple(chain)] = None
    return tuple(found)


def _loaded(instruction: dis.Instruction) -> tuple[Any, ...]:
    """The local variables that an instruction uses, the one that is on top of the stack last."""
    if instruction.opname in ("STORE_FAST", "DELETE_FAST", "STORE_FAST_STORE_FAST"):
        return ()
    variables = _variables(instruction) if "FAST" in instruction.opname else ()
    return variables[1:] if instruction.opname == "STORE_FAST_LOAD_FAST" else variables


def _variables(instruction: dis.Instruction) -> tuple[Any, ...]:
    """One, or two from Python 3.13 on."""
    argument = instruction.argval
    return argument if isinstance(argument, tuple) else (argument,)


def _imports_by_text(constants: Sequence[Any]) -> Iterator[Import]:
    for constant in constants:
        if isinstance(constant, tuple):
            yield from _imports_by_text(constant)
        elif isinstance(constant, str) and constant.strip(".") and not any(map(str.isspace, constant)):
            name = constant.lstrip(".")
            # A dot at the end: the beginning of a name, such as in f"package.{name}".
            yield Import(name.rstrip("."), len(constant) - len(name), ((),))
