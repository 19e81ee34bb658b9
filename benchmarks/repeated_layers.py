"""Equal layers that are compiled one by one, so that one compilation serves all of them.

    python -m benchmarks.repeated_layers

A decoder of 24 equal layers, as a whole and layer by layer, with Inductor, Inductor with graphs and
PyGraph. For each, prints the seconds until it has been called 30 times, from empty caches; the
microseconds per call (medians of alternating blocks of calls, with the smallest and the largest); and
the MiB of device memory that it added.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch._inductor.utils import clear_caches

import pygraph
from benchmarks.device_memory import device_mib

_LAYERS, _WIDTH, _HEADS, _TOKENS = 24, 1024, 16, 64
_ROUNDS, _CALLS, _WARM_UP = 9, 20, 30
_BACKENDS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor+graphs": {"mode": "reduce-overhead"},
    "pygraph": {"backend": "pygraph"},
}


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(_WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.up = torch.nn.Linear(_WIDTH, 8 * _WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(gate) * value)
        return result


class _Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Model:
    """One way to run the decoder, compiled and warmed up."""

    def __init__(self, decoder: _Decoder, backend: str, by_layer: bool) -> None:
        self.name = f"{backend}, {'layer by layer' if by_layer else 'as a whole'}"
        self.blocks: list[float] = []  # microseconds per call
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp()
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        clear_caches()
        gc.collect()
        torch.cuda.empty_cache()
        before = device_mib()
        graphs_before = _graphs()
        self._decoder = copy.deepcopy(decoder)
        start = time.perf_counter()
        for module in self._decoder.layers if by_layer else [self._decoder]:
            module.compile(**_BACKENDS[backend])
        for _ in range(_WARM_UP):
            self(_input())
        torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self.mib = device_mib() - before
        self.graphs = _graphs() - graphs_before

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        result: torch.Tensor = self._decoder(x)
        return result

    def time_block(self, inputs: list[torch.Tensor]) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(_CALLS):
            self(inputs[i % len(inputs)])
        torch.cuda.synchronize()
        self.blocks.append((time.perf_counter() - start) / _CALLS * 1e6)


def _graphs() -> int:
    return sum(row.state == "captured" for row in pygraph.stats())


def _input() -> torch.Tensor:
    return torch.randn(1, _TOKENS, _WIDTH, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def main() -> int:
    if not torch.cuda.is_available():
        print("the benchmarks need an NVIDIA GPU", file=sys.stderr)
        return 1
    torch._dynamo.config.recompile_limit = 8 * len(_BACKENDS)
    torch.manual_seed(0)
    decoder = _Decoder().cuda().bfloat16()
    inputs = [_input() for _ in range(4)]
    expected = decoder(inputs[0]).float()
    models = [_Model(decoder, backend, by) for by in (False, True) for backend in _BACKENDS]
    for turn in range(_ROUNDS):
        first = turn % len(models)
        for model in models[first:] + models[:first]:
            model.time_block(inputs)
    for model in models:
        difference = (model(inputs[0]).float() - expected).abs().max() / expected.abs().max()
        row = {
            "model": model.name,
            "seconds": round(model.seconds, 1),
            "us": [round(of(model.blocks)) for of in (min, statistics.median, max)],
            "mib": round(model.mib),
            "graphs": model.graphs,
            "rel_err": float(difference),
        }
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
