"""An operator that hides an address in device memory, so that its graphs have to copy.

    python -m benchmarks.hidden_address

Ten such operators in a row, each on what the last one returned and a parameter. Prints, for inputs of
several sizes, microseconds per call of Inductor, Inductor with graphs and PyGraph: medians of blocks of
calls in turns, with the smallest and the largest; what PyGraph copies, and which variant it selected.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import custom_op

import pygraph

_LAYERS = 10
_ELEMENTS = (1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_ROUNDS, _BLOCK_SECONDS, _WARM_UP = 9, 0.05, 60
_VARIANTS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor+graphs": {"mode": "reduce-overhead"},
    "pygraph": {"backend": "pygraph"},
}


@triton.jit
def address_in(table):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    low = tl.load(table) | (tl.load(table + 1) << 16)
    return low | (tl.load(table + 2) << 32) | (tl.load(table + 3) << 48)


@triton.jit  # type: ignore[untyped-decorator]
def _add(out, x, table, count, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    index = tl.program_id(0) * block + tl.arange(0, block)
    y = address_in(table).to(tl.pointer_type(tl.float32))
    total = tl.load(x + index, mask=index < count) + tl.load(y + index, mask=index < count)
    tl.store(out + index, total, mask=index < count)


def hide(x: torch.Tensor) -> torch.Tensor:
    """Device memory that holds the tensor's address, in four pieces of 16 bits."""
    table = torch.empty(4, dtype=torch.int64, device=x.device)
    for i in range(4):
        table[i : i + 1].fill_((x.data_ptr() >> (16 * i)) & 0xFFFF)
    return table


def add_hidden(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y of contiguous tensors, whose kernel finds y in device memory."""
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 1024),)](out, x, hide(y), x.numel(), 1024)
    return out


hidden_add = custom_op("pygraph_benchmark::hidden_add", add_hidden, mutates_args=())
hidden_add.register_fake(lambda x, y: torch.empty_like(x))


class _Layers(torch.nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        self.biases = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(elements, device="cuda")) for _ in range(_LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for bias in self.biases:
            x = torch.relu(hidden_add(x, bias))
        return x


def _seconds_per_call(model: Callable[..., Any], inputs: list[torch.Tensor], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(calls):
        model(inputs[i % len(inputs)])
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


@torch.no_grad()
def measure(elements: int) -> dict[str, Any]:
    """One row: by variant, microseconds per call as [smallest, median, largest]."""
    torch._dynamo.reset()
    module = _Layers(elements)
    inputs = [torch.randn(elements, device="cuda") for _ in range(4)]
    models = {name: torch.compile(module, **options) for name, options in _VARIANTS.items()}
    results = {}
    for name, model in models.items():
        for _ in range(_WARM_UP):
            results[name] = model(inputs[0]).clone()
    calls = max(5, int(_BLOCK_SECONDS / _seconds_per_call(models["inductor"], inputs, 5)))
    blocks: dict[str, list[float]] = {name: [] for name in models}
    order = list(models)
    for turn in range(_ROUNDS):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            blocks[name].append(1e6 * _seconds_per_call(models[name], inputs, calls))
    row = max(pygraph.stats(), key=lambda row: row.capture_seconds)
    pygraph.reset()
    times = {name: [min(t), statistics.median(t), max(t)] for name, t in blocks.items()}
    return {
        "bytes_per_input": inputs[0].nbytes,
        **{name: [round(us, 1) for us in of] for name, of in times.items()},
        "state": row.state,
        "reason": row.reason,
        "bytes_copied": row.bytes_copied,
        "fixed_bytes": row.fixed_bytes,
        "equal": all(torch.equal(result, results["inductor"]) for result in results.values()),
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    torch._dynamo.config.recompile_limit = 8 * len(_VARIANTS)
    for elements in _ELEMENTS:
        print(json.dumps(measure(elements)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
