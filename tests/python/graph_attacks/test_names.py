"""Globals and modules that the callable reads."""

from __future__ import annotations

from typing import Any

import pygraph

from .attacked import Plain, X, assert_follows


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
