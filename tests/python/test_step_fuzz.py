"""A fixed part of the random training loops (tests/fuzz/steps)."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.steps import run

_FIRST, _END = map(int, os.environ.get("PYGRAPH_FUZZ_LOOPS", "2:5").split(":"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(_FIRST, _END))
def test_loops(seed: int) -> None:
    with run.world():
        run.run_loop(seed)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_that_is_used_where_it_must_not_be_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraph.callables.host.host_state.HostState.holds", lambda self: True)
    with pytest.raises(run.Differs), run.world():
        for seed in (2021, 2022):
            run.run_loop(seed)
