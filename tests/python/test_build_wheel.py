"""The check that a wheel runs on the systems of its tag."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pygraph import runtime

pytestmark = pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")


@pytest.fixture
def tool() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "tools" / "build_wheel.py"), run_name="tool")


def test_symbols_of_a_newer_system_are_named(tool: dict[str, Any]) -> None:
    too_new: Callable[[Path], list[str]] = tool["too_new"]
    newest: dict[str, tuple[int, ...]] = tool["_NEWEST"]
    engine = Path(runtime.engine().__file__)
    newest.update(GLIBC=(99,), GLIBCXX=(99,), CXXABI=(99,), GCC=(99,))
    assert too_new(engine) == []
    newest["CXXABI"] = (1, 2)  # older than any
    found = too_new(engine)
    assert found
    assert all("(CXXABI_1.3" in symbol for symbol in found)
    assert any(symbol.startswith("__cxa_") for symbol in found)
