"""Attributes and keys that come, go, or lie in another dictionary."""

from __future__ import annotations

from typing import Any

import torch

from .attacked import Plain, adamw_step, assert_follows, replays


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(self, "scale", 1.0)


def test_an_attribute_that_a_module_gets(partitions: Any) -> None:
    model = Scaled(4, 2)
    change = lambda: setattr(model, "scale", 2.0)  # noqa: E731
    assert_follows(partitions, torch.no_grad()(lambda x: model(x)), change)
    assert replays(partitions) > 0


def test_an_attribute_that_a_module_loses(partitions: Any) -> None:
    model = Scaled(4, 2)
    model.scale = 2.0  # type: ignore[assignment]
    assert_follows(partitions, torch.no_grad()(lambda x: model(x)), lambda: delattr(model, "scale"))
    assert replays(partitions) > 0


def test_another_dictionary_of_attributes(partitions: Any) -> None:
    plain = Plain(scale=1.0)
    change = lambda: setattr(plain, "__dict__", {"scale": 2.0})  # noqa: E731
    assert_follows(partitions, lambda x: x * plain.scale, change)
    assert replays(partitions) > 0


def test_another_dictionary_of_a_modules_attributes(partitions: Any) -> None:
    model = Scaled(4, 2)
    change = lambda: setattr(model, "__dict__", {**vars(model), "scale": 2.0})  # noqa: E731
    assert_follows(partitions, torch.no_grad()(lambda x: model(x)), change)
    assert replays(partitions) > 0


def test_a_key_that_a_group_of_an_optimizer_gets(partitions: Any) -> None:
    _, optimizer, step = adamw_step()

    def function(x: torch.Tensor) -> torch.Tensor:
        step(x)
        return x * optimizer.param_groups[0].get("scale", 1.0)

    change = lambda: optimizer.param_groups[0].update(scale=2.0)  # noqa: E731
    assert_follows(partitions, function, change)
    assert replays(partitions) > 0
