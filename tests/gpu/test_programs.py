"""Programs of many kinds, each run under Inductor and under PyGraph from equal seeds: equal results."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pygraph
from pygraph.runtime import pytorch_release

from .support import also_as_shipped, assert_used, calls, captured, randn

Compile = Callable[..., Any]
Program = Callable[[Compile], list[torch.Tensor]]

_WIDTH = 32


def _layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)
    ).cuda()


def _run(program: Program, backend: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return program(lambda function, **options: torch.compile(function, backend=backend, **options))


def _check(program: Program, graphs: int | None = 1) -> None:
    """graphs: at least so many must have been captured in the end, and none refused. None: any."""
    expected = [tensor.detach().clone() for tensor in _run(program, "inductor")]
    results = _run(program, "pygraph")
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result.detach(), wanted, rtol=1e-5, atol=1e-6)
    if graphs is not None:
        assert_used(graphs)


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@also_as_shipped
def test_inference_mode_with_a_buffer_that_is_written() -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers()
            self.register_buffer("count", torch.zeros(4, device="cuda"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return self.layers(x) + self.count.sum()

    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(Counting())
        with torch.inference_mode():
            results = [model(randn(8, _WIDTH)).clone() for _ in range(calls(6))]
        with torch.no_grad():
            return [*results, model(randn(8, _WIDTH))]

    _check(program)


@also_as_shipped
def test_gradients_of_each_sample() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        module = _layers()
        parameters = dict(module.named_parameters())

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (torch.func.functional_call(module, weights, (x,)) - y).square().mean()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        model = compile(lambda x, y: tuple(each(parameters, x, y).values()))
        return [g for _ in range(calls(5)) for g in model(randn(4, _WIDTH), randn(4, _WIDTH))]

    _check(program)


@also_as_shipped
def test_a_subclass_of_two_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(lambda x, y: (x * y + 1).relu())
        results = [model(TwoTensor(randn(8, 8), randn(8, 8)), randn(8, 8)) for _ in range(calls(5))]
        return [part for result in results for part in (result.a, result.b)]

    _check(program)


def test_nested_tensors_of_varying_lengths() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        layers = _layers()
        model = compile(lambda x: layers(x).relu())
        results = []
        with torch.no_grad():
            for i in range(calls(6)):
                rows = [torch.randn(3 + i % 2, _WIDTH), torch.randn(5, _WIDTH)]
                nested = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda")
                results.append(model(nested).values())
        return results

    _check(program, graphs=None)  # lengths are arguments of a kind that graphs may refuse


def test_a_mixture_of_experts() -> None:
    def mixture(x: torch.Tensor, expert: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        counts = torch.histc(expert.float(), bins=4, min=0, max=3)
        ends = counts.cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[expert.argsort()], weights, offs=ends).relu()

    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(mixture)
        weights = randn(4, 64, 64, dtype=torch.bfloat16)
        return [
            model(
                randn(128, 64, dtype=torch.bfloat16),
                torch.randint(0, 4, (128,), device="cuda"),
                weights,
            )
            for _ in range(calls(6))
        ]

    _check(program)
    assert len(captured()) == 1, "nothing of it waits for the GPU"


def test_numbers_of_eight_bits() -> None:
    def quantized(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch._int_mm((x / scale).round().to(torch.int8), weights).float() * scale

    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(quantized)
        weights = torch.randint(-9, 9, (64, 32), device="cuda", dtype=torch.int8)
        return [model(randn(32, 64), weights) for _ in range(calls(5))]

    _check(program)


@pytest.mark.skipif(pytorch_release() == "2.12", reason="plain Inductor's results are wrong")
@also_as_shipped
def test_a_second_stream_inside() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        side, layers = torch.cuda.Stream(), _layers()

        def function(x: torch.Tensor) -> torch.Tensor:
            y = layers(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                z = x * 2 + 1
            torch.cuda.current_stream().wait_stream(side)
            return y + z

        model = compile(function)
        with torch.no_grad():
            return [model(randn(8, _WIDTH)) for _ in range(calls(6))]

    if importlib.util.find_spec("torch._inductor.stream_utils") is None:
        _check(program)
    else:  # the compiled code itself works on the program's streams
        _check(program, graphs=None)
        assert pygraph.stats() == []


@also_as_shipped
def test_weights_that_wait_in_host_memory() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        layers, weights = _layers(), torch.randn(_WIDTH, _WIDTH).pin_memory()
        model = compile(lambda x: layers(x) @ weights.to(x.device, non_blocking=True))
        results = []
        with torch.no_grad():
            for _ in range(calls(6)):
                weights.add_(1)
                results.append(model(randn(4, _WIDTH)))
                torch.cuda.synchronize()  # before the host writes to what the copy reads
        return results

    _check(program)


@also_as_shipped
def test_a_model_that_is_copied_loaded_and_converted() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        module = _layers()
        model = compile(module)
        with torch.no_grad():
            results = [model(randn(4, _WIDTH)) for _ in range(calls(3))]
            twin = copy.deepcopy(model)
            doubled = {name: value * 2 for name, value in module.state_dict().items()}
            module.load_state_dict(doubled, assign=True)
            for _ in range(calls(3)):
                results += [model(randn(4, _WIDTH)), twin(randn(4, _WIDTH))]
            module.to(torch.bfloat16)
            return results + [model(randn(4, _WIDTH).bfloat16()).float() for _ in range(3)]

    _check(program, graphs=2)


def test_batches_that_are_empty_now_and_then() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(_layers())
        with torch.no_grad():
            return [model(randn(rows, _WIDTH)) for rows in (4, 4, 0, 4, 0, 0, 1, 1, 1)]

    _check(program)


def test_five_hundred_inputs() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        model = compile(lambda *tensors: torch._foreach_mul(list(tensors), 2.0))
        return [y for _ in range(calls(4)) for y in model(*[randn(8) for _ in range(500)])]

    _check(program)


@also_as_shipped
@pytest.mark.parametrize("mode", ["anomaly", "save on cpu", "deterministic"])
def test_training_in_modes_that_change_autograd(mode: str) -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        module = nn.Sequential(nn.Embedding(50, _WIDTH), _layers()).cuda()
        model = compile(module)
        results = []
        for _ in range(calls(5)):
            module.zero_grad()
            index = torch.randint(0, 50, (64,), device="cuda")
            if mode == "anomaly":
                with torch.autograd.detect_anomaly():  # type: ignore[no-untyped-call]
                    model(index).square().mean().backward()
            elif mode == "save on cpu":
                with torch.autograd.graph.save_on_cpu(pin_memory=True):
                    model(index).square().mean().backward()
            else:
                model(index).square().mean().backward()
            results += _gradients(module)
        return results

    torch.use_deterministic_algorithms(mode == "deterministic")
    try:
        _check(program, graphs=2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_whole_step_with_its_optimizer() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        module = _layers()
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = torch.optim.AdamW(module.parameters(), lr=rate, capturable=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = (module(x) - y).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        model = compile(step)
        losses = [model(randn(8, _WIDTH), randn(8, _WIDTH)).detach() for _ in range(8)]
        return losses + list(module.parameters())

    _check(program, graphs=3)


@also_as_shipped
def test_weights_that_are_computed_and_a_state_that_is_iterated() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        parametrizations = nn.utils.parametrizations
        module = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(_WIDTH, _WIDTH)),
            nn.ReLU(),
            parametrizations.weight_norm(nn.Linear(_WIDTH, _WIDTH)),
        ).cuda()
        model = compile(module)
        results = []
        for _ in range(calls(5)):
            module.zero_grad()
            model(randn(8, _WIDTH)).square().mean().backward()
            results += _gradients(module)
        return results

    _check(program, graphs=2)


@also_as_shipped
def test_one_module_in_two_compiled_ones() -> None:
    def program(compile: Compile) -> list[torch.Tensor]:
        module = _layers()
        first, second = compile(module), compile(nn.Sequential(module, nn.ReLU()))
        results = []
        for _ in range(calls(6)):
            module.zero_grad()
            (first(randn(4, _WIDTH)).mean() + second(randn(4, _WIDTH)).mean()).backward()
            results += _gradients(module)
        return results

    _check(program, graphs=4)


@also_as_shipped
def test_attention_with_a_mask_in_training() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q, k, v = self.inputs(x).view(2, -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def program(compile: Compile) -> list[torch.Tensor]:
        module = Attention().cuda()
        model = compile(module)
        results = []
        for _ in range(calls(5)):
            module.zero_grad()
            mask = torch.rand(2, 1, 24, 24, device="cuda") > 0.2
            model(randn(2, 24, 64), mask).square().mean().backward()
            results += _gradients(module)
        return results

    _check(program, graphs=2)
