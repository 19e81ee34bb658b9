"""Which of Inductor's wrappers are nothing but a reordering, and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph import operators
from pygraph.compile.wrapper_bypass import Route, find_route
from pygraph.fx_passes import fake_operators  # noqa: F401  for _sends, which the compiler traces

from .inductor_kernels import generate_module

reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
GPU = torch.device("cuda:0")
device = torch.device  # as Inductor imports it


class Reordering:
    """Each of these is shaped like Inductor's generated class."""

    def call(self: Any, args: list[Any]) -> Any:
        a, b, c = args
        args.clear()
        x, y = self.partitions[0]([c, a])
        return (y, b, x)


class Views:
    def call(self: Any, args: list[Any]) -> Any:
        (a,) = args
        (x,) = self.partitions[0]([a])
        return (reinterpret_tensor(x, (4, 2), (1, 4), 8), x, reinterpret_tensor(a, (3,), (1,), 0))


class Nones:
    """A backward: inputs without a gradient."""

    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0](args)
        return (None, x, None)


class DynamicView:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0]([args[1]])
        return (reinterpret_tensor(x, (args[0], 2), (2, 1), 0),)


class ViewForThePartition:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0]([reinterpret_tensor(args[0], (2,), (1,), 0)])
        return (x,)


class ViewOfAView:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0](args)
        return (reinterpret_tensor(reinterpret_tensor(x, (2,), (1,), 0), (1,), (1,), 0),)


class Work:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0]([args[0] + 1])
        return (x,)


class ResultFromElsewhere:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0](args)
        return (x, torch.arange(4))


class UnhashableResult:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0](args)
        return (x, [x])


class UnhashableArgument:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0]([args])
        return (x,)


class NoMethod:
    call = staticmethod(lambda args: args)


class TwoCalls:
    def call(self: Any, args: list[Any]) -> Any:
        self.partitions[0](list(args))
        return self.partitions[0](args)


class OtherCount:
    def call(self: Any, args: list[Any]) -> Any:
        x, y = self.partitions[0](args)
        return (x, y)


def test_a_reordering_is_found() -> None:
    route = find_route(Reordering(), 3, 2)
    assert route == Route([2, 0], [(True, 1, None), (False, 1, None), (True, 0, None)])


def test_views_of_results_and_arguments_are_found() -> None:
    route = find_route(Views(), 1, 1)
    first, last = ([4, 2], [1, 4], 8), ([3], [1], 0)
    assert route == Route([0], [(True, 0, first), (True, 0, None), (False, 0, last)])
    assert reinterpret_tensor is torch._C._dynamo.guards._reinterpret_tensor


def test_results_that_are_none_stay_so() -> None:
    assert find_route(Nones(), 1, 1) == Route([0], [None, (True, 0, None), None])


@pytest.mark.parametrize(
    "wrapper",
    [
        *(DynamicView, ViewForThePartition, ViewOfAView, Work, ResultFromElsewhere),
        *(UnhashableResult, UnhashableArgument, NoMethod),
    ],
)
def test_whatever_does_more_is_no_reordering(wrapper: Any) -> None:
    assert find_route(wrapper(), 2 if wrapper is DynamicView else 1, 1) is None


class Sending:
    """A wrapper that sends CPU values to the GPU first, as PyGraph's transformations have it do."""

    def call(self: Any, args: list[Any]) -> Any:
        a, b, c, d = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            numbers = torch.ops.pygraph.scalars_to_device.default(
                [b, a], torch.device(type="cuda", index=0)
            )
            assert_size_stride(numbers, (2,), (1,), "pygraph.scalars_to_device")
            constant = torch.ops.pygraph.to_device.default(d, device(type="cuda", index=0))
            assert_size_stride(constant, (7,), (1,))
        (x,) = self.partitions[0]([c, constant, numbers])
        return (x, c)


class SendingWhatItMade:
    def call(self: Any, args: list[Any]) -> Any:
        first = torch.ops.pygraph.to_device.default(args[0], device(type="cuda", index=0))
        second = torch.ops.pygraph.to_device.default(first, device(type="cuda", index=0))
        return self.partitions[0]([second])


class ReturningWhatItSent:
    def call(self: Any, args: list[Any]) -> Any:
        sent = torch.ops.pygraph.to_device.default(args[0], device(type="cuda", index=0))
        (x,) = self.partitions[0]([sent])
        return (x, sent)


class AnotherOperator:
    def call(self: Any, args: list[Any]) -> Any:
        return self.partitions[0]([torch.ops.pygraph.keep_on_cpu.default(args[0])])


class AnOperatorWithoutTensors:
    def call(self: Any, args: list[Any]) -> Any:
        torch.ops.aten._print.default("called")
        return self.partitions[0](args)


class ADrawingOperator:
    def call(self: Any, args: list[Any]) -> Any:
        (x,) = self.partitions[0](args)
        return (x, torch.ops.aten.randint.low(0, 2, [1]))


class ACheckOfASize:
    def call(self: Any, args: list[Any]) -> Any:
        if args[0] != 4:
            raise ValueError(args[0])
        return self.partitions[0](args)


class ACheckOfATensor:
    def call(self: Any, args: list[Any]) -> Any:
        if args[0]:
            args = args[:1]
        return self.partitions[0](args)


class ABuiltin:
    def call(self: Any, args: list[Any]) -> Any:
        print("called")
        return self.partitions[0](args)


class AnAssertion:
    def call(self: Any, args: list[Any]) -> Any:
        assert args[0] == 4, "another size"
        return self.partitions[0](args)


@pytest.mark.parametrize(
    "wrapper",
    [AnOperatorWithoutTensors, ADrawingOperator, ACheckOfASize, ACheckOfATensor, ABuiltin, AnAssertion],
)
def test_what_has_effects_or_asks_for_values_is_no_route(
    wrapper: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO", "pygraph"):
        assert find_route(wrapper(), 1, 1) is None
    assert "keeps Inductor's wrapper" in caplog.text
    assert capfd.readouterr().out == ""  # nothing of it has run


class CheckingAnArgument:
    def call(self: Any, args: list[Any]) -> Any:
        assert_size_stride(args[0], (2,), (1,))
        return self.partitions[0](args)


def test_what_is_sent_to_the_gpu_first_is_found() -> None:
    numbers, constant = ([1, 0], GPU, True), ([3], GPU, False)
    outputs: list[Any] = [(True, 0, None), (False, 2, None)]
    assert find_route(Sending(), 4, 1) == Route([2, 5, 4], outputs, [numbers, constant])


def _sends(x: torch.Tensor, table: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """As PyGraph's transformations write it."""
    scale = torch.ops.pygraph.scalars_to_device([number], GPU).reshape(())
    return x / scale + torch.ops.pygraph.to_device(table, GPU)


def test_the_wrapper_that_inductor_generates_has_a_route() -> None:
    """Of the installed release."""
    assert operators.__name__ == "pygraph.operators"  # which defines them

    def arguments() -> list[torch.Tensor]:
        number = torch.empty((), dtype=torch.float64)
        return [torch.empty(4, 64, device="cuda"), torch.empty(64), number]

    code = generate_module(_sends, arguments, graph_partition=True, triton__cudagraphs=True)
    start = code.index("class Runner:")
    names: dict[str, Any] = {"partition_0": None}
    exec("\n".join(line for line in code.splitlines() if line.startswith(("import ", "from "))), names)
    names |= {"assert_size_stride": assert_size_stride, "reinterpret_tensor": reinterpret_tensor}
    exec(code[start : code.index("runner = Runner")], names)
    route = find_route(names["Runner"]([None]), 3, 1)
    assert route is not None and sorted(route.sent) == [([1], GPU, False), ([2], GPU, True)]
    assert route.outputs == [(True, 0, None)]


@pytest.mark.parametrize(
    "wrapper", [SendingWhatItMade, ReturningWhatItSent, AnotherOperator, CheckingAnArgument]
)
def test_sending_in_another_way_is_no_route(wrapper: Any) -> None:
    assert find_route(wrapper(), 1, 1) is None


def test_two_calls_or_another_number_of_results_are_no_reordering() -> None:
    assert find_route(TwoCalls(), 1, 1) is None
    assert find_route(OtherCount(), 1, 1) is None
