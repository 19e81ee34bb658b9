"""Side effects that are kept on disk with a decision take the place of a watched call."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pygraph.options import Options
from pygraph.partition.call import Function
from pygraph.partition.observed_effects import ObservedEffects
from pygraph.partition.partition import Partition
from pygraph.select import decision_cache
from pygraph.select.trial import REPLAYED, UNCAPTURED, Decision, Timing

from .stand_ins import INFO


@pytest.mark.parametrize(
    ("written", "is_loaded"), [(None, True), ((), True), ((0, 9), True), ((0, 9), False)]
)
def test_side_effects_on_disk_are_not_watched_for(
    monkeypatch: pytest.MonkeyPatch,
    told_to_the_engine: list[int],
    written: tuple[int, ...] | None,
    is_loaded: bool,
) -> None:
    """Unless the program was compiled: an operator of its own may have changed."""
    timing = Timing(host=1e-3, device=1e-3, latency=1e-3, noise=0.0, memory=0)
    draws = None if written is None else True
    decision = Decision(REPLAYED, {UNCAPTURED: timing, REPLAYED: timing}, written, draws)
    monkeypatch.setattr(decision_cache, "key_of", lambda program, key, device: "name")
    monkeypatch.setattr(decision_cache, "load", lambda name: decision)
    watched: list[object] = []

    def watch(self: object, args: list[object], run: Function) -> tuple[object, str]:
        watched.append(args[0])
        return run(args), ""

    monkeypatch.setattr(ObservedEffects, "watched_call", watch)
    info = dataclasses.replace(INFO, argument_count=2, mutated=frozenset({1}), counts_numbers=True)
    info = dataclasses.replace(info, is_loaded=is_loaded)
    partition = Partition(lambda args: [args[0] + 1], info, Options(select="auto"))
    assert torch.equal(partition._miss([torch.ones(2), 3])[0], torch.full((2,), 2.0))
    if written is None or not is_loaded:
        assert len(watched) == 1
    else:
        assert not watched and partition.draws
        assert partition.written == {1} | (set(written) & {0, 1})
