"""A digest is one of what a function does, and not of how it is written down."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
