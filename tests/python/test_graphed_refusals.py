"""What keeps a callable from a graph, and how it is named."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pygraph

from .graphed_programs import reason, replays


def test_a_counter_in_the_step_is_named(partitions: Any) -> None:
    metrics = SimpleNamespace(seen=0)

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        metrics.seen += 1
        return x + 1

    for i in range(8):
        assert torch.equal(function(torch.full((2,), float(i))), torch.full((2,), i + 1.0))
    assert metrics.seen == 8
    assert "metrics.seen" in reason() and partitions.all == []


def test_what_is_printed_and_logged_is_named(
    partitions: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    @pygraph.graph
    def prints(x: torch.Tensor) -> torch.Tensor:
        print("a step")
        return x + 1

    @pygraph.graph
    def logs(x: torch.Tensor) -> torch.Tensor:
        logging.getLogger("program").error("a step")
        return x + 1

    for _ in range(9):
        prints(torch.ones(1)), logs(torch.ones(1))
    reasons = {row.name: row.reason for row in pygraph.stats()}
    assert "what is printed" in reasons["prints"] and "what is logged" in reasons["logs"]
    assert capsys.readouterr().out == 9 * "a step\n" and partitions.all == []


def test_state_that_the_first_call_makes_is_no_effect(partitions: Any) -> None:
    cache: dict[str, torch.Tensor] = {}

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(2.0)
        return x + cache["table"]

    for i in range(8):
        assert function(torch.full((2,), float(i))).tolist() == [i, i + 1.0]
    assert replays(partitions) >= 3


def test_numbers_that_are_drawn_on_the_cpu_are_noticed(partitions: Any) -> None:
    function = pygraph.graph(lambda x: x * random.random())
    for _ in range(4):
        function(torch.ones(2))
    assert "random numbers on the CPU" in reason() and partitions.all == []


def test_a_tensor_that_is_kept_is_noticed(partitions: Any) -> None:
    holder = [torch.zeros(2)]

    @pygraph.graph
    def function(x: torch.Tensor) -> torch.Tensor:
        holder[0] = x.exp()
        return x + 1

    for _ in range(8):
        function(torch.ones(2))
        assert torch.equal(holder[0], torch.ones(2).exp())
    assert "holder[0]" in reason() and partitions.all == []


def test_arguments_that_a_step_gives_gradients_are_left_alone(partitions: Any) -> None:
    function = pygraph.graph(lambda x: (x * 2).sum().backward())
    for _ in range(9):
        x = torch.ones(3, requires_grad=True)
        function(x)
        assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert "a tensor that is passed to it, beyond its contents" in reason()
