"""Audits: graphs in use are compared with the uncaptured run now and then."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import custom_op

import pygraph
from pygraph import runtime

from .support import assert_same, at_most, captured, compiled, randn, refusals, uncaptured

_state: dict[str, Any] = {}


@custom_op("pygraph_test::scaled_by_the_host", mutates_args=())
def scaled_by_the_host(x: torch.Tensor) -> torch.Tensor:
    """By a number that Python has; a graph keeps what it was when it was captured."""
    return x * _state["factor"]


@custom_op("pygraph_test::shifted_by_a_table", mutates_args=())
def shifted_by_a_table(x: torch.Tensor) -> torch.Tensor:
    """By a tensor that the operator keeps and may replace."""
    return x + _state["table"]


for _op in (scaled_by_the_host, shifted_by_a_table):
    _op.register_fake(lambda x: torch.empty_like(x))


def _audited(function: Any, interval: int, **options: Any) -> Any:
    return compiled(function, options={"pygraph.audit": interval, **options})


def _offset() -> int:
    return int(torch.cuda.default_generators[0].get_offset())


def _audits() -> int:
    return sum(row.audits for row in pygraph.stats())


def _expect_passed_audits() -> None:
    rows = captured()
    assert rows and all(row.audits > 0 for row in rows), pygraph.stats()
    assert all(row.audits_failed == row.audits_skipped == 0 for row in rows), pygraph.stats()
    assert refusals() == []


def test_a_graph_that_has_become_wrong_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    _state["factor"] = 2.0
    model = _audited(lambda x: scaled_by_the_host(x) + 1, 10)
    x = randn(1000)
    with torch.no_grad():
        for _ in range(14):  # two to record, ten to the first audit
            assert_same(model(x), x * 2 + 1)
        (row,) = captured()
        assert (row.audits, row.audits_failed) == (1, 0)
        _state["factor"] = 3.0
        allocated = torch.cuda.memory_allocated()
        with caplog.at_level(logging.ERROR, logger="pygraph"):
            wrong = 0
            while captured() and wrong < 20:
                wrong += not torch.equal(model(x), x * 3 + 1)
        assert wrong == 7  # calls 13 to 19 of the graph; the 20th was audited
        for _ in range(5):
            assert_same(model(x), x * 3 + 1)
    (row,) = pygraph.stats()
    assert (row.state, row.audits, row.audits_failed) == ("refused", 2, 1)
    assert row.replays_since_audit == 9
    assert "9 replays after" in row.reason and "result 0" in row.reason
    assert caplog.text.count("an audit found result 0") == 1
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated


def test_a_table_that_was_replaced_is_found_unless_the_graph_was_refused() -> None:
    old = _state["table"] = randn(1000)
    model = _audited(lambda x: torch.relu(shifted_by_a_table(x)), 5)
    x = randn(1000)
    with torch.no_grad():
        for _ in range(6):
            assert_same(model(x), torch.relu(x + old))
        _state["table"] = randn(1000)
        for _ in range(8):
            model(x)
        assert_same(model(x), torch.relu(x + _state["table"]))
    assert captured() == []


class _Running(nn.Module):
    """Writes its buffers, draws random numbers, and needs both for its gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(
            *(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.3)),
            *(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 256)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def test_a_training_loop_is_what_it_is_without_graphs() -> None:
    module = _Running().cuda()
    start = copy.deepcopy(module.state_dict())
    model = _audited(module, 3)

    def train() -> list[torch.Tensor]:
        module.load_state_dict(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        torch.manual_seed(3)
        for _ in range(24):
            optimizer.zero_grad()
            model(randn(512, 256)).backward()
            optimizer.step()
        results = [*module.parameters(), *module.buffers(), torch.tensor(_offset())]
        return [tensor.detach().clone() for tensor in results]

    with uncaptured():
        expected = train()
    assert_same(train(), expected)
    _expect_passed_audits()
    assert {row.name for row in captured()} >= {"forward", "backward"}  # and the optimizer's step


def test_a_backward_that_takes_its_inputs_memory() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6))).cuda()
    model = _audited(module, 2)
    inputs = [randn(1024, 1024) for _ in range(10)]

    def gradients() -> list[list[torch.Tensor]]:
        results = []
        for x in inputs:
            module.zero_grad()
            model(x).square().mean().backward()
            results.append([p.grad for p in module.parameters() if p.grad is not None])
        return results

    with uncaptured():
        expected = gradients()
    assert_same(gradients(), expected)
    _expect_passed_audits()
    graphs = [e.graph for p in runtime.all_partitions() for e in p.entries.values() if e.graph]
    assert any(graph.donated for graph in graphs)


@pytest.mark.parametrize("interval", [1, 2])
def test_random_numbers(interval: int) -> None:
    model = _audited(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x), interval)
    x = randn(5000)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(5)
        with torch.no_grad():
            return [model(x) for _ in range(12)] + [torch.tensor(_offset()), randn(8)]

    with uncaptured():
        expected = run()
    assert_same(run(), expected)
    _expect_passed_audits()


def test_inputs_that_are_written() -> None:
    def function(x: torch.Tensor, state: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count += 1
        state.mul_(0.9).add_(x)
        return state.sum() * count

    model = _audited(function, 1)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        memory = torch.zeros(2000, device="cuda")
        state, count = memory[:1000], torch.zeros(1, dtype=torch.int64, device="cuda")
        with torch.no_grad():
            results = [model(randn(1000), state, count) for _ in range(12)]
        return [*results, memory, count]

    with uncaptured():
        expected = run()
    assert_same(run(), expected)
    _expect_passed_audits()


def test_results_that_are_left_to_chance() -> None:
    index = torch.randint(0, 7, (1 << 20,), device="cuda")

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(7, device=x.device).index_add(0, index, x) * 2

    model = _audited(function, 5)
    x = randn(1 << 20)
    with torch.no_grad():
        for _ in range(40):
            torch.testing.assert_close(model(x), function(x), atol=1e-1, rtol=1e-3)
    (row,) = captured()
    assert row.audits > 0 and row.audits_failed == 0


def test_two_towers_beside_each_other() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x, x.t()
        for _ in range(4):
            a, b = torch.tanh(a @ a), torch.sigmoid(b @ b)
        return a + b

    model = _audited(function, 2)
    inputs = [randn(512, 512) * 0.05 for _ in range(10)]
    with torch.no_grad():
        with uncaptured():
            expected = [model(x) for x in inputs]
        assert_same([model(x) for x in inputs], expected)
    _expect_passed_audits()


@pytest.mark.parametrize(("interval", "audits"), [(1, 20), (10, 2), (0, 0), (False, 0)])
def test_the_interval(interval: int, audits: int) -> None:
    model = _audited(lambda x: torch.relu(x) + 1, interval)
    x = randn(100)
    with torch.no_grad():
        for _ in range(22):
            model(x)
    (row,) = captured()
    assert (row.audits, row.audits_skipped) == (audits, 0)


def test_call_100_is_audited_unless_told_otherwise() -> None:
    model = compiled(lambda x: torch.relu(x) + 1)
    x = randn(100)
    with torch.no_grad():
        for _ in range(101):
            model(x)
        assert _audits() == 0
        model(x)
        assert _audits() == 1
        for _ in range(50):
            model(x)
    assert _audits() == 1


def test_memory_is_given_back() -> None:
    model = _audited(lambda x: torch.relu(x @ x) @ x, 4)
    x = randn(4096, 4096)
    with torch.no_grad():
        for _ in range(4):  # the last audit is to come
            result = model(x)
        del result
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        model(x)
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert _audits() == 0
        for _ in range(8):
            model(x)
        torch.cuda.synchronize()
    assert _audits() == 2
    assert torch.cuda.memory_allocated() <= allocated + (32 << 20)  # a workspace of cuBLAS's
    assert torch.cuda.memory_reserved() <= reserved + (192 << 20)


def test_where_memory_is_short_calls_are_replayed() -> None:
    model = _audited(lambda x: torch.relu(x) * 2, 4)
    x = randn(1 << 20)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        with at_most(torch.cuda.memory_reserved() + (64 << 20)):
            for _ in range(10):
                assert_same(model(x), torch.relu(x) * 2)
        (row,) = captured()
        assert row.audits == 0 and row.audits_skipped > 0
        for _ in range(10):
            assert_same(model(x), torch.relu(x) * 2)
    assert _audits() > 0


def test_threads_on_streams_of_their_own() -> None:
    model = _audited(lambda x: torch.tanh(x @ x) + x, 50)
    x = randn(64, 64)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for call in range(400):
                mine = torch.randn(64, 64, device="cuda", generator=generator)
                expected = torch.tanh(mine @ mine) + mine
                if not torch.allclose(model(mine), expected, atol=1e-3):
                    failures.append(f"thread {seed}, call {call}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert captured()[0].audits > 5 and captured()[0].audits_failed == 0


def test_a_profile_shows_replays() -> None:
    model = _audited(lambda x: torch.relu(x) + 1, 3)
    x = randn(100)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        before = captured()[0].replays
        with torch.profiler.profile():
            for _ in range(20):
                model(x)
        (row,) = captured()
    assert (row.replays - before, row.audits) == (20, 0)


def test_a_capture_of_the_users_sees_no_audit() -> None:
    model = _audited(lambda x: torch.relu(x) + 1, 1)
    x = randn(100)
    with torch.no_grad():
        for _ in range(5):
            model(x)
        audits = _audits()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(x)
        graph.replay()
    assert_same(result, torch.relu(x) + 1)
    assert _audits() == audits
