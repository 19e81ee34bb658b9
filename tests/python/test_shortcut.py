"""Which of Inductor's wrappers are nothing but a reordering."""

from __future__ import annotations

from typing import Any

import torch

from pygraph.shortcut import Route, find_route


class Runner:
    """Shaped like Inductor's generated class; `body` is its call method."""

    def __init__(self, body: Any) -> None:
        self.partitions = ["the real partition"]
        self._body = body

    def call(self, args: list[Any]) -> Any:
        return self._body(self, args)


def test_a_reordering_is_found() -> None:
    def body(runner: Runner, args: list[Any]) -> Any:
        a, b, c = args
        args.clear()
        x, y = runner.partitions[0]([c, a])
        return (y, b, x)

    runner = Runner(body)
    assert find_route(runner, 3, 2) == Route([2, 0], [(True, 1), (False, 1), (True, 0)])
    assert runner.partitions == ["the real partition"]


def test_work_on_an_argument_is_no_reordering() -> None:
    def body(runner: Runner, args: list[Any]) -> Any:
        (x,) = runner.partitions[0]([args[0] + 1])
        return (x,)

    assert find_route(Runner(body), 1, 1) is None


def test_a_result_from_elsewhere_is_no_reordering() -> None:
    def body(runner: Runner, args: list[Any]) -> Any:
        (x,) = runner.partitions[0](args)
        return (x, torch.arange(4))

    assert find_route(Runner(body), 1, 1) is None


def test_two_calls_or_another_number_of_results_are_no_reordering() -> None:
    def twice(runner: Runner, args: list[Any]) -> Any:
        runner.partitions[0](list(args))
        return runner.partitions[0](args)

    def wrong_count(runner: Runner, args: list[Any]) -> Any:
        x, y = runner.partitions[0](args)
        return (x, y)

    assert find_route(Runner(twice), 1, 1) is None
    assert find_route(Runner(wrong_count), 1, 1) is None
