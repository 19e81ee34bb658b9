"""Results of which the step keeps a part."""

from __future__ import annotations

from typing import Any

import torch

import pygraph

from .attacked import X, replays


def test_a_new_container_that_is_kept_and_returned(partitions: Any) -> None:
    class Trainer:
        info: Any = None

        def step(self, x: Any) -> Any:
            self.info = {"batch": x.shape[0]}
            return x * 2, self.info

    trainer = Trainer()
    graphed = pygraph.graph(trainer.step)
    for _ in range(12):
        _, info = graphed(X)
    info["lr"] = 0.1
    assert trainer.info.get("lr") == 0.1, f"after {replays(partitions)} replays"


def test_metrics_that_are_kept_and_returned_with_a_loss(partitions: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4))

    class Trainer:
        last: Any = None

        def step(self, x: Any) -> Any:
            p.grad = None
            loss = (p * x).sum()
            loss.backward()
            self.last = {"loss": loss}
            return self.last

    trainer = Trainer()
    graphed = pygraph.graph(trainer.step)
    for i in range(12):
        graphed(X)["epoch"] = i
        assert trainer.last.get("epoch") == i, f"call {i + 1}"
