"""The partitions of graphed callables, whose replays run no Python, and packages that are installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pygraph.callables.host import installed, user_code

from .. import frozen_world
from ..graphed_world import Replaying, partitions_of


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Writes a file of an installed package; returns how its modules are imported."""
    folder = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(user_code, "_counted", ())
    monkeypatch.setattr(installed, "_decided", set())
    monkeypatch.setattr(sys, "modules", {**sys.modules})

    def write(name: str, content: str) -> Any:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        importlib.invalidate_caches()
        return lambda module: importlib.import_module(module)

    yield write
    user_code.is_library_file.cache_clear()
