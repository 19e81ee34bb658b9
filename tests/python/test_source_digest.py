"""A digest is one of what a function does, and not of how it is written down."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pygraph.source_digest import digest_of

_CODE = "def function(a, b=1):\n    c = a + b\n    return c\n"


def _function(folder: Path, name: str, text: str) -> Callable[..., Any]:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.function  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "other",
    [
        "def function(a, b=1):\n    # A comment.\n    c = a + b\n\n    return c\n",
        'def function(a, b=1):\n    """A docstring."""\n    c = a + b\n    return c\n',
        "def function(a: int, b: 'int' = 1) -> int:\n    c: int = a + b\n    d: int\n    return c\n",
        "def function(\n    a,\n    b=1,\n):\n    c = (a + b)\n    return c\n",
    ],
)
def test_how_it_is_written_does_not_matter(other: str, tmp_path: Path) -> None:
    known = digest_of((_function(tmp_path, "known", _CODE),))
    assert len(known) == 16
    assert digest_of((_function(tmp_path, "other", other),)) == known


@pytest.mark.parametrize(
    "other",
    [
        "def function(a, b=2):\n    c = a + b\n    return c\n",
        "def function(a, b=1):\n    c = a - b\n    return c\n",
        "def function(a, b=1):\n    c = a + b\n    return None\n",
        "def function(a, *, b=1):\n    c = a + b\n    return c\n",
        "def renamed(a, b=1):\n    c = a + b\n    return c\nfunction = renamed\n",
        "def function(a, b=1):\n    'not', 'a docstring'\n    c = a + b\n    return c\n",
    ],
)
def test_what_it_does_matters(other: str, tmp_path: Path) -> None:
    known = digest_of((_function(tmp_path, "known", _CODE),))
    assert digest_of((_function(tmp_path, "other", other),)) not in ("", known)


def test_what_has_no_source_has_no_digest() -> None:
    assert digest_of((len,)) == ""


def test_a_function_that_others_have_wrapped_has_no_digest(tmp_path: Path) -> None:
    function = _function(tmp_path, "known", _CODE)

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert digest_of((function,)) != ""
    assert digest_of((traced,)) == digest_of((function, traced)) == ""
    traced.__wrapped__ = traced
    assert digest_of((traced,)) == ""


def test_wrappers_of_pythons_library_and_of_the_functions_own_package_do_not_matter(
    tmp_path: Path,
) -> None:
    text = (
        "import functools\n"
        "def decorate(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(*args): return f(*args)\n"
        "    return wrapper\n"
    )
    own = _function(tmp_path, "own", text + "@decorate\n" + _CODE)
    assert len(digest_of((own,))) == 16
    assert len(digest_of((functools.lru_cache(_function(tmp_path, "cached", _CODE)),))) == 16
    assert len(digest_of((contextlib.contextmanager(_function(tmp_path, "context", _CODE)),))) == 16


@pytest.mark.parametrize("module", ["wrapt.wrappers", "builtins"])
def test_an_object_that_poses_as_the_function_that_it_wraps_has_no_digest(
    module: str, tmp_path: Path
) -> None:
    function = _function(tmp_path, "known", _CODE)

    class Proxy:
        __module__ = module  # "builtins" for types of some extensions
        __wrapped__ = staticmethod(function)
        __class__ = property(lambda self: type(function))  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            return getattr(function, name)

    proxy: Any = Proxy()
    assert inspect.isfunction(proxy) and inspect.getsource(proxy) == _CODE
    assert digest_of((proxy,)) == ""


def test_a_function_in_a_context_of_others_has_no_digest(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield

    assert digest_of((context()(_function(tmp_path, "known", _CODE)),)) == ""
