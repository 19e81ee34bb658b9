"""Imports inside of functions: modules and values that are imported may change between calls."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph

from .attacked import Plain, X, assert_follows, replays

_USER = """
def from_a_module_beside(x):
    from ..helper import scaled
    return scaled(x)

def from_the_package(x):
    from .. import helper
    return helper.scaled(x)

def value_of_the_package(x):
    from .. import TOP
    return x * TOP

def value_of_what_it_is_in(x):
    import package_of_a_test.helper
    return x * package_of_a_test.TOP

def under_another_name(x):
    import package_of_a_test.helper as h
    return h.scaled(x)

def value_under_another_name(x):
    from package_of_a_test.helper import SCALE as scale
    return x * scale

def by_text(x):
    import importlib
    return importlib.import_module("..helper", __package__).scaled(x)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``package_of_a_test`` with the modules ``helper`` and ``sub.user``."""
    folder = tmp_path / "package_of_a_test"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("TOP = 2.0\n")
    (folder / "helper.py").write_text("SCALE = 2.0\ndef scaled(x):\n    return x * SCALE\n")
    (folder / "sub" / "__init__.py").write_text("")
    (folder / "sub" / "user.py").write_text(_USER)
    monkeypatch.syspath_prepend(tmp_path)
    import package_of_a_test  # type: ignore[import-not-found]
    import package_of_a_test.helper  # type: ignore[import-not-found]
    import package_of_a_test.sub.user  # type: ignore[import-not-found]

    yield package_of_a_test
    for name in [name for name in sys.modules if name.startswith("package_of_a_test")]:
        del sys.modules[name]


_FUNCTIONS = [line.split("(")[0].removeprefix("def ") for line in _USER.splitlines() if "def " in line]


@pytest.mark.parametrize("function", _FUNCTIONS)
def test_a_value_changes(partitions: Any, package: Any, function: str) -> None:
    def change() -> None:
        package.helper.SCALE = package.TOP = 3.0

    assert_follows(partitions, getattr(package.sub.user, function), change)


@pytest.mark.parametrize("function", [f for f in _FUNCTIONS if "value" not in f])
def test_a_module_is_replaced(partitions: Any, package: Any, function: str) -> None:
    other: Any = types.ModuleType("package_of_a_test.helper")
    other.scaled = lambda x: x * 3

    def change() -> None:
        package.helper = sys.modules["package_of_a_test.helper"] = other

    assert_follows(partitions, getattr(package.sub.user, function), change)


def test_what_is_not_imported_may_change(partitions: Any, package: Any) -> None:
    graphed = pygraph.graph(package.sub.user.from_a_module_beside)
    for i in range(20):
        package.helper.calls = i
        graphed(X)
    assert replays(partitions) > 0


def test_a_folder_without_a_file(partitions: Any, package: Any) -> None:
    """A namespace package."""
    (Path(package.__file__).parents[1] / "folder_of_a_test").mkdir()
    (Path(package.__file__).parents[1] / "folder_of_a_test" / "inside.py").write_text("SCALE = 2.0\n")
    import folder_of_a_test.inside as inside  # type: ignore[import-not-found]

    holder = Plain(folder=sys.modules["folder_of_a_test"])
    assert_follows(
        partitions, lambda x: x * holder.folder.inside.SCALE, lambda: setattr(inside, "SCALE", 3.0)
    )


def test_a_module_that_the_program_has_made(partitions: Any) -> None:
    module: Any = types.ModuleType("made_by_a_test")
    module.scale = torch.tensor(2.0).item()
    holder = Plain(module=module)
    assert_follows(partitions, lambda x: x * holder.module.scale, lambda: setattr(module, "scale", 3.0))
