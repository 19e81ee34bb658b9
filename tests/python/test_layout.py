"""The Python package's floors: a package imports only what lies below it. So there is no circle.

And who writes the records of a signature: one module each.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pygraph
from pygraph.partition.signature import Entry, RecordingState, SelectionState
from pygraph.partition.unservable_calls import DonationState
from pygraph.verify.audit_schedule import Audits

_ROOT = Path(pygraph.__file__).parent

# From the ground up; names on one floor do not import each other.
_FLOORS = (
    ("_engine", "_version", "source_digest", "stored"),
    ("dynamo_program", "launch", "default_backend", "undoing", "signal_exceptions"),
    ("engine",),
    ("runtime",),
    ("observations", "operators", "gpu", "torch_patches"),
    ("uncapturable", "fx_passes", "select", "record", "options"),
    ("polyfills", "verify"),
    ("partition",),
    ("callables",),
    ("compile",),
    ("report",),
    ("__init__", "cli"),
    ("__main__",),
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


@pytest.mark.parametrize("package", ["callables", "partition", "record", "select", "verify"])
def test_no_circle_of_imports_is_in_a_package(package: str) -> None:
    """Nor of types that are imported for the type checker alone."""
    prefix = f"pygraph.{package}."
    files = sorted((_ROOT / package).rglob("*.py"))
    imports: dict[str, set[str]] = {}
    for path in files:
        names = {module for _, module in _imports(path)} | _imported_modules(path, f"pygraph.{package}")
        own = ".".join(path.relative_to(_ROOT / package).with_suffix("").parts)
        imports[own] = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    assert any(imports.values()) or len(files) < 3
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def _imported_modules(path: Path, package: str) -> set[str]:
    """As ``from pygraph.partition import audit`` names them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_what_looks_at_the_host_knows_nothing_of_graphs() -> None:
    names = {n for path in (_ROOT / "callables" / "host").glob("*.py") for _, n in _imports(path)}
    rooms = {_room(n) for n in names if n.startswith("pygraph")}
    assert rooms <= {"callables", "runtime", "signal_exceptions", "undoing"}
    assert all("callables" not in n or n.startswith("pygraph.callables.host") for n in names)


# Methods of the records themselves write ``self``.
_OWNERS: dict[Any, tuple[str, ...]] = {
    Entry: (),
    RecordingState: ("partition/pipeline.py",),
    SelectionState: ("partition/selector.py",),
    DonationState: (),
    Audits: ("partition/audit.py",),
}
# A record as a whole, by its owner.
_WRITTEN_BY_OTHERS = {"audits"}


def _written_attributes(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each attribute of another object that a file assigns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.lineno, node.attr


@pytest.mark.parametrize("record", _OWNERS)
def test_a_record_of_a_signature_is_written_by_its_owner_only(record: Any) -> None:
    fields = {field.name for field in dataclasses.fields(record)} - _WRITTEN_BY_OTHERS
    wrong = []
    for path in sorted((_ROOT / "partition").glob("*.py")):
        if f"partition/{path.name}" in (*_OWNERS[record], "partition/signature.py"):
            continue
        for line, name in _written_attributes(path):
            if name in fields:
                wrong.append(f"{path.name}, line {line}: {name}")
    assert wrong == []
