"""The partitions of graphed callables, whose replays run no Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pygraph import runtime

from .. import frozen_world
from ..graphed_world import Replaying


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    known = set(runtime.partitions)
    yield frozen_world.install(monkeypatch)
    for partition in set(runtime.partitions) - known:
        runtime.partitions.discard(partition)
