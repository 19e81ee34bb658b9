"""The code transformations on a GPU: captured, with the results of the uncaptured program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pygraph

from .support import assert_same, captured, compiled, randn, refusals


def _check(function: Callable[..., Any], calls: list[tuple[Any, ...]], *, rtol: float = 1e-5) -> None:
    """Results of every call, compared with eager: same devices, same values, same writes."""
    model = compiled(function)
    with torch.no_grad():
        for args in calls:
            copies = tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)
            _assert_close(model(*args), function(*copies), rtol)
            _assert_close(args, copies, rtol)
    assert captured(), "nothing was captured"
    assert refusals() == []


def _assert_close(actual: Any, expected: Any, rtol: float) -> None:
    if isinstance(expected, tuple):
        for a, b in zip(actual, expected, strict=True):
            _assert_close(a, b, rtol)
    elif not isinstance(expected, torch.Tensor):
        assert actual == expected
    else:
        assert actual.device == expected.device
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5)


def test_a_cpu_scalar_that_changes() -> None:
    x = randn(64, 64)
    _check(lambda x, s: (x.sin() * s).cos(), [(x, torch.tensor(float(i))) for i in range(6)])
    assert captured()[0].replays >= 3


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, int])
def test_a_number_that_changes(kind: Callable[[float], Any]) -> None:
    x = randn(64, 64)
    model = compiled(lambda x, s: (x.sin() / s).cos())
    with torch.no_grad():
        for i in range(1, 9):
            expected = (x.sin() / kind(i)).cos()
            torch.testing.assert_close(model(x, kind(i)), expected, rtol=1e-5, atol=1e-5)


def test_a_scalar_changed_in_place_shows_in_the_next_call() -> None:
    x, scalar = randn(64, 64), torch.tensor(1.0)
    model = compiled(lambda x, s: x * s)
    with torch.no_grad():
        for i in range(6):
            scalar.fill_(i)
            assert_same(model(x, scalar), x * float(i))


class WithTable(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = torch.arange(size, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + self.table.to(x.device)).cos()


@pytest.mark.parametrize("size", [64, 1 << 16])
def test_a_modules_cpu_tensor_is_read_anew_when_it_changes(size: int) -> None:
    module = WithTable(size)
    model = compiled(module)
    x = randn(4, size)
    with torch.no_grad():
        for i in range(8):
            if i % 3 == 2:
                module.table.add_(1)
            torch.testing.assert_close(model(x), module(x))
        module.table = torch.zeros(size)
        torch.testing.assert_close(model(x), module(x))
    assert captured()
    assert refusals() == []


class WithNumbers(nn.Module):
    """CPU tensors of all kinds: numbers, a constant that is kept, an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shift = np.float64(3), np.float32(0.5)
        self.table = torch.arange(1 << 15, dtype=torch.float32)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        y = x.sin() / self.temperature + self.table.to(x.device)
        return (y + offsets.to(x.device) * self.shift).cos()


def test_cpu_values_are_sent_without_any_wrapper() -> None:
    module = WithNumbers()
    model = compiled(module)
    x = randn(2, 1 << 15)
    with torch.no_grad():
        for i in range(8):
            module.temperature = np.float64(i + 1)
            if i == 5:
                module.table.neg_()
            offsets = torch.full((1 << 15,), float(i))
            torch.testing.assert_close(model(x, offsets), module(x, offsets), atol=1e-5, rtol=1e-5)
        assert captured()[0].replays >= 4
        assert refusals() == []
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            model(x, offsets)
    names = [event.name for event in profile.events() or ()]
    assert any(name.startswith("pygraph") for name in names)
    assert not any("CompiledFxGraph" in name for name in names)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="would be frozen"), torch.cuda.graph(graph):
            model(x, offsets)
        torch.testing.assert_close(model(x, offsets), module(x, offsets), atol=1e-5, rtol=1e-5)


def test_an_index_on_the_cpu() -> None:
    x = randn(64, 64)
    calls = [(x, torch.tensor([i, 2, 3])) for i in range(5)]
    _check(lambda x, i: x.sin()[i].cos(), calls)


def test_a_cpu_output() -> None:
    _check(lambda x: (x.sin().sum().cpu(), x.cos() * 2), [(randn(64, 64),) for _ in range(5)])


def test_constants_come_back_where_the_user_expects_them() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + torch.arange(64).to(x.device), torch.arange(4), torch.tensor([1.0, 2.0])

    _check(function, [(randn(64, 64),) for _ in range(5)])


def test_a_cpu_scalar_saved_for_backward_stays_there() -> None:
    x = randn(64, 64, requires_grad=True)

    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * s).square().sum()

    model = compiled(function)
    for i in range(6):
        scalar = torch.tensor(float(i))
        (gradient,) = torch.autograd.grad(model(x, scalar), x)
        (expected,) = torch.autograd.grad(function(x, scalar), x)
        torch.testing.assert_close(gradient, expected)
    assert {row.name for row in captured()} >= {"forward", "backward"}


def test_a_conditional_on_data() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (x,)).exp()

    _check(function, [(randn(64, 64) + (-1) ** i,) for i in range(6)])


def test_a_copy_to_the_cpu_keeps_the_value_from_before_a_write() -> None:
    """A queue pointer, statistics: what was read before a write is what the caller gets."""

    def function(x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        old = buffer.cpu()
        buffer.add_(1)
        return x.sin() + buffer, old

    _check(function, [(randn(64), torch.full((64,), float(i), device="cuda")) for i in range(6)])


def test_a_round_trip_over_the_cpu_is_a_copy() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copy = x.cpu()
        x.add_(1)
        return copy.to(x.device), x * 2

    _check(function, [(randn(64),) for _ in range(6)])
    model = compiled(lambda x: (x.cpu().to(x.device), x * 2))
    x = randn(64)
    for _ in range(6):
        copy, _ = model(x)
        before = x.clone()
        copy.add_(1)  # the caller's own
        assert torch.equal(x, before)


def test_a_returned_constant_is_the_callers() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grid = torch.linspace(0, 1, 64).exp().to(x.device)
        return x + grid, grid

    model = compiled(function)
    for _ in range(6):
        x = randn(64)
        total, grid = model(x)
        expected = torch.linspace(0, 1, 64).exp().cuda()
        torch.testing.assert_close(grid, expected)
        torch.testing.assert_close(total, x + expected)
        grid.add_(1)


def test_a_large_table_on_the_cpu_may_change_without_a_version() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(1 << 16).float()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.to(x.device)

    module = Model()
    model = compiled(module)
    x = randn(1 << 16)
    for i in range(8):
        if i % 2:
            module.table.data.add_(1)
        elif i:
            module.table.numpy()[:] += 1
        assert torch.equal(model(x), x + module.table.cuda())


def test_a_mean_over_a_symbolic_size_and_its_gradient() -> None:
    """The backward's ``2 / size`` is computed by operators on CPU tensors, which stay there."""
    model = torch.compile(nn.functional.mse_loss, backend="pygraph", dynamic=True)
    for size in (5, 7, 5, 7, 5, 7):
        x, target = randn(size, 3).requires_grad_(), randn(size, 3)
        model(x, target).backward()
        torch.testing.assert_close(x.grad, 2 / x.numel() * (x.detach() - target))
    assert refusals() == []


def test_an_assertion_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.msg((x.sum() < 1e9).all(), "too large")
        return x.sin()

    _check(function, [(randn(64),) for _ in range(5)])


def test_only_the_branch_that_is_chosen_runs() -> None:
    """The other one's index is out of bounds: it would end the process."""

    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, index)[0] + torch.linspace(0, 1, 64).exp().to(x.device)

        def leave(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return x[0] * 2

        y = x.sin().exp()
        return torch.cond((index < len(x)).all(), take, leave, (y, index)) + 1

    calls = [(randn(64, 64), torch.tensor([n], device="cuda")) for n in (3, 1000, 5, 64, 7, 9)]
    _check(function, calls)


def test_a_number_is_rounded_as_the_tensor_that_it_fills() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((64,), 0.1, dtype=torch.float16).to(x.device)

    model = compiled(function)
    for _ in range(6):
        x = randn(64, 64).half()
        assert_same(model(x), function(x))
    assert captured()


def test_a_copy_of_a_transposed_tensor_has_its_strides() -> None:
    def function(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copy = table.to(x.device)
        return x.sin() + copy, copy

    model = compiled(function)
    for i in range(6):
        x, table = randn(64, 32), torch.full((32, 64), float(i)).t()
        with torch.no_grad():
            (total, copy), expected = model(x, table), function(x, table)
        torch.testing.assert_close(total, expected[0])
        assert_same(copy, expected[1])
        assert copy.stride() == expected[1].stride() == table.stride()
    assert captured()


def test_data_dependent_shapes_leave_the_rest_in_graphs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with_shape = (x > 0).nonzero()
        return x.sin().exp().cos(), with_shape.sum()

    _check(function, [(randn(64, 64),) for _ in range(5)])


def test_a_cache_that_is_written_is_an_ordinary_input() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, x)
        return cache.sum(1)

    model = compiled(step)
    caches = [torch.zeros(2, 32, 8, device="cuda") for _ in range(2)]
    with torch.no_grad():
        for i in range(20):
            x, position = randn(2, 1, 8), torch.tensor([i], device="cuda")
            torch.testing.assert_close(model(caches[0], x, position), step(caches[1], x, position))
            assert_same(caches[0], caches[1])
    (row,) = captured()
    assert row.replays >= 17


def test_everything_switched_off_still_gives_the_right_results() -> None:
    x = randn(64, 64)
    model = compiled(
        lambda x, s: x * s + torch.arange(64).to(x.device), options={"pygraph.transforms": "none"}
    )
    with torch.no_grad():
        for i in range(5):
            expected = x * float(i) + torch.arange(64, device="cuda")
            torch.testing.assert_close(model(x, torch.tensor(float(i))), expected)


def test_a_cpu_tensor_in_the_users_own_capture_is_refused_as_by_pytorch() -> None:
    x, table = randn(64, 64), torch.arange(64.0)
    model = compiled(lambda x, t: x.sin() + t.to(x.device))
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(4):
            model(x, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="while a CUDA graph is being captured"),
        torch.no_grad(),
        torch.cuda.graph(graph, stream=stream),
    ):
        model(x, table)
    with torch.no_grad():
        torch.testing.assert_close(model(x, table), x.sin() + table.cuda())


def test_masks_of_objects_are_pasted_in_one_graph() -> None:
    roi_heads = pytest.importorskip("torchvision.models.detection.roi_heads")

    def paste(masks: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return roi_heads.paste_masks_in_image(masks, boxes, (48, 64)) * 2

    compiled(torch.sin)(randn(2))  # the substitutes of what is imported are known from here on
    model = compiled(paste)
    for _ in range(4):
        first, second = torch.rand(2, 7, 2, device="cuda") * torch.tensor([64, 48], device="cuda")
        boxes = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], 1)
        masks = torch.rand(7, 1, 28, 28, device="cuda")
        torch.testing.assert_close(model(masks, boxes), paste(masks, boxes), atol=2e-5, rtol=0)
    assert [graph.state for graph in pygraph.stats()].count("captured") == 1


def test_levels_of_a_pyramid_are_pooled_in_one_graph() -> None:
    poolers = pytest.importorskip("torchvision.ops.poolers")
    pool = poolers.MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 2)
    pool.scales, pool.map_levels = [1 / 4, 1 / 8, 1 / 16, 1 / 32], poolers.initLevelMapper(2, 5)

    def function(features: list[torch.Tensor], boxes: torch.Tensor) -> torch.Tensor:
        named = {str(level): feature for level, feature in enumerate(features)}
        return pool(named, [boxes], [(512, 512)]) * 2

    features = [randn(1, 16, 128 >> level, 128 >> level) for level in range(4)]
    corner, size = torch.rand(60, 2) * 100, torch.exp2(torch.rand(60, 2) * 5 + 4)
    boxes = torch.cat([corner, corner + size], 1).cuda()
    compiled(torch.sin)(randn(2))  # the substitutes of what is imported are known from here on
    model = compiled(function)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(model(features, boxes), function(features, boxes))
    (graph,) = captured()
    assert graph.replays >= 3
    assert refusals() == []


def test_what_surrounds_an_operation_that_waits_is_captured() -> None:
    def solve(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        square = x @ x.mT + 5 * torch.eye(x.shape[-1], device=x.device)
        values = torch.linalg.eigh(square)[0]
        return torch.linalg.inv(square).relu() + 1, values.exp().log(), torch.linalg.svdvals(x).sin()

    _check(solve, [(randn(4, 16, 16),) for _ in range(4)], rtol=1e-3)
