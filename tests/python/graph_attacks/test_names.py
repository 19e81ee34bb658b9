"""Globals and modules that the callable reads."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

import pygraph

from .attacked import Plain, X, assert_follows, replays


def test_a_local_import(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_config.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_config

    def f(x: Any) -> Any:
        import attacked_config

        return x * attacked_config.SCALE

    assert_follows(partitions, f, lambda: setattr(attacked_config, "SCALE", 3.0))


def test_a_package_by_its_dotted_name(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked").mkdir()
    (tmp_path / "attacked/__init__.py").write_text("")
    (tmp_path / "attacked/config.py").write_text("SCALE = 2.0\n")
    (tmp_path / "attacked/main.py").write_text(
        "import attacked.config\n\n\ndef f(x):\n    return x * attacked.config.SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked.config
    import attacked.main

    assert_follows(partitions, attacked.main.f, lambda: setattr(attacked.config, "SCALE", 3.0))


def test_two_modules_with_a_global_of_the_same_name(
    partitions: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    for name in "ab":
        (tmp_path / f"attacked_{name}.py").write_text(
            "SCALE = 2.0\n\n\ndef f(x):\n    return x * SCALE + 1\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_a
    import attacked_b

    for module in (attacked_a, attacked_b):
        monkeypatch.setattr(module, "SCALE", 2.0)
        f = lambda x: attacked_a.f(attacked_b.f(x))  # noqa: E731
        fs = [attacked_a.f, attacked_b.f]
        f = lambda x, fs=fs: fs[0](fs[1](x))  # noqa: E731
        assert_follows(partitions, f, lambda m=module: setattr(m, "SCALE", m.SCALE + 1))


def test_globals_of_a_dunder_method(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_c.py").write_text(
        "SCALE = 2.0\n\n\nclass Table:\n    def __getitem__(self, i):\n        return SCALE\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_c

    t = attacked_c.Table()
    assert_follows(partitions, lambda x: x * t[0], lambda: setattr(attacked_c, "SCALE", 3.0))


def test_a_program_module_with_a_librarys_first_letters(
    partitions: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "logging_tools.py").write_text(
        "class Config:\n    def __init__(self):\n        self.scale = 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import logging_tools

    o = logging_tools.Config()
    assert_follows(partitions, lambda x: x * o.scale, lambda: setattr(o, "scale", 3.0))


def test_an_attribute_that_is_a_module(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "attacked_d.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import attacked_d

    o = Plain(config=attacked_d)
    assert_follows(partitions, lambda x: x * o.config.SCALE, lambda: setattr(attacked_d, "SCALE", 3.0))


def test_global_that_is_only_written(partitions: Any) -> None:
    scope: dict[str, Any] = {"__name__": "attacked_e"}
    exec(
        compile(
            "def f(x):\n    global DONE\n    DONE = True\n    return x * 2\n",
            "/tmp/attacked_e.py",
            "exec",
        ),
        scope,
    )
    graphed = pygraph.graph(scope["f"])
    for i in range(8):
        scope["DONE"] = False
        graphed(X)
        assert scope["DONE"], f"call {i + 1}"


@pytest.mark.parametrize(
    "value",
    [
        "getattr(SETTINGS, 'scale')",
        "read(SETTINGS)",
        "SETTINGS.__dict__['scale']",
        "vars(SETTINGS)['scale']",
        "importlib.import_module('program_settings').scale",
        "importlib.import_module(name='program_settings').scale",
        "__import__('program_settings').scale",
    ],
)
def test_a_module_as_a_value(partitions: Any, tmp_path: Any, monkeypatch: Any, value: str) -> None:
    (tmp_path / "program_settings.py").write_text("scale = 2.0\n")
    text = f"""
import importlib
import program_settings as SETTINGS

def read(module):
    return module.scale

def f(x):
    return x * {value}
"""
    (tmp_path / "program_of_settings.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "program_settings", raising=False)
    monkeypatch.delitem(sys.modules, "program_of_settings", raising=False)
    settings = importlib.import_module("program_settings")
    program = importlib.import_module("program_of_settings")
    assert_follows(partitions, program.f, lambda: setattr(settings, "scale", 3.0))
    assert replays(partitions) > 0
