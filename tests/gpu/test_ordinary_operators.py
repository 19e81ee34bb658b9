"""PyTorch's own operators are recorded and linked: none is refused because of an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pygraph.record import recorder

from .support import randn

aten = torch.ops.aten
Case = tuple[Callable[[list[Any]], list[Any]], Callable[[], list[Any]]]


def _half(*size: int) -> torch.Tensor:
    return randn(*size, dtype=torch.bfloat16)


def _integers(high: int, *size: int) -> torch.Tensor:
    return torch.randint(1, high, size, device="cuda")


def _qkv() -> list[torch.Tensor]:
    return [_half(2, 8, 256, 64) for _ in range(3)]


def _statistics() -> list[torch.Tensor]:
    return [randn(8, 64, 8, 8), randn(64), randn(64), randn(64), randn(64).abs()]


def _attention(backend: Any, dropout: float) -> Callable[[list[Any]], list[Any]]:
    def run(args: list[Any]) -> list[Any]:
        with torch.nn.attention.sdpa_kernel(backend):
            return [F.scaled_dot_product_attention(*args, dropout_p=dropout)]

    return run


def _lstm(args: list[Any]) -> list[Any]:
    x, h, c, *weights = args
    return list(aten.lstm.input(x, [h, c], weights, True, 2, 0.0, False, False, False))


def _lstm_arguments() -> list[Any]:
    weights = [p.detach() for p in torch.nn.LSTM(64, 64, 2).cuda().parameters()]
    return [randn(16, 4, 64), randn(2, 4, 64), randn(2, 4, 64), *weights]


def _foreach(args: list[Any]) -> list[Any]:
    results = list(torch._foreach_mul(args, 2.0))
    torch._foreach_add_(results, args)
    return results


def _convolution_backward(args: list[Any]) -> list[Any]:
    sizes = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return list(aten.convolution_backward(*args, [64], *sizes, [True, True, True]))


_BACKENDS = torch.nn.attention.SDPBackend
CASES: dict[str, Case] = {
    "mm": (lambda a: [a[0] @ a[1]], lambda: [randn(64, 64), randn(64, 64)]),
    "mm in bfloat16": (lambda a: [a[0] @ a[1]], lambda: [_half(512, 512), _half(512, 512)]),
    "mm, split": (lambda a: [a[0] @ a[1]], lambda: [_half(64, 16384), _half(16384, 64)]),
    "addmm": (lambda a: [torch.addmm(*a)], lambda: [randn(64), randn(64, 64), randn(64, 64)]),
    "bmm": (lambda a: [torch.bmm(*a)], lambda: [_half(8, 64, 64), _half(8, 64, 64)]),
    "convolution": (
        lambda a: [F.conv2d(*a, padding=1)],
        lambda: [randn(8, 64, 32, 32), randn(64, 64, 3, 3)],
    ),
    "convolution_backward": (
        _convolution_backward,
        lambda: [randn(8, 64, 32, 32), randn(8, 64, 32, 32), randn(64, 64, 3, 3)],
    ),
    "layer_norm": (
        lambda a: list(aten.native_layer_norm(a[0], [64], a[1], a[2], 1e-5)),
        lambda: [randn(64, 64), randn(64), randn(64)],
    ),
    "batch_norm": (lambda a: list(aten.native_batch_norm(*a, True, 0.1, 1e-5)), _statistics),
    "cudnn_batch_norm": (lambda a: list(aten.cudnn_batch_norm(*a, True, 0.1, 1e-5)), _statistics),
    "embedding_backward": (
        lambda a: [aten.embedding_dense_backward(a[0], a[1], 100, -1, False)],
        lambda: [randn(8192, 32), _integers(100, 8192)],
    ),
    "sort": (lambda a: list(torch.sort(a[0])), lambda: [randn(64, 5000)]),
    "sort, long": (lambda a: list(torch.sort(a[0])), lambda: [randn(1 << 20)]),
    "topk": (lambda a: list(torch.topk(a[0], 5)), lambda: [randn(64, 5000)]),
    "cumsum": (lambda a: [torch.cumsum(a[0], 0)], lambda: [_integers(8, 1 << 20).float()]),
    "sum": (lambda a: [a[0].sum()], lambda: [randn(1 << 22)]),
    "index_put": (
        lambda a: [aten.index_put(a[0], [a[1]], a[2], True)],
        lambda: [randn(100, 32), _integers(100, 64), randn(64, 32)],
    ),
    "scatter_add": (
        lambda a: [a[0].scatter_add(0, a[1], a[2])],
        lambda: [randn(100), _integers(100, 64), randn(64)],
    ),
    "lstm": (_lstm, _lstm_arguments),
    "foreach": (_foreach, lambda: [randn(64 + i) for i in range(200)]),
    "a strided copy": (
        lambda a: [a[0].permute(3, 1, 0, 2).contiguous()],
        lambda: [randn(8, 9, 10, 11)],
    ),
    "cat": (lambda a: [torch.cat(a)], lambda: [randn(10 + i, 8) for i in range(20)]),
    "max_pool": (
        lambda a: list(aten.max_pool2d_with_indices(a[0], [3, 3], [2, 2])),
        lambda: [randn(2, 8, 32, 32)],
    ),
    "softmax": (lambda a: [torch.softmax(a[0], -1)], lambda: [randn(64, 5000)]),
    "interpolate": (
        lambda a: [F.interpolate(a[0], scale_factor=2, mode="bilinear")],
        lambda: [randn(2, 8, 32, 32)],
    ),
    "attention, flash": (_attention(_BACKENDS.FLASH_ATTENTION, 0.0), _qkv),
    "attention, efficient": (_attention(_BACKENDS.EFFICIENT_ATTENTION, 0.0), _qkv),
    "attention, cuDNN": (_attention(_BACKENDS.CUDNN_ATTENTION, 0.0), _qkv),
    "attention, math": (_attention(_BACKENDS.MATH, 0.0), _qkv),
    "attention with dropout": (_attention(_BACKENDS.FLASH_ATTENTION, 0.1), _qkv),
    "dropout": (lambda a: list(torch.native_dropout(a[0], 0.5, True)), lambda: [randn(1 << 16)]),
}
_DRAWING = {"attention with dropout", "dropout"}
_USING_A_LIBRARYS_MEMORY = {"cudnn_batch_norm"}


@pytest.mark.parametrize("name", CASES)
def test_an_ordinary_operator_is_not_refused(name: str) -> None:
    function, make = CASES[name]

    def run(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        return list(function(given))

    with torch.no_grad():
        for _ in range(2):
            run(make())  # loads kernels, makes handles
        draws = name in _DRAWING
        recording = recorder.record(
            recorder.Request(run, make(), device=0, draws=draws, capacity=64 << 30)
        )
        args = make()
        torch.manual_seed(1)
        expected = run(list(args))
        torch.manual_seed(1)
        actual = recording.graph.replay(list(args), True)
    torch.testing.assert_close(list(actual), expected)
    if name not in _USING_A_LIBRARYS_MEMORY:
        assert recording.graph.foreign_memory == [], "memory that is asked for before each replay"
