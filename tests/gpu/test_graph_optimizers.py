"""Every optimizer of PyTorch in a step by ``pygraph.graph``, with rates that are fixed or move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe

from .graph_training import Training, batches, normed
from .support import captured

_STEPS = 200
_optim: Any = torch.optim
_FUSED: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "Adam": {"weight_decay": 0.01, "amsgrad": True},
    "AdamW": {"maximize": True},
    "Adagrad": {"lr_decay": 0.01},
}
_CAPTURABLE: dict[str, dict[str, Any]] = {
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {"weight_decay": 0.01},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {"lambd": 0.01},
}


def training(name: str, **options: Any) -> Training:
    def make(parameters: Any) -> Any:
        found = [p for p in parameters if name != "Muon" or p.dim() == 2]
        return getattr(_optim, name)(found, **{"lr": 1e-3, **options})

    return Training(normed, make)


def fixed(optimizer: Any) -> Any:
    return None


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, _STEPS + 1, cycle_momentum=False)


def one_cycle_with_momentum(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, _STEPS + 1)


def cyclic(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-4, 2e-3, 50)


class _Decay:
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        self._optimizer.param_groups[0]["weight_decay"] *= 0.99


def decaying(optimizer: Any) -> Any:
    return _Decay(optimizer)


def run(at: Training, step: Any, schedule: Callable[[Any], Any]) -> list[torch.Tensor]:
    scheduler = schedule(at.optimizer)
    losses = []
    for x, y in batches(_STEPS):
        losses.append(step(x, y).detach().clone())
        if scheduler is not None:
            scheduler.step()
    return [*losses, *at.state()]


def assert_trains_alike(schedule: Any, name: str, **options: Any) -> Any:
    uncaptured, at = training(name, **options), training(name, **options)
    expected = run(uncaptured, uncaptured.step, schedule)
    graphed = pygraph.graph(at.step)
    _assert_same(run(at, graphed, schedule), expected)
    return graphed


def _assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"{i}: {pygraph.stats()}"


def reasons() -> str:
    return "; ".join(row.reason for row in pygraph.stats() if row.reason)


def replays() -> int:
    return sum(row.replays for row in captured())


def _has(name: str, **options: Any) -> bool:
    """Not Adagrad, fused, before the release that has it for a GPU, which its first step tells."""
    parameter = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    try:
        getattr(torch.optim, name)([parameter], **options).step()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("schedule", [fixed, exponential, one_cycle])
@pytest.mark.parametrize("name", _FUSED)
def test_fused_forms_give_the_same_bits(name: str, schedule: Any) -> None:
    if not _has(name, fused=True):
        pytest.skip(f"{name} has no fused form on a GPU in this release")
    kept = assert_trains_alike(schedule, name, fused=True, **_FUSED[name])
    assert replays() > 150, pygraph.stats()
    del kept


@pytest.mark.parametrize("schedule", [one_cycle_with_momentum, cyclic, decaying])
@pytest.mark.parametrize("name", _FUSED)
def test_fused_forms_follow_momentum_betas_and_weight_decay(name: str, schedule: Any) -> None:
    if not _has(name, fused=True):
        pytest.skip(f"{name} has no fused form on a GPU in this release")
    if name == "Adagrad" and schedule is not decaying:
        pytest.skip("Adagrad has neither momentum nor betas")
    kept = assert_trains_alike(schedule, name, fused=True, **{**_FUSED[name], "weight_decay": 0.02})
    assert replays() > 150, pygraph.stats()
    key = {"SGD": "momentum", "Adagrad": "weight_decay"}.get(name, "betas")
    key = "weight_decay" if schedule is decaying else key
    assert any(f"{name}.param_groups[0]['{key}']" in row.followed for row in captured())
    del kept


def test_numbers_of_groups_are_told_apart() -> None:
    """Equal ones, too, as long as the graph is recorded and verified."""

    def train(graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(32, 32).cuda() for _ in range(3)]
        groups = [{"params": layer.parameters()} for layer in layers]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)

        def step(x: torch.Tensor) -> None:
            for layer in layers:
                x = layer(x).relu()
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = pygraph.graph(step) if graphs else step
        for i in range(60):
            run(torch.full((4, 32), 0.01 * i, device="cuda"))
            for j, group in enumerate(optimizer.param_groups):
                at = i if i < 30 else i * (j + 1) / 3
                group["betas"] = (0.9 - 0.002 * at, 0.999 - 0.001 * at)
                group["weight_decay"] = 0.01 + 0.001 * at
        if graphs:
            assert replays() > 30, pygraph.stats()
        return [p.detach() for layer in layers for p in layer.parameters()]

    _assert_same(train(True), train(False))


@pytest.mark.parametrize("schedule", [exponential, one_cycle])
@pytest.mark.parametrize("name", _FUSED)
def test_adapted_fused_forms_follow_every_rate(name: str, schedule: Any) -> None:
    if not _has(name, fused=True):
        pytest.skip(f"{name} has no fused form on a GPU in this release")
    _assert_adapted(schedule, name, fused=True, **_FUSED[name])


@pytest.mark.parametrize("schedule", [fixed, exponential, one_cycle])
@pytest.mark.parametrize("name", _CAPTURABLE)
def test_adapted_forms_follow_every_rate(name: str, schedule: Any) -> None:
    _assert_adapted(schedule, name, **_CAPTURABLE[name])


def _assert_adapted(schedule: Any, name: str, **options: Any) -> None:
    """The uncaptured program has the same form: both are what the option makes of the optimizer."""
    twin, at = training(name, **options), training(name, **options)
    uncaptured = pygraph.graph(twin.step, adapt_optimizers=True).prepared()
    expected = run(twin, uncaptured, schedule)
    graphed = pygraph.graph(at.step, adapt_optimizers=True)
    _assert_same(run(at, graphed, schedule), expected)
    assert replays() > 150, pygraph.stats()
    (group,) = at.optimizer.param_groups
    assert isinstance(group["lr"], float) and group.get("capturable", True) is not None


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", _CAPTURABLE)
def test_capturable_forms_give_the_same_bits(name: str, foreach: bool) -> None:
    options = {**_CAPTURABLE[name], "foreach": foreach}
    kept = assert_trains_alike(fixed, name, capturable=True, **options)
    assert replays() > 150, pygraph.stats()
    del kept


@pytest.mark.parametrize("name", _CAPTURABLE)
def test_capturable_forms_follow_the_rate_or_name_it(name: str) -> None:
    kept = assert_trains_alike(exponential, name, capturable=True, **_CAPTURABLE[name])
    if replays() == 0:
        assert "['lr'] differs from call to call" in reasons(), pygraph.stats()
    del kept


@pytest.mark.parametrize("name", [*_CAPTURABLE, "Adagrad", "Adafactor"])
def test_steps_counted_on_the_host_are_named(name: str) -> None:
    kept = assert_trains_alike(exponential, name)
    assert replays() == 0 and "counts its steps on the CPU" in reasons(), pygraph.stats()
    del kept


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_a_rate_that_is_a_number_may_stay(name: str) -> None:
    kept = assert_trains_alike(fixed, name)
    assert replays() > 150, pygraph.stats()
    del kept


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_a_rate_that_is_a_number_and_moves_is_named(name: str) -> None:
    kept = assert_trains_alike(exponential, name)
    assert "['lr'] differs from call to call" in reasons(), pygraph.stats()
    del kept


def test_a_rate_in_memory_is_followed() -> None:
    """What a program may do by itself: schedulers fill the tensor in place."""
    rate = lambda: torch.tensor(1e-3, device="cuda")  # noqa: E731
    uncaptured, at = (training("AdamW", lr=rate(), fused=True) for _ in range(2))
    expected = run(uncaptured, uncaptured.step, exponential)
    _assert_same(run(at, pygraph.graph(at.step), exponential), expected)
    assert replays() > 150, pygraph.stats()


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_fused_adam_takes_as_its_rate(name: str, dtype: torch.dtype) -> None:
    p = torch.nn.Parameter(torch.zeros(3, 3, device="cuda", dtype=dtype))
    optimizer = getattr(_optim, name)([p], lr=0.1, fused=True, weight_decay=0.1)
    taken = rate_probe.taken_by(optimizer, optimizer.param_groups[0])
    assert taken == rate_probe.Taken(torch.float32, True)


def test_doubles_are_not_followed_with_less() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 3, device="cuda", dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    taken = rate_probe.taken_by(optimizer, optimizer.param_groups[0])
    assert taken is None or not taken.is_exact
