"""The floors of the C++ side: a file includes only what lies below it. So there is no circle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_BINDINGS = _ROOT / "bindings"
_HEADERS = _ROOT / "include" / "pygraph"

# The folders of bindings/, from the ground up. Headers outside of them lie below all, module.cc above.
_FLOORS = ("torch_private", "tensors", "replay", "record", "callables")
# Can be switched off: uses none of the others, and nobody uses it.
_APART = "torch_patches"


def _sources(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in (".cc", ".h"))


def _includes(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each included file of the project's, and of any header in <>."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if found := re.match(r'#include ["<]([^">]+)[">]', line):
            yield number, found[1]


def _is_allowed(own: str, other: str) -> bool:
    """Whether files of folder ``own`` may include those of ``other``."""
    if other == own:
        return True
    return own in _FLOORS and other in _FLOORS and _FLOORS.index(other) < _FLOORS.index(own)


def test_every_folder_has_a_floor() -> None:
    assert {p.name for p in _BINDINGS.iterdir() if p.is_dir()} == {*_FLOORS, _APART}


@pytest.mark.parametrize("folder", [*_FLOORS, _APART])
def test_nothing_is_included_from_above(folder: str) -> None:
    wrong = []
    for path in _sources(_BINDINGS / folder):
        for line, name in _includes(path):
            other = name.split("/")[0]
            if other in (*_FLOORS, _APART) and not _is_allowed(folder, other):
                wrong.append(f"{folder}/{path.name}, line {line}: {name}")
    assert wrong == []


def test_what_all_folders_share_lies_below_them() -> None:
    wrong = [
        f"{path.name}, line {line}: {name}"
        for path in _sources(_BINDINGS)
        for line, name in _includes(path)
        if name.split("/")[0] in (*_FLOORS, _APART)
    ]
    assert wrong == []


def test_the_engine_knows_neither_pytorch_nor_python() -> None:
    outside = ("torch", "ATen", "c10", "pybind11", "Python.h", "cuda", "bindings", *_FLOORS, _APART)
    wrong = [
        f"{path.name}, line {line}: {name}"
        for folder in (_ROOT / "src", _ROOT / "src" / "simulator", _HEADERS)
        for path in _sources(folder)
        for line, name in _includes(path)
        if name.split("/")[0] in outside
    ]
    assert wrong == []


def test_the_engine_is_flat_and_does_not_know_the_simulator() -> None:
    assert [p.name for p in (_ROOT / "src").iterdir() if p.is_dir()] == ["simulator"]
    wrong = [
        f"{path.name}, line {line}: {name}"
        for folder in (_ROOT / "src", _HEADERS)
        for path in _sources(folder)
        for line, name in _includes(path)
        if name.startswith("simulator/")
    ]
    assert wrong == []


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of a circle, or none."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if circle := visit(other, [*way, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := visit(node, []))), [])


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_the_headers_include_each_other_in_no_circle() -> None:
    graph = {path.name: {name for _, name in _includes(path)} for path in _sources(_ROOT / "src")}
    graph |= {
        f"pygraph/{path.name}": {name for _, name in _includes(path)} for path in _sources(_HEADERS)
    }
    for folder in (_BINDINGS, *(_BINDINGS / name for name in (*_FLOORS, _APART))):
        for path in _sources(folder):
            graph[str(path.relative_to(_BINDINGS))] = {name for _, name in _includes(path)}
    assert _circle(graph) == []
