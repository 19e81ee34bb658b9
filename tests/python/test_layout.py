"""The Python package's floors: a package imports only what lies below it. So there is no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pygraph

_ROOT = Path(pygraph.__file__).parent

# From the ground up; names on one floor do not import each other.
_FLOORS = (
    ("_engine", "_version", "source_digest", "dynamo_program"),
    ("runtime",),
    ("observations", "operators", "gpu", "torch_patches"),
    ("uncapturable", "fx_passes", "select", "record", "options"),
    ("polyfills", "verify"),
    ("partition",),
    ("compile",),
    ("report",),
    ("__init__", "cli"),
)
_FLOOR = {room: number for number, floor in enumerate(_FLOORS) for room in floor}


def _room(module: str) -> str:
    """Of an imported name: the package or module right below pygraph."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module, wherever in the file: types and late imports count, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "pygraph":
            yield from ((node.lineno, f"pygraph.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def test_nothing_is_imported_from_above() -> None:
    wrong = []
    for path in sorted(_ROOT.rglob("*.py")):
        relative = path.relative_to(_ROOT).with_suffix("")
        own = relative.parts[0]
        for line, module in _imports(path):
            if module.split(".")[0] != "pygraph" or _room(module) == own:
                continue
            if _FLOOR[_room(module)] >= _FLOOR[own]:
                wrong.append(f"{relative}.py, line {line}: {own} imports {module}")
    assert wrong == []


def test_every_part_has_a_floor() -> None:
    parts = {p.stem for p in _ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts | {"_engine"} == set(_FLOOR)
