"""What a function does besides returning results, as its first calls show it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

from pygraph.partition import observed_effects
from pygraph.partition.call import SideEffects
from pygraph.partition.observed_effects import ObservedEffects

from .stand_ins import INFO, FullGpu


@pytest.mark.parametrize(
    ("argument_count", "counts_numbers", "fits"),
    [(2, False, True), (3, True, True), (3, False, False), (2, True, False)],
)
def test_hints_are_dropped_where_they_do_not_fit(
    argument_count: int, counts_numbers: bool, fits: bool
) -> None:
    args = [torch.zeros(1), torch.zeros(1), 7]
    info = dataclasses.replace(INFO, argument_count=argument_count, counts_numbers=counts_numbers)
    assert ObservedEffects(info).hints_fit(args) is fits


def test_what_a_failed_watch_has_taken_is_free_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FullGpu()
    monkeypatch.setattr(observed_effects, "Watch", gpu.fail)

    def function(args: list[object]) -> list[object]:
        assert gpu.is_free
        return list(args)

    outputs, failure = ObservedEffects(INFO).watched_call([5], function)
    assert outputs == [5] and "out of memory" in failure
    assert gpu.calls == 1


def test_what_two_threads_have_seen_at_once_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each thread's call sees another input written."""
    seen = threading.Barrier(2)
    monkeypatch.setattr(observed_effects, "Watch", _Watch)

    def function(args: list[Any]) -> list[Any]:
        seen.wait()
        return []

    subject = ObservedEffects(INFO)
    threads = [
        threading.Thread(target=subject.watched_call, args=([number], function)) for number in (5, 7)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert subject.known == SideEffects(INFO.mutated | {5, 7}, True)
    assert not subject.is_watching


class _Watch:
    def __init__(self, args: list[Any], device: int, undo: object) -> None:
        self._number = args[0]

    def mutated(self) -> frozenset[int]:
        return frozenset({self._number})

    def draws(self) -> bool:
        return True
