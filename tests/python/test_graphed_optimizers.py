"""Every optimizer of PyTorch in a graphed step, with rates that are fixed or move, on the CPU.

Replays have the numbers of the recording (frozen_world.py), as a graph's launches do.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pygraph
from pygraph.callables import rate_probe

from . import frozen_world
from .graphed_programs import Training, assert_same, batches, reason, replays, training
from .graphed_world import Replaying, partitions_of

_STEPS = 18
_optim: Any = torch.optim
_graphed: list[Any] = []  # the callables of a test, whose reasons go with them


@pytest.fixture
def partitions(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Replaying]]:
    monkeypatch.setattr(rate_probe, "_known", {})
    yield from partitions_of(lambda: frozen_world.install(monkeypatch))
    _graphed.clear()


def fixed(optimizer: Any) -> Any:
    return None


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def one_cycle(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, _STEPS + 1, cycle_momentum=False)


def one_cycle_with_momentum(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, _STEPS + 1)


def cyclic(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, 200)


def run(at: Training, step: Any, schedule: Any) -> list[torch.Tensor]:
    scheduler = schedule(at.optimizer)
    losses = []
    for x, y in batches(_STEPS):
        losses.append(step(x, y).detach())
        if scheduler is not None:
            scheduler.step()
    return [*losses, *at.state()]


def assert_trains_alike(schedule: Any, name: str, **options: Any) -> None:
    uncaptured, at = training(name, **options), training(name, **options)
    expected = run(uncaptured, uncaptured.step, schedule)
    _graphed.append(pygraph.graph(at.step))
    assert_same(run(at, _graphed[-1], schedule), expected)
    for group in at.optimizer.param_groups:
        assert isinstance(group["lr"], float)


_FUSED = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "Adam": {"weight_decay": 0.1},
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adagrad": {"lr_decay": 0.1},
}
_CAPTURABLE = {
    "Adam": {},
    "AdamW": {},
    "Adamax": {"foreach": True},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {"foreach": True},
    "RMSprop": {"foreach": True, "momentum": 0.9, "centered": True},
    "Adadelta": {"foreach": True},
    "Rprop": {},
    "ASGD": {"foreach": True, "lambd": 0.1},
}


@pytest.mark.parametrize("schedule", [fixed, exponential, one_cycle])
@pytest.mark.parametrize("name", _FUSED)
def test_fused_forms_follow_every_rate(partitions: Any, name: str, schedule: Any) -> None:
    assert_trains_alike(schedule, name, fused=True, **_FUSED[name])
    assert len(partitions.all) == 1 and replays(partitions) > 8, pygraph.stats()


@pytest.mark.parametrize("schedule", [one_cycle_with_momentum, cyclic])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_fused_forms_follow_momentum_and_betas(partitions: Any, name: str, schedule: Any) -> None:
    assert_trains_alike(schedule, name, fused=True, **_FUSED[name])
    assert replays(partitions) > 6, pygraph.stats()
    key = "momentum" if name == "SGD" else "betas"
    assert f"{name}.param_groups[0]['{key}']" in partitions.all[-1].info.followed


@pytest.mark.parametrize("name", _FUSED)
def test_fused_forms_follow_a_moving_weight_decay(partitions: Any, name: str) -> None:
    def schedule(optimizer: Any) -> Any:
        class Decay:
            def step(self) -> None:
                optimizer.param_groups[0]["weight_decay"] *= 0.9

        return Decay()

    assert_trains_alike(schedule, name, fused=True, **{**_FUSED[name], "weight_decay": 0.1})
    assert replays(partitions) > 6, pygraph.stats()


def test_groups_with_equal_numbers_are_told_apart(partitions: Any) -> None:
    """Recordings are given another number for each."""

    def train(graphs: bool) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, n)) for n in (3, 5)]
        groups = [{"params": [p]} for p in parameters]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.5, fused=True)

        def step(x: torch.Tensor) -> None:
            sum((x.sum() * p).square().sum() for p in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

        run = pygraph.graph(step) if graphs else step
        _graphed.append(run)
        for i in range(20):
            run(torch.full((2,), 0.01 * i))
            for group, factor in zip(optimizer.param_groups, (0.9, 0.8), strict=True):
                group["momentum"] *= factor if i > 8 else 0.9  # equal at first
        return [p.detach() for p in parameters]

    assert_same(train(True), train(False))
    assert replays(partitions) > 6, pygraph.stats()


@pytest.mark.parametrize("value", [0.0, 1, float("nan"), torch.tensor(0.5)])
def test_a_number_that_becomes_something_else_is_not_given_to_the_graph(
    partitions: Any, value: Any
) -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        at = training("SGD", fused=True, momentum=0.9)
        run = pygraph.graph(at.step) if graphs else at.step
        _graphed.append(run)
        for i, (x, y) in enumerate(batches(20)):
            at.optimizer.param_groups[0]["momentum"] = value if i in (12, 13) else 0.9 - 0.01 * i
            try:
                run(x, y)
            except Exception as error:
                at.optimizer.zero_grad()
                assert not graphs or not isinstance(error, AssertionError), error
        return at.state()

    found, expected = train(True), train(False)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
    assert replays(partitions) > 4, pygraph.stats()


def test_a_number_that_the_program_reads_is_not_followed(partitions: Any) -> None:
    at = training("SGD", fused=True, momentum=0.9)

    @pygraph.graph
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if at.optimizer.param_groups[0]["momentum"] > 0.8 else 1.0
        return at.step(x * scale, y)

    for i, (x, y) in enumerate(batches(20)):
        at.optimizer.param_groups[0]["momentum"] = 0.9 - 0.01 * i
        step(x, y)
    assert "param_groups[0]['momentum'] differs from call to call" in reason()


@pytest.mark.parametrize("schedule", [one_cycle_with_momentum, cyclic])
def test_a_moving_momentum_of_another_form_is_named(partitions: Any, schedule: Any) -> None:
    assert_trains_alike(schedule, "SGD", momentum=0.9)
    assert "differs from call to call" in reason()


def test_moving_betas_of_another_form_are_named(partitions: Any) -> None:
    at = training("AdamW", capturable=True)
    _graphed.append(pygraph.graph(at.step))
    for i, (x, y) in enumerate(batches(14)):
        at.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * i, 0.999)
        _graphed[-1](x, y)
    assert "['betas'][0] differs from call to call" in reason()
    assert "cycle_momentum=False" in reason()


@pytest.mark.parametrize("options", [{}, {"foreach": True, "momentum": 0.9}])
def test_a_rate_that_is_a_number_may_stay(partitions: Any, options: Any) -> None:
    assert_trains_alike(fixed, "SGD", **options)
    assert replays(partitions) > 8


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("SGD", "make SGD with fused=True"), ("Muon", "Muon takes no other rate than a number")],
)
def test_a_rate_that_is_a_number_and_moves_is_named(partitions: Any, name: str, remedy: str) -> None:
    assert_trains_alike(exponential, name)
    assert replays(partitions) == 0
    assert "param_groups[0]['lr'] differs from call to call" in reason() and remedy in reason()


def test_muon_has_a_graph(partitions: Any) -> None:
    assert_trains_alike(fixed, "Muon")
    assert replays(partitions) > 8


@pytest.mark.parametrize("name", [*_CAPTURABLE, "Adagrad", "Adafactor"])
def test_steps_counted_on_the_host_are_named(partitions: Any, name: str) -> None:
    assert_trains_alike(exponential, name, **_CAPTURABLE.get(name, {}))
    assert partitions.all == [] and "counts its steps on the CPU" in reason()
    assert ("fused=True" in reason()) == (name in _FUSED)
    assert ("adapt_optimizers=True" in reason()) == (name in _CAPTURABLE)


@pytest.mark.parametrize("schedule", [fixed, exponential, one_cycle])
@pytest.mark.parametrize("name", _CAPTURABLE)
def test_adapted_optimizers_follow_every_rate(partitions: Any, name: str, schedule: Any) -> None:
    options = _CAPTURABLE[name]
    twin, at = training(name, **options), training(name, **options)
    expected = run(twin, pygraph.graph(twin.step, adapt_optimizers=True).prepared(), schedule)
    _graphed.append(pygraph.graph(at.step, adapt_optimizers=True))
    assert_same(run(at, _graphed[-1], schedule), expected)
    assert len(partitions.all) == 1 and replays(partitions) > 8, pygraph.stats()
    (group,) = at.optimizer.param_groups
    assert group["capturable"] and isinstance(group["lr"], float)


@pytest.mark.parametrize("name", _CAPTURABLE)
def test_capturable_forms_have_graphs(partitions: Any, name: str) -> None:
    assert_trains_alike(fixed, name, capturable=True, **_CAPTURABLE[name])
    assert replays(partitions) > 8


@pytest.mark.parametrize("name", _CAPTURABLE)
def test_capturable_forms_follow_the_rate_or_name_it(partitions: Any, name: str) -> None:
    assert_trains_alike(exponential, name, capturable=True, **_CAPTURABLE[name])
    if replays(partitions) == 0:
        assert "['lr'] differs from call to call" in reason()
        assert "adapt_optimizers=True" in reason() or "fused=True" in reason()


@pytest.mark.parametrize("name", _CAPTURABLE)
def test_adapted_optimizers_make_the_same_steps_but_for_rounding(partitions: Any, name: str) -> None:
    def train(graphs: bool) -> torch.Tensor:
        p = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        optimizer = getattr(_optim, name)([p], lr=0.01, **_CAPTURABLE[name])

        def step(x: torch.Tensor) -> None:
            (x * p).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = pygraph.graph(step, adapt_optimizers=True) if graphs else step
        for i in range(12):
            run(torch.linspace(1.0, 2.0 + i, 7))
            optimizer.param_groups[0]["lr"] *= 0.9
        return p.detach()

    assert torch.allclose(train(True), train(False), rtol=1e-4)
    assert replays(partitions) > 3


def test_adapting_begins_with_the_counts_of_steps_made_before(partitions: Any) -> None:
    at, twin = training("AdamW"), training("AdamW", capturable=True)
    data = batches(30)
    for x, y in data[:10]:
        at.step(x, y)
        twin.step(x, y)
    with torch.no_grad():  # the forms round differently
        for p, q in zip(at.model.parameters(), twin.model.parameters(), strict=True):
            q.copy_(p)
            for key, value in at.optimizer.state[p].items():
                twin.optimizer.state[q][key].copy_(value)
        for a, b in zip(at.model.buffers(), twin.model.buffers(), strict=True):
            b.copy_(a)
    step = pygraph.graph(at.step, adapt_optimizers=True)
    uncaptured = pygraph.graph(twin.step, adapt_optimizers=True).prepared()
    for x, y in data[10:]:
        assert torch.equal(step(x, y), uncaptured(x, y))
    assert_same(at.state(), twin.state())
    assert replays(partitions) > 8


def test_a_checkpoint_of_the_default_form_is_adapted_again(partitions: Any) -> None:
    saved = training("AdamW")
    for x, y in batches(3):
        saved.step(x, y)
    ats = [training("AdamW"), training("AdamW")]
    graphed = [pygraph.graph(at.step, adapt_optimizers=True) for at in ats]
    steps: list[Any] = [graphed[0], graphed[1].prepared()]
    for i, (x, y) in enumerate(batches(40)):
        if i == 15:
            for at in ats:
                at.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
            steps[1] = graphed[1].prepared()
        assert torch.equal(steps[0](x, y), steps[1](x, y).detach()), i
    assert_same(ats[0].state(), ats[1].state())
    assert all(group["capturable"] for group in ats[0].optimizer.param_groups)
    assert replays(partitions) > 20


def test_a_rate_that_the_step_itself_moves_is_kept(partitions: Any) -> None:
    """In an adapted step the rate is a tensor, which a scheduler in it writes to."""
    at = training("AdamW")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(at.optimizer, 0.5)

    @pygraph.graph(adapt_optimizers=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        at.step(x, y)
        scheduler.step()

    for x, y in batches(4):
        step(x, y)
    assert at.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.5**4, rel=1e-6)


def test_without_the_option_optimizers_are_left_alone(partitions: Any) -> None:
    at = training("AdamW")
    step = pygraph.graph(at.step)
    for x, y in batches(4):
        step(x, y)
    assert not at.optimizer.param_groups[0]["capturable"]


def test_lbfgs_is_named(partitions: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    @pygraph.graph
    def step(x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    for x, _ in batches(12):
        step(x)
    assert partitions.all == [] and reason(), pygraph.stats()


def test_sparse_adam_is_named(partitions: Any) -> None:
    model = torch.nn.EmbeddingBag(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    @pygraph.graph
    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(12):
        step(torch.randint(0, 10, (4, 2)))
    assert partitions.all == [] and reason(), pygraph.stats()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_truth_value(value: Any) -> None:
    with pytest.raises(ValueError, match="adapt_optimizers"):
        pygraph.graph(lambda: None, adapt_optimizers=value)
