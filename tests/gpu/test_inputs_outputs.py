"""Every kind of input and output: fresh, aliased, overlapping, mutated, misaligned, empty."""

from __future__ import annotations

import pytest
import torch

from pygraph import runtime
from pygraph.record import recorder

from .support import (
    also_as_shipped,
    assert_same,
    assert_used,
    calls,
    captured,
    check_inference,
    compiled,
    randn,
)


def test_results_of_earlier_calls_stay_valid() -> None:
    model = compiled(lambda x: torch.relu(x @ x) + 1)
    inputs = [randn(64, 64) for _ in range(10)]
    with torch.no_grad():
        results = [model(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, torch.relu(x @ x) + 1)
    assert len({r.data_ptr() for r in results}) == len(results)
    assert captured()[0].replays >= 8


def test_no_input_is_copied() -> None:
    model = compiled(lambda x, y: x * 2 + y)
    inputs = [(randn(1024, 1024), randn(1024, 1024)) for _ in range(4)]
    with torch.no_grad():
        for x, y in inputs:
            model(x, y)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = model(*inputs[0])
        assert torch.cuda.max_memory_allocated() - before <= result.nbytes
    assert captured()[0].bytes_not_copied == 2 * 4 * 1024 * 1024


@also_as_shipped
def test_mutated_input_is_mutated_in_place() -> None:
    def step(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache.relu() @ x

    check_inference(step, lambda: (randn(32, 32), randn(32, 32)))


@also_as_shipped
def test_the_same_cache_is_mutated_by_every_call() -> None:
    model = compiled(lambda cache, x: cache.add_(x).sum())
    cache = torch.zeros(32, 32, device="cuda")
    with torch.no_grad():
        for _ in range(calls(7)):
            model(cache, torch.ones(32, 32, device="cuda"))
    assert_same(cache, torch.full((32, 32), float(calls(7)), device="cuda"))


@also_as_shipped
def test_output_is_an_input() -> None:
    model = compiled(lambda x, y: (x, x + y, y))
    with torch.no_grad():
        for _ in range(calls(4)):
            x, y = randn(8, 8), randn(8, 8)
            a, b, c = model(x, y)
            assert a.data_ptr() == x.data_ptr() and c.data_ptr() == y.data_ptr()
            assert_same(b, x + y)


@also_as_shipped
def test_output_is_a_view_of_an_input_or_of_an_output() -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x[2:4], y, y[1:], y.t(), y.reshape(-1)

    check_inference(views, lambda: (randn(8, 16),))


@also_as_shipped
def test_outputs_of_every_layout() -> None:
    def outputs(x: torch.Tensor) -> tuple[object, ...]:
        constant = torch.arange(4, device=x.device)
        return x + 1, constant, x[:0] * 2, (x[:, :1] * 2).expand(8, 16), None, 3, (x > 0)

    check_inference(outputs, lambda: (randn(8, 16),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    check_inference(lambda x: x * 3 + x, lambda: (randn(16, 16, dtype=dtype),))


@also_as_shipped
def test_non_contiguous_and_expanded_inputs() -> None:
    def combine(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * 2 + y + z

    check_inference(
        combine, lambda: (randn(16, 8).t(), randn(8, 1).expand(8, 16), randn(8, 64)[:, ::4])
    )


@also_as_shipped
def test_misaligned_inputs_then_aligned_again() -> None:
    model = compiled(lambda x: torch.tanh(x) + 1)
    base = randn(4097)
    with torch.no_grad():
        for offset in (0, 1) * calls(4):
            x = base[offset : offset + 4096]
            torch.testing.assert_close(model(x), torch.tanh(x) + 1)


@also_as_shipped
def test_a_misaligned_input_that_is_mutated() -> None:
    model = compiled(lambda x: x.mul_(2).sum())
    base = torch.ones(4097, device="cuda")
    with torch.no_grad():
        for _ in range(calls(5)):
            model(base[1:])
    assert base[0] == 1 and bool((base[1:] == 2.0 ** calls(5)).all())


@also_as_shipped
def test_empty_inputs() -> None:
    check_inference(lambda x, y: (x * 2, y + 1), lambda: (randn(0, 4), randn(4, 4)))


@also_as_shipped
def test_inputs_that_overlap() -> None:
    model = compiled(lambda x, y: (x + y, x * y))
    base = randn(100)
    with torch.no_grad():
        for start in (0, 1, 16, 32, 0, 16) * calls(1):
            x, y = base[:64], base[start : start + 64]
            assert_same(model(x, y), (x + y, x * y))


@also_as_shipped
def test_a_mutated_input_that_overlaps_another() -> None:
    def shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    model = compiled(shift)
    with torch.no_grad():
        for _ in range(calls(5)):
            base = randn(96)
            expected_base = base.clone()
            expected = shift(expected_base[:64], expected_base[32:])
            assert_same(model(base[:64], base[32:]), expected)
            assert_same(base, expected_base)


@also_as_shipped
def test_a_parameter_swapped_for_another_tensor() -> None:
    module = torch.nn.Linear(32, 32).cuda()
    model = compiled(module)
    x = randn(4, 32)
    with torch.no_grad():
        for _ in range(calls(4)):
            model(x)
        module.weight.data = randn(32, 32)
        torch.testing.assert_close(model(x), module(x))
        module.load_state_dict({"weight": randn(32, 32), "bias": randn(32)}, assign=True)
        torch.testing.assert_close(model(x), module(x))
    assert_used()


@also_as_shipped
def test_inputs_die_while_the_graph_runs() -> None:
    model = compiled(lambda x: (x @ x).relu() @ x)
    with torch.no_grad():
        for i in range(20):
            result = model(torch.full((512, 512), float(i % 3), device="cuda"))
            del result
            assert_same(model(torch.ones(512, 512, device="cuda"))[0, 0].item(), 512.0**2)


def test_the_shortcut_makes_views_of_results_and_of_arguments_wherever_they_are() -> None:
    def partition(args: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        (x,) = args
        args.clear()
        return (x + 1,)

    def fallback(*args: torch.Tensor) -> None:
        raise AssertionError("no graph matched")

    engine = runtime.engine()
    x, on_cpu = randn(4, 8), torch.arange(6.0)
    partition([x])
    torch.cuda.synchronize()
    recording = recorder.record(recorder.Request(partition, [x], device=0, sharing=()))
    graphed = engine.graphed_callable(partition, partition, 0)
    engine.add_graph(graphed, recording.graph, 1, 0)
    outputs = [(True, 0, ([8, 4], [1, 8], 0)), (False, 1, ([2, 3], [3, 1], 0)), None]
    whole = engine.whole_graph_callable(graphed, fallback, False, 2, [0], outputs, [])
    assert_same(whole(x, on_cpu), ((x + 1).t(), on_cpu.view(2, 3), None))


def test_a_conjugate_that_is_left_to_the_reader() -> None:
    def function(z: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z * w, torch.view_as_real(z.resolve_conj()).neg(), z.conj(), (w + 1).conj()

    def make_inputs() -> tuple[torch.Tensor, ...]:
        z = randn(8, 4, dtype=torch.complex64)
        return z.conj(), randn(8, 4, dtype=torch.complex64)

    check_inference(function, make_inputs)
    model = compiled(function)  # the same shapes without the conjugation: another graph
    z, w = make_inputs()
    for x in (z, z.resolve_conj(), z.conj(), z.resolve_conj().conj()) * 3:
        assert_same(model(x, w), function(x, w))
