"""The partitions of graphed callables, whose replays run no Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .. import frozen_world
from ..graphed_world import Replaying, partitions_of


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))
