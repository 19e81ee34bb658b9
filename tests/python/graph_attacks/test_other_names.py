"""Names that are looked up in another way than by the code's own instructions."""

from __future__ import annotations

import abc
import builtins
import functools
import inspect
import os
import sys
from typing import Any

import torch

import pygraph

from .attacked import X, assert_follows, open_to_this


def test_class_dict_only(partitions: Any) -> None:
    class C:
        scale = 2.0

    assert_follows(partitions, lambda x: x * vars(C)["scale"], lambda: setattr(C, "scale", 3.0))


def test_class_inspect_static(partitions: Any) -> None:
    class C:
        scale = 2.0

    assert_follows(
        partitions, lambda x: x * inspect.getattr_static(C, "scale"), lambda: setattr(C, "scale", 3.0)
    )


def test_class_base_changes(partitions: Any) -> None:
    class B:
        scale = 2.0

    class C(B):
        pass

    c = C()
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(B, "scale", 3.0))


def test_class_bases_replaced(partitions: Any) -> None:
    class B:
        scale = 2.0

    class B2:
        scale = 3.0

    class C(B):
        pass

    c = C()
    assert_follows(partitions, lambda x: x * c.scale, lambda: setattr(C, "__bases__", (B2,)))


def test_singledispatch(partitions: Any) -> None:
    @functools.singledispatch
    def scale(o: Any) -> Any:
        return 2.0

    class C:
        pass

    c = C()
    assert_follows(partitions, lambda x: x * scale(c), lambda: scale.register(C, lambda o: 3.0))


def test_descriptor(partitions: Any) -> None:
    class D:
        values: Any = {}  # noqa: RUF012

        def __get__(self, o: Any, t: Any) -> Any:
            return self.values.get(id(o), 2.0)

    class C:
        d = D()

    c = C()
    assert_follows(partitions, lambda x: x * c.d, lambda: D.values.update({id(c): 3.0}))


def test_abc_register(partitions: Any) -> None:

    class A(abc.ABC):  # noqa: B024
        pass

    class C:
        pass

    c = C()
    assert_follows(partitions, lambda x: x * (3 if isinstance(c, A) else 2), lambda: A.register(C))


def test_global_deleted_and_made(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    scope = {"SCALE": 2.0, "__name__": "m"}
    exec(
        compile(
            "def f(x):\n    try:\n        return x * SCALE\n    except NameError:\n        return x * 9\n",  # noqa: E501
            "/tmp/zz.py",
            "exec",
        ),
        scope,
    )
    f = scope["f"]
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    del scope["SCALE"]
    assert torch.equal(g(X), X * 9)
    for _ in range(8):
        assert torch.equal(g(X), X * 9)
    scope["SCALE"] = 3.0
    assert torch.equal(g(X), X * 3)
    scope["SCALE"] = 2.0
    assert torch.equal(g(X), X * 2)


def test_builtin_shadowed(partitions: Any) -> None:
    scope = {"__name__": "m"}
    exec(compile("def f(x):\n    return x * abs(-2.0)\n", "/tmp/zz.py", "exec"), scope)
    assert_follows(partitions, scope["f"], lambda: scope.update(abs=lambda v: 3.0))


def test_builtin_replaced(partitions: Any) -> None:

    f = lambda x: x * abs(-2.0)  # noqa: E731
    real = builtins.abs
    try:
        assert_follows(partitions, f, lambda: setattr(builtins, "abs", lambda v: 3.0))
    finally:
        builtins.abs = real


def test_globals_call(partitions: Any) -> None:
    scope = {"SCALE": 2.0, "__name__": "m"}
    exec(compile("def f(x):\n    return x * globals()['SCALE']\n", "/tmp/zz.py", "exec"), scope)
    assert_follows(partitions, scope["f"], lambda: scope.update(SCALE=3.0))


def test_eval_call(partitions: Any) -> None:
    scope = {"SCALE": 2.0, "__name__": "m"}
    exec(compile("def f(x):\n    return x * eval('SCALE')\n", "/tmp/zz.py", "exec"), scope)
    assert_follows(partitions, scope["f"], lambda: scope.update(SCALE=3.0))


def test_getattr_of_module(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "zzmod.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import zzmod

    assert_follows(partitions, lambda x: x * zzmod.SCALE, lambda: setattr(zzmod, "SCALE", 3.0))


def test_sys_modules(partitions: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "zzmod2.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import zzmod2

    assert_follows(
        partitions, lambda x: x * sys.modules["zzmod2"].SCALE, lambda: setattr(zzmod2, "SCALE", 3.0)
    )


def test_environ(partitions: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ZZ", "2")
    assert_follows(
        partitions, lambda x: x * float(os.environ["ZZ"]), lambda: monkeypatch.setenv("ZZ", "3")
    )


def test_getenv(partitions: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ZZ", "2")
    assert_follows(
        partitions, lambda x: x * float(os.getenv("ZZ")), lambda: monkeypatch.setenv("ZZ", "3")
    )


def test_monkeypatched_functional(partitions: Any, monkeypatch: Any) -> None:
    import torch.nn.functional as F

    assert_follows(
        partitions, lambda x: F.relu(x), lambda: monkeypatch.setattr(F, "relu", lambda x: x * 3)
    )


@open_to_this
def test_monkeypatched_inside_of_a_library(partitions: Any, monkeypatch: Any) -> None:
    """A function that only a library's own code calls."""
    import torch.nn.functional as F

    m = torch.nn.ReLU()
    assert_follows(
        partitions, lambda x: m(x), lambda: monkeypatch.setattr(F, "relu", lambda x, **k: x * 3)
    )


def test_monkeypatched_method(partitions: Any, monkeypatch: Any) -> None:
    m = torch.nn.ReLU()
    assert_follows(
        partitions,
        lambda x: m(x),
        lambda: monkeypatch.setattr(torch.nn.ReLU, "forward", lambda s, x: x * 3),
    )


def test_monkeypatched_tensor_method(partitions: Any, monkeypatch: Any) -> None:
    assert_follows(
        partitions,
        lambda x: x.relu(),
        lambda: monkeypatch.setattr(torch.Tensor, "relu", lambda s: s * 3),
    )


def test_monkeypatched_torch(partitions: Any, monkeypatch: Any) -> None:
    assert_follows(
        partitions, lambda x: torch.relu(x), lambda: monkeypatch.setattr(torch, "relu", lambda s: s * 3)
    )


def test_dict_version_back_and_forth(partitions: Any) -> None:
    d = {"scale": 2.0}
    f = lambda x: x * d["scale"]  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    for i in range(40):
        d["scale"] = (2.0, 3.0, float(str(2.0)), 4.0)[i % 4]
        assert torch.equal(g(X), f(X)), i
