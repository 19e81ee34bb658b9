"""Imports inside of functions: modules and values that are imported may change between calls."""

from __future__ import annotations

import importlib
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

def by_one_of_two_texts(x):
    import importlib
    for name in ("package_of_a_test.sub", "package_of_a_test.helper"):
        module = importlib.import_module(name)
    return module.scaled(x)

def by_the_beginning_of_a_text(x):
    import importlib
    name = "helper"
    return importlib.import_module(f"package_of_a_test.{name}").scaled(x)

def passed_on(x):
    import package_of_a_test.helper as h
    return getattr(h, "scaled")(x)

def by_an_inner_function(x):
    import package_of_a_test.helper as h
    def inner():
        return h.scaled(x)
    return inner()

def among_the_variables(x):
    import package_of_a_test.helper as h
    return locals()["h"].scaled(x)

def module_taken_from_the_package(x):
    from package_of_a_test import helper as h
    return h.scaled(x)
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


_FUNCTIONS = [line[4:-4] for line in _USER.splitlines() if line.startswith("def ")]


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


@pytest.mark.parametrize(
    "function", ["value_of_what_it_is_in", "under_another_name", "from_the_package"]
)
def test_what_is_not_read_may_change(partitions: Any, package: Any, function: str) -> None:
    """A counter of a module in the same package."""
    graphed = pygraph.graph(getattr(package.sub.user, function))
    for i in range(20):
        package.sub.count = package.helper.calls = i
        graphed(X)
    assert replays(partitions) > 0


def test_an_object_in_the_place_of_a_module(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Plain(scale=2.0)
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)

    def call(x: torch.Tensor) -> torch.Tensor:
        from settings_of_a_test import scale  # type: ignore[import-not-found]

        return x * scale

    assert_follows(partitions, call, lambda: setattr(settings, "scale", 3.0))


def test_a_property_that_reads_its_module(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings(types.ModuleType):
        scale = property(lambda self: self.own * 1.0)

    module: Any = types.ModuleType("settings_of_a_test")
    module.__file__, module.__class__, module.own = __file__, Settings, 2.0
    monkeypatch.setitem(sys.modules, "settings_of_a_test", module)

    def call(x: torch.Tensor) -> torch.Tensor:
        from settings_of_a_test import scale

        return x * scale

    assert_follows(partitions, call, lambda: setattr(module, "own", 3.0))


def test_a_module_that_its_package_does_not_name(
    partitions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while packages import each other: Python takes it from ``sys.modules``."""
    outer: Any = types.ModuleType("outer_of_a_test")
    inner: Any = types.ModuleType("outer_of_a_test.inner")
    outer.__path__, inner.scale = [], 2.0
    monkeypatch.setitem(sys.modules, "outer_of_a_test", outer)
    monkeypatch.setitem(sys.modules, "outer_of_a_test.inner", inner)

    def call(x: torch.Tensor) -> torch.Tensor:
        from outer_of_a_test import inner  # type: ignore[import-not-found]

        return x * inner.scale

    assert_follows(partitions, call, lambda: setattr(inner, "scale", 3.0))


def test_a_name_with_a_dash(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("module-of-a-test")
    module.scale = 2.0
    monkeypatch.setitem(sys.modules, "module-of-a-test", module)
    assert_follows(
        partitions,
        lambda x: x * importlib.import_module("module-of-a-test").scale,
        lambda: setattr(module, "scale", 3.0),
    )


def test_a_generator_that_imports(partitions: Any, package: Any) -> None:
    def scales() -> Any:
        while True:
            from package_of_a_test.helper import SCALE  # type: ignore[import-not-found]

            yield SCALE

    holder = Plain(scales=scales())
    next(holder.scales)
    assert_follows(
        partitions, lambda x: x * next(holder.scales), lambda: setattr(package.helper, "SCALE", 3.0)
    )


def test_an_attribute_in_the_place_of_a_module(partitions: Any, package: Any) -> None:
    package.helper = Plain(SCALE=2.0)

    def call(x: torch.Tensor) -> torch.Tensor:
        import package_of_a_test.helper as other

        return x * other.SCALE

    assert_follows(partitions, call, lambda: setattr(package.helper, "SCALE", 3.0))


def test_values_of_a_library(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALE_OF_A_TEST", "2.0")

    def call(x: torch.Tensor) -> torch.Tensor:
        import os

        return x * float(os.environ["SCALE_OF_A_TEST"])

    assert_follows(partitions, call, lambda: monkeypatch.setenv("SCALE_OF_A_TEST", "3.0"))


def test_functions_of_a_library(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional

    def whole(x: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.nn.functional.relu(x)

    def part(x: torch.Tensor) -> torch.Tensor:
        from torch import nn

        return nn.functional.relu(x)

    for call in (whole, part):
        with monkeypatch.context() as patch:
            assert_follows(
                partitions,
                call,
                lambda patch=patch: patch.setattr(torch.nn.functional, "relu", lambda x: x * 3),
            )


def test_a_chain_in_a_function_of_many_names(partitions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instructions have longer arguments (EXTENDED_ARG)."""
    import os

    monkeypatch.setenv("SCALE_OF_A_TEST", "2.0")
    lines = [f"    if x is None: a{i}(x.b{i})" for i in range(300)]
    code = "\n".join(("def call(x):", *lines, "    return x * float(os.environ['SCALE_OF_A_TEST'])"))
    scope: dict[str, Any] = {"__name__": __name__, "os": os}
    exec(compile(code, __file__, "exec"), scope)
    assert_follows(partitions, scope["call"], lambda: monkeypatch.setenv("SCALE_OF_A_TEST", "3.0"))


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
