"""Plain loops around a compiled model: ``optimizer.step()`` and ``clip_grad_norm_`` have graphs, with
the same bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import pygraph

from .graph_training import adamw, batches, fused_sgd, normed, sgd
from .support import captured

_STEPS = 30
Train = Callable[["Loop"], Any]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a cache of its own: two compilations must not find what another process tunes meanwhile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Loop:
    """The model is compiled in either case; ``optimizers`` is the option under test."""

    def __init__(self, optimizer: Callable[..., Any], optimizers: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = normed().cuda()
        self.optimizer: Any = optimizer(self.model.parameters())
        # In place, `compile()` does nothing for modules of torch.nn itself in PyTorch 2.11.
        options = {"pygraph.optimizers": optimizers}
        self.call: Any = torch.compile(self.model, backend="pygraph", options=options)
        self.norms: list[torch.Tensor] = []  # that clips returned

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.call(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[torch.Tensor]:
        moments = [value for of in self.optimizer.state.values() for value in of.values()]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        found = [*self.model.state_dict().values(), *moments, *gradients, *self.norms]
        return [t.clone() for t in found if isinstance(t, torch.Tensor)]


def plainly(loop: Loop) -> None:
    for x, y in batches(_STEPS):
        loop.step(x, y)


def step_replays() -> int:
    return sum(row.replays for row in captured() if row.name.endswith(".step"))


def clip_replays() -> int:
    return sum(row.replays for row in captured() if row.name == "clip_grad_norm_")


def clipping(clip: Callable[[Loop, int], torch.Tensor], steps: int = _STEPS, also: Any = None) -> Train:
    """A loop that clips. also: is called before each step."""

    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(steps)):
            if also is not None:
                also(loop, i)
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x), y).backward()
            loop.norms.append(clip(loop, i))
            loop.optimizer.step()

    return train


def assert_trains_alike(train: Train, optimizer: Callable[..., Any] = adamw) -> Loop:
    expected = Loop(optimizer, "off")
    train(expected)
    state = expected.state()
    assert step_replays() == 0 and clip_replays() == 0
    loop = Loop(optimizer, "auto")
    train(loop)
    for a, b in zip(loop.state(), state, strict=True):  # where a step was skipped, with infinities
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return loop


def muon(parameters: Any) -> Any:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=1e-3)


def capturable_nadam(parameters: Any) -> Any:
    return torch.optim.NAdam(parameters, lr=1e-3, capturable=True)


@pytest.mark.parametrize("optimizer", [adamw, sgd, fused_sgd, muon, capturable_nadam])
def test_steps_are_replayed(optimizer: Any) -> None:
    kept = assert_trains_alike(plainly, optimizer)
    assert step_replays() > 15, pygraph.stats()
    del kept


def test_the_default_adamw_runs_as_it_is_and_says_why() -> None:
    kept = assert_trains_alike(plainly, lambda p: torch.optim.AdamW(p, lr=1e-3))
    assert step_replays() == 0
    reasons = [row.reason for row in pygraph.stats() if row.name == "AdamW.step"]
    assert any("counts its steps on the CPU" in reason for reason in reasons), pygraph.stats()
    del kept


@pytest.mark.parametrize("early", [False, True])
def test_a_scheduler_is_followed(early: bool) -> None:
    def train(loop: Loop) -> None:
        make = lambda: torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # noqa: E731
        scheduler = make() if early else None
        for i, (x, y) in enumerate(batches(_STEPS)):
            if i == 8 and not early:
                scheduler = make()
            loop.step(x, y)
            if scheduler is not None:
                scheduler.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 10, pygraph.stats()
    del kept


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_is_followed(optimizer: Any, clips: bool) -> None:
    def train(loop: Loop) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=4)
        for i, (x, y) in enumerate(batches(_STEPS)):
            loop.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(loop.call(x * (torch.inf if i == 9 else 1)), y)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(loop.optimizer)
                loop.norms.append(clip_grad_norm_(loop.model.parameters(), 0.1))
            scaler.step(loop.optimizer)
            scaler.update()

    kept = assert_trains_alike(train, optimizer)
    assert step_replays() > 10, pygraph.stats()
    assert not clips or clip_replays() > 10, pygraph.stats()
    del kept


def test_gradients_are_accumulated() -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(4 * _STEPS)):
            F.cross_entropy(loop.call(x), y).backward()
            if i % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()

    kept = assert_trains_alike(train)
    assert step_replays() > 15, pygraph.stats()
    del kept


def test_a_checkpoint_is_loaded_and_a_group_added_midway() -> None:
    def train(loop: Loop) -> None:
        saved: Any = None
        extra = torch.nn.Parameter(torch.ones(10, device="cuda"))
        for i, (x, y) in enumerate(batches(3 * _STEPS)):
            if i == 5:
                saved = torch.utils._pytree.tree_map_only(
                    torch.Tensor,
                    torch.clone,
                    (loop.model.state_dict(), loop.optimizer.state_dict()),
                )
            if i == _STEPS:
                loop.model.load_state_dict(saved[0])
                loop.optimizer.load_state_dict(saved[1])
            if i == 2 * _STEPS:
                loop.optimizer.add_param_group({"params": [extra], "lr": 1e-2})
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x) * extra, y).backward()
            loop.optimizer.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 40, pygraph.stats()
    del kept


def test_a_loop_on_another_stream() -> None:
    def train(loop: Loop) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            data = batches(_STEPS)
            for x, y in data:
                loop.step(x, y)
        torch.cuda.synchronize()

    kept = assert_trains_alike(train)
    del kept


def test_an_optimizer_and_its_memory_are_freed() -> None:
    loop = Loop(adamw, "auto")
    plainly(loop)
    assert step_replays() > 15
    gone = weakref.ref(loop.optimizer)
    pygraph.reset()
    torch._dynamo.reset()
    del loop
    gc.collect()
    assert gone() is None


def test_a_whole_step_by_graph_contains_the_optimizers() -> None:
    """A compiled model and its optimizer inside of a graphed callable: not one graph in another."""
    loop = Loop(adamw, "auto")
    plainly(loop)
    state = loop.state()
    expected = Loop(adamw, "auto")
    step = pygraph.graph(expected.step)
    for x, y in batches(_STEPS):
        step(x, y)
    for a, b in zip(expected.state(), state, strict=True):
        assert torch.equal(a, b), pygraph.stats()
    assert sum(row.replays for row in captured() if row.name == "step") > 10, pygraph.stats()


@pytest.mark.parametrize(
    "given", [(0.1,), (0.1, torch.inf), (100.0,), (0.1, 2.0, False, False), (0.1, 1.0, False, True)]
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_clips_are_replayed(given: Any, optimizer: Any) -> None:
    clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), *given)  # noqa: E731
    kept = assert_trains_alike(clipping(clip), optimizer)
    assert step_replays() > 15 and clip_replays() > 15, pygraph.stats()
    assert len({norm.data_ptr() for norm in kept.norms}) == _STEPS


def test_clips_of_gradients_that_accumulate() -> None:
    def train(loop: Loop) -> None:
        for i, (x, y) in enumerate(batches(4 * _STEPS)):
            F.cross_entropy(loop.call(x), y).backward()
            if i % 4 == 3:
                loop.norms.append(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))
                loop.optimizer.step()
                loop.optimizer.zero_grad(set_to_none=i % 8 == 3)

    kept = assert_trains_alike(train)
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_clips_with_a_scheduler() -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1)  # noqa: E731
        clipping(clip, also=lambda _, i: scheduler.step() if i else None)(loop)

    kept = assert_trains_alike(train)
    assert step_replays() > 10 and clip_replays() > 15, pygraph.stats()
    del kept


def test_each_norm_to_clip_to_has_a_graph() -> None:
    clip = lambda loop, i: clip_grad_norm_(loop.model.parameters(), 0.1 if i < _STEPS else 0.2)  # noqa: E731
    kept = assert_trains_alike(clipping(clip, 2 * _STEPS))
    assert clip_replays() > 20, pygraph.stats()
    del kept


def test_clips_of_parameters_that_are_frozen_midway() -> None:
    def freeze(loop: Loop, i: int) -> None:
        next(loop.model.children()).requires_grad_(not _STEPS <= i < 2 * _STEPS)

    clip = lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1)  # noqa: E731
    kept = assert_trains_alike(clipping(clip, 3 * _STEPS, freeze))
    assert clip_replays() > 40, pygraph.stats()
    del kept


def test_clips_of_infinite_gradients() -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i == _STEPS - 2:
            next(p.grad for p in loop.model.parameters() if p.grad is not None).fill_(torch.inf)
        return clip_grad_norm_(loop.model.parameters(), 0.1)

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_clips_that_raise_have_no_graph() -> None:
    def clip(loop: Loop, i: int) -> torch.Tensor:
        if i < _STEPS - 1:
            return clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
        next(p.grad for p in loop.model.parameters() if p.grad is not None).fill_(torch.inf)
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(loop.model.parameters(), 0.1, error_if_nonfinite=True)
        return torch.zeros(())

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() == 0 and step_replays() > 15
    del kept


def test_clips_on_another_stream() -> None:
    def train(loop: Loop) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            clipping(lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1))(loop)
        torch.cuda.synchronize()

    kept = assert_trains_alike(train)
    assert clip_replays() > 0, pygraph.stats()
    del kept


def test_clips_of_each_parameter() -> None:
    def clip(loop: Loop, _: int) -> torch.Tensor:
        return torch.stack([clip_grad_norm_(p, 0.05) for p in loop.model.parameters()])

    kept = assert_trains_alike(clipping(clip))
    assert clip_replays() > 15, pygraph.stats()
    del kept


def test_graphs_of_clips_keep_no_parameters() -> None:
    loop = Loop(sgd, "auto")
    clipping(lambda loop, _: clip_grad_norm_(loop.model.parameters(), 0.1))(loop)
    assert clip_replays() > 15, pygraph.stats()
    gone = weakref.ref(next(loop.model.parameters()))
    pygraph.reset()
    torch._dynamo.reset()
    del loop
    gc.collect()
    assert gone() is None


def test_a_whole_step_by_graph_contains_its_clips() -> None:
    def train(graphs: bool) -> list[torch.Tensor]:
        loop = Loop(adamw, "auto")

        def whole(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loop.optimizer.zero_grad()
            F.cross_entropy(loop.call(x), y).backward()
            norm = clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.optimizer.step()
            return norm

        step = pygraph.graph(whole) if graphs else whole
        norms = [step(x, y) for x, y in batches(_STEPS)]
        if graphs:
            assert sum(row.replays for row in captured() if row.name == "whole") > 10, pygraph.stats()
        return [*loop.state(), *norms]

    for a, b in zip(train(True), train(False), strict=True):
        assert torch.equal(a, b), pygraph.stats()


@pytest.mark.parametrize("change", ["clear", "zero", "replace"])
def test_what_a_step_of_the_programs_own_class_makes_of_gradients(change: str) -> None:
    """The loop itself never clears them."""

    class Changing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if change == "clear":
                        parameter.grad = None
                    elif change == "zero":
                        parameter.grad.zero_()
                    else:
                        parameter.grad = parameter.grad * 0.5

    def train(loop: Loop) -> None:
        for x, y in batches(_STEPS):
            F.cross_entropy(loop.call(x), y).backward()
            loop.optimizer.step()

    kept = assert_trains_alike(train, lambda p: Changing(p, lr=1e-3, momentum=0.9))
    assert step_replays() > 10, pygraph.stats()
    del kept


def test_a_moving_momentum_is_followed() -> None:
    def train(loop: Loop) -> None:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 2e-3, _STEPS + 1)
        for x, y in batches(_STEPS):
            loop.step(x, y)
            scheduler.step()

    kept = assert_trains_alike(train)
    assert step_replays() > 10, pygraph.stats()
    del kept
