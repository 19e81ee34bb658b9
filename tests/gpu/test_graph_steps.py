"""``pygraph.graph`` around training steps and inference functions, against the same code uncaptured."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pygraph

from .graph_training import Training, adamw, assert_same_training, batches, fused_sgd, mlp, normed, sgd
from .support import captured, randn


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("model", [mlp, normed])
@pytest.mark.parametrize("zero_first", [False, True])
def test_a_step_gives_the_same_bits(optimizer: Any, model: Any, zero_first: bool) -> None:
    assert_same_training(lambda: Training(model, optimizer, zero_first))


def test_a_step_with_clipping_and_autocast_gives_the_same_bits() -> None:
    assert_same_training(lambda: Training(mlp, adamw, clips=True, autocast=True))


@pytest.mark.parametrize("optimizer", [adamw, fused_sgd])
def test_a_learning_rate_that_moves_is_followed(optimizer: Any) -> None:
    uncaptured, graphed = Training(mlp, optimizer), Training(mlp, optimizer)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(of.optimizer, 0.9) for of in (uncaptured, graphed)
    ]
    step = pygraph.graph(graphed.step)
    torch.manual_seed(2)
    expected = []
    data = batches(20)
    for x, y in data:
        expected.append(uncaptured.step(x, y).detach())
        schedules[0].step()
    torch.manual_seed(2)
    for i, (x, y) in enumerate(data):
        assert torch.equal(step(x, y), expected[i]), (i, pygraph.stats())
        schedules[1].step()
    assert len(captured()) == 1, pygraph.stats()


def test_a_frozen_learning_rate_of_another_optimizer_is_never_used() -> None:
    """Each rate has a graph of its own, or none."""
    uncaptured, graphed = Training(mlp, sgd), Training(mlp, sgd)
    step = pygraph.graph(graphed.step)
    data = batches(30)
    for at, run in ((uncaptured, uncaptured.step), (graphed, step)):
        torch.manual_seed(2)
        for i, (x, y) in enumerate(data):
            at.optimizer.param_groups[0]["lr"] = 1e-2 if i < 10 else 1e-3
            run(x, y)
    for a, b in zip(graphed.state(), uncaptured.state(), strict=True):
        assert torch.equal(a, b)
    assert len(captured()) == 2, pygraph.stats()


def test_an_optimizer_that_counts_on_the_cpu_is_refused_by_name() -> None:
    training = Training(mlp, lambda p: torch.optim.Adam(p, fused=False))
    step = pygraph.graph(training.step)
    for x, y in batches(10):
        step(x, y)
    assert "fused=True" in pygraph.stats()[0].reason


def test_a_step_that_waits_is_refused_with_its_line() -> None:
    training = Training(mlp, adamw)

    @pygraph.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        return training.step(x, y).item()

    for x, y in batches(4):
        step(x, y)
    reason = pygraph.stats()[0].reason
    assert "_local_scalar_dense" in reason and "test_graph_steps.py" in reason


def test_results_are_fresh() -> None:
    weight = randn(8, 8)

    @pygraph.graph
    def function(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ weight, "z": (x + 1).relu()}

    inputs = [randn(4, 8) for _ in range(12)]
    results = [function(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert torch.equal(result["y"], x @ weight) and torch.equal(result["z"], (x + 1).relu())
    assert captured(), pygraph.stats()


def test_state_that_is_written_is_the_programs() -> None:
    total = torch.zeros(4, device="cuda")

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.sum(0))
        return total * 2

    inputs = [torch.full((3, 4), float(i), device="cuda") for i in range(12)]
    for i, x in enumerate(inputs):
        version = total._version
        y = function(x)
        assert torch.equal(y, 2 * sum(x.sum(0) for x in inputs[: i + 1]))
        assert total._version > version
    assert captured(), pygraph.stats()


def test_a_parameter_that_gets_other_memory_is_noticed() -> None:
    model = torch.nn.Linear(8, 8).cuda()

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    x = randn(4, 8)
    for _ in range(10):
        function(x)
    model.weight.data = randn(8, 8)
    with torch.no_grad():
        for _ in range(10):
            assert torch.equal(function(x), model(x))


def test_a_checkpoint_loaded_midway_is_used() -> None:
    uncaptured, graphed = Training(mlp, adamw), Training(mlp, adamw)
    step = pygraph.graph(graphed.step)
    data = batches(24)
    for at, run in ((uncaptured, uncaptured.step), (graphed, step)):
        torch.manual_seed(2)
        kept: Any = None
        for i, (x, y) in enumerate(data):
            if i == 3:
                kept = (
                    {k: v.clone() for k, v in at.model.state_dict().items()},
                    at.optimizer.state_dict(),
                )
                kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, kept)
            if i == 12:
                at.model.load_state_dict(kept[0])
                at.optimizer.load_state_dict(kept[1])
            run(x, y)
    for a, b in zip(graphed.state(), uncaptured.state(), strict=True):
        assert torch.equal(a, b), pygraph.stats()


def test_sizes_that_vary_have_graphs_of_their_own() -> None:
    uncaptured, graphed = Training(mlp, adamw), Training(mlp, adamw)
    step = pygraph.graph(graphed.step)
    data = [(x[:size], y[:size]) for (x, y), size in zip(batches(32), itertools.cycle([16, 16, 7]))]
    for at, run in ((uncaptured, uncaptured.step), (graphed, step)):
        torch.manual_seed(2)
        for x, y in data:
            run(x, y)
        del at
    for a, b in zip(graphed.state(), uncaptured.state(), strict=True):
        assert torch.equal(a, b)


def test_a_scaler_with_a_fused_optimizer_is_in_the_graph() -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = Training(mlp, adamw)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(at.model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(at.optimizer)
            torch.nn.utils.clip_grad_norm_(at.model.parameters(), 1.0)
            scaler.step(at.optimizer)
            scaler.update()
            at.optimizer.zero_grad()
            return loss

        run = pygraph.graph(step) if graphs else step
        torch.manual_seed(2)
        for i, (x, y) in enumerate(batches(20)):
            run(x * (torch.inf if i == 9 else 1), y)  # a step that must be skipped
        return at.state()

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert captured(), pygraph.stats()


def test_gradients_are_accumulated() -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = Training(mlp, adamw)

        def accumulate(x: torch.Tensor, y: torch.Tensor) -> None:
            F.cross_entropy(at.model(x), y).backward()

        run = pygraph.graph(accumulate) if graphs else accumulate
        torch.manual_seed(2)
        for i, (x, y) in enumerate(batches(40)):
            run(x, y)
            if i % 4 == 3:
                at.optimizer.step()
                at.optimizer.zero_grad()
        assert not graphs or captured(), pygraph.stats()  # before the callable is gone
        return at.state()

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b), pygraph.stats()


def test_an_exception_leaves_everything_as_it_was() -> None:
    training = Training(mlp, adamw)
    step = pygraph.graph(training.step)
    for x, y in batches(3):
        step(x, y)
    before = training.state()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            step(randn(16, 31), torch.zeros(16, dtype=torch.long, device="cuda"))
    for a, b in zip(training.state(), before, strict=True):
        assert torch.equal(a, b)
    for x, y in batches(10):
        step(x, y)


def test_a_compiled_model_inside_is_absorbed() -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = Training(normed, adamw)
        at.model.compile(dynamic=False)
        run = pygraph.graph(at.step) if graphs else at.step
        torch.manual_seed(2)
        for x, y in batches(14):
            run(x, y)
        return at.state()

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b), pygraph.stats()
    rows = [row for row in captured() if row.name == "step"]
    assert rows, pygraph.stats()


def test_a_compiled_model_whose_product_is_split_has_a_graph() -> None:
    """ResNet-50's last layer: cuBLAS splits it along its inner dimension, and the kernel that adds the
    parts up has padding among its parameters."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2048, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compiled: Any = torch.compile(model, dynamic=False)

    @pygraph.graph
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(14):
        step(randn(16, 2048))
    assert any(row.name == "step" for row in captured()), pygraph.stats()


@pytest.mark.parametrize(
    "module", [lambda: torch.nn.LSTM(16, 16, 2), lambda: torch.nn.TransformerEncoderLayer(16, 2, 32)]
)
def test_inference_of_library_modules(module: Any) -> None:
    model = module().cuda().eval()

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> Any:
        return model(x)

    for _ in range(12):
        x = randn(5, 3, 16)
        with torch.no_grad():
            expected, found = model(x), function(x)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
            assert torch.equal(a, b), pygraph.stats()
    assert [row.state for row in pygraph.stats() if row.state != "captured"] == [], pygraph.stats()


def test_the_first_steps_are_not_replays() -> None:
    """Two calls are observed, one is watched, one is recorded, two more are compared."""
    training = Training(mlp, adamw)
    step = pygraph.graph(training.step)
    for i, (x, y) in enumerate(batches(8)):
        step(x, y)
        audits = max((row.audits for row in pygraph.stats()), default=0)
        assert audits == max(0, min(2, i - 3)), (i, pygraph.stats())


def test_check_finds_equal_bits_and_puts_everything_back() -> None:
    training = Training(mlp, adamw, clips=True)
    before = training.state()
    found = pygraph.check(training.step, batches(4))
    assert found.replays >= 5 and found.is_equal, str(found)
    for a, b in zip(training.state(), before, strict=True):
        assert torch.equal(a, b)


def test_train_and_eval_have_graphs_of_their_own() -> None:
    model, other = normed().cuda(), normed().cuda()
    other.load_state_dict(model.state_dict())

    @pygraph.graph
    @torch.no_grad()
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for mode in (True, False, True, False):
        model.train(mode), other.train(mode)
        for x, _ in batches(8):
            with torch.no_grad():
                assert torch.equal(function(x), other(x)), pygraph.stats()
    assert len(captured()) == 2, pygraph.stats()
