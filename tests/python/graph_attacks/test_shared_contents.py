"""What objects keep in C, or share with threads and processes."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import io
import logging
import multiprocessing
import threading
from typing import Any

import numpy as np
import torch

import pygraph

from .attacked import Plain, X, assert_follows


def test_memoryview(partitions: Any) -> None:
    b = bytearray(b"\2")
    o = Plain(m=memoryview(b))
    assert_follows(partitions, lambda x: x * o.m[0], lambda: b.__setitem__(0, 3))


def test_ctypes(partitions: Any) -> None:
    v = ctypes.c_double(2.0)
    o = Plain(v=v)
    assert_follows(partitions, lambda x: x * o.v.value, lambda: setattr(v, "value", 3.0))


def test_ctypes_struct(partitions: Any) -> None:
    class S(ctypes.Structure):
        _fields_ = [("v", ctypes.c_double)]

    v = S(2.0)
    assert_follows(partitions, lambda x: x * v.v, lambda: setattr(v, "v", 3.0))


def test_multiprocessing_value(partitions: Any) -> None:

    v = multiprocessing.Value("d", 2.0)
    assert_follows(partitions, lambda x: x * v.value, lambda: setattr(v, "value", 3.0))


def test_event(partitions: Any) -> None:
    e = threading.Event()
    assert_follows(partitions, lambda x: x * (3 if e.is_set() else 2), e.set)


def test_semaphore(partitions: Any) -> None:
    e = threading.Semaphore(2)
    assert_follows(partitions, lambda x: x * e._value, e.acquire)


def test_future(partitions: Any) -> None:
    from concurrent.futures import Future

    e = Future()
    assert_follows(partitions, lambda x: x * (e.result() if e.done() else 2), lambda: e.set_result(3.0))


def test_logger_level(partitions: Any) -> None:

    log = logging.getLogger("zz")
    log.setLevel("INFO")
    assert_follows(
        partitions,
        lambda x: x * (3 if log.isEnabledFor(logging.DEBUG) else 2),
        lambda: log.setLevel("DEBUG"),
    )


def test_object_array(partitions: Any) -> None:
    p = Plain(scale=2.0)
    a = np.array([p], dtype=object)
    o = Plain(a=a)
    assert_follows(partitions, lambda x: x * o.a[0].scale, lambda: setattr(p, "scale", 3.0))


def test_numpy_scalar_array(partitions: Any) -> None:
    a = np.array(2.0)
    assert_follows(partitions, lambda x: x * float(a), lambda: a.__setitem__((), 3.0))


def test_stringio(partitions: Any) -> None:
    s = io.StringIO("2")
    assert_follows(
        partitions, lambda x: x * float(s.getvalue()), lambda: (s.seek(0), s.write("3"), s.seek(0))
    )


def test_bytesio(partitions: Any) -> None:
    s = io.BytesIO(b"2")
    assert_follows(
        partitions, lambda x: x * float(s.getvalue()), lambda: (s.seek(0), s.write(b"3"), s.seek(0))
    )


def test_chainmap(partitions: Any) -> None:
    a, b = {}, {"s": 2.0}
    c = collections.ChainMap(a, b)
    assert_follows(partitions, lambda x: x * c["s"], lambda: a.update(s=3.0))


def test_user_dict(partitions: Any) -> None:
    d = collections.UserDict(a=2.0)
    assert_follows(partitions, lambda x: x * d["a"], lambda: d.update(a=3.0))


def test_context_var_in_context(partitions: Any) -> None:

    v = contextvars.ContextVar("v", default=2.0)
    f = lambda x: x * v.get()  # noqa: E731
    g = pygraph.graph(f)
    for _ in range(8):
        g(X)
    c = contextvars.copy_context()
    c.run(v.set, 3.0)
    assert torch.equal(c.run(g, X), X * 3)
    assert torch.equal(g(X), X * 2)


def test_decimal_context(partitions: Any) -> None:
    import decimal

    o = Plain(d=decimal.Decimal(1))
    f = lambda x: x * float(o.d / 3)  # noqa: E731
    with decimal.localcontext() as c:
        assert_follows(partitions, f, lambda: setattr(c, "prec", 3))
