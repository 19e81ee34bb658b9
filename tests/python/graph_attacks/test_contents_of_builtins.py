"""What instances of Python's own classes hold beside their items and attributes."""

from __future__ import annotations

import collections
from typing import Any

from .attacked import assert_follows


def test_factory_of_a_defaultdict(partitions: Any) -> None:
    d: Any = collections.defaultdict(lambda: 2.0)

    def change() -> None:
        d.default_factory = lambda: 3.0

    assert_follows(partitions, lambda x: x * d.default_factory(), change)


def test_arguments_of_an_exception(partitions: Any) -> None:
    error = ValueError(2.0)

    def change() -> None:
        error.args = (3.0,)

    assert_follows(partitions, lambda x: x * error.args[0], change)
