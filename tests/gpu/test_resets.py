"""Graphs are dropped, tried and audited while other threads call the same program."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

import pygraph
from pygraph import runtime
from pygraph.partition import recording_policy, selector

from .support import compiled

_SECONDS = 6.0  # at least
_AT_MOST = 120.0  # until graphs have been replayed and audited
_LONGEST_ROUND = 10.0  # between two resets


@pytest.mark.parametrize("select", ["auto", "always"])
def test_calls_are_right_while_graphs_are_dropped(
    select: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYGRAPH_SELECT", select)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(selector, "_CALLS_PER_RECHECK", 20)
    monkeypatch.setattr(recording_policy, "_CALLS_UNTIL_RETRY", 10)
    options = {"pygraph.audit": 15, "pygraph.max_graphs": 3}
    model = compiled(lambda x: torch.relu(x * 2) + x, dynamic=False, options=options)
    shapes = [(8, 16), (16, 16), (32, 16), (64, 16), (128, 16)]

    def compile_all() -> None:  # in a thread: Dynamo's guards look at its number of threads
        with torch.no_grad():
            for shape in shapes:
                model(torch.ones(shape, device="cuda"))

    first = threading.Thread(target=compile_all)
    first.start()
    first.join()
    failures: list[object] = []
    done = threading.Event()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    value = float(chance.randrange(1, 100))
                    x = torch.full(chance.choice(shapes), value, device="cuda")
                    result = model(x)
                    if not bool((result == 3 * value).all()):
                        failures.append(f"thread {seed}: {value}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    # Where several threads call a function, Dynamo overlooks what it has compiled now and then: while
    # one goes through its entries, others change their order. It would compile again, up to its limit,
    # and meanwhile refuse the calls of others. Such calls run as they are here.
    with torch.compiler.set_stance("eager_on_recompile"):
        for thread in threads:
            thread.start()
        replays = audits = 0
        pause = 0.3
        begin = time.monotonic()
        while not failures and time.monotonic() < begin + _AT_MOST:
            if time.monotonic() > begin + _SECONDS and replays > 0 and audits > 0:
                break
            time.sleep(pause)
            rows = pygraph.stats()
            replays += sum(row.replays for row in rows)
            audits += sum(row.audits for row in rows)
            assert all(row.audits_failed == 0 for row in rows)
            if audits == 0:  # a slow machine needs longer for one
                pause = min(1.5 * pause, _LONGEST_ROUND)
            pygraph.reset()
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert replays > 0 and audits > 0
    assert not runtime.record_lock.locked()
