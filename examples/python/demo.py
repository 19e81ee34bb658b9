"""The demonstration that ``make run`` starts: real models through PyGraph, and the engine at work.

    python -m examples.python.demo [--example PATH]

With a GPU: compiles three models (random weights) with Inductor, Inductor with graphs and PyGraph, and
prints microseconds per call, peak memory and the largest difference from the uncaptured run. Without a
GPU: runs the same models on the CPU through the same backend and estimates how much of them would be in
graphs, then runs the C++ example on the simulated driver (``--example``: the path of the built
example).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import pygraph

Model = Callable[..., Any]
Case = tuple[str, Callable[[], torch.nn.Module], Callable[[str], dict[str, torch.Tensor]]]

_VARIANTS: dict[str, dict[str, Any]] = {
    "Inductor": {},
    "Inductor + graphs": {"mode": "reduce-overhead"},
    "PyGraph": {"backend": "pygraph"},
}
console = Console()


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False)


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=4, use_cache=False))


def _resnet() -> torch.nn.Module:
    import timm

    model: torch.nn.Module = timm.create_model("resnet18")
    return model


def _tokens(device: str) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 30000, (1, 64), device=device)}


def _image(device: str) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(1, 3, 224, 224, device=device)}


_FIRST_CALLS = 24  # compiling, recording, verifying and selecting happen in these

CASES: list[Case] = [
    ("BERT, 4 layers", _bert, _tokens),
    ("GPT-2, 4 layers", _gpt2, _tokens),
    ("ResNet-18", _resnet, _image),
]


def _result(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _us_per_call(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 50 * 1e6)
    return statistics.median(times)


def _measure(
    model: Model, inputs: dict[str, torch.Tensor], expected: torch.Tensor
) -> tuple[str, str, str]:
    torch.cuda.empty_cache()
    for _ in range(_FIRST_CALLS):
        model(**inputs)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = _result(model(**inputs))
    difference = float((result - expected).abs().max())
    us = _us_per_call(lambda: model(**inputs))
    peak = torch.cuda.max_memory_reserved() / 2**20
    return f"{us:.0f}", f"{peak:.0f}", "0" if difference == 0 else f"{difference:.1e}"


def run_on_gpu() -> None:
    """Prints the table of the three variants."""
    table = Table(title=f"{torch.cuda.get_device_name()}, inference, batch 1")
    for column in ("model", "variant", "us per call", "peak MiB", "difference from uncaptured"):
        table.add_column(column)
    with console.status("starting") as status, torch.no_grad():
        for name, build, make_inputs in CASES:
            torch.manual_seed(0)
            module = build().cuda().eval()
            inputs = make_inputs("cuda")
            status.update(f"{name}: the uncaptured result")
            expected = _result(torch.compile(module)(**inputs)).clone()
            for variant, arguments in _VARIANTS.items():
                status.update(f"{name}: {variant}")
                torch._dynamo.reset()
                gc.collect()
                model = torch.compile(module, **arguments)
                table.add_row(name, variant, *_measure(model, inputs, expected))
    console.print(table)
    for row in pygraph.stats():
        console.print(
            f"{row.name}: {row.state} {row.reason}, {row.nodes} nodes, {row.relocations} relocations,"
            f" {row.replays} replays, {row.bytes_not_copied} bytes not copied per call",
            highlight=False,
        )


def run_on_cpu() -> None:
    """Runs the models through the same backend, which is plain Inductor here, and checks them."""
    table = Table(title="No GPU: the same models and backend on the CPU")
    columns = ("model", "seconds to compile", "ms per call", "difference from eager")
    for column in (*columns, "in graphs, if there were a GPU"):
        table.add_column(column)
    with console.status("starting") as status, torch.no_grad():
        for name, build, make_inputs in CASES:
            torch.manual_seed(0)
            module = build().eval()
            inputs = make_inputs("cpu")
            status.update(f"{name}: compiling")
            model = torch.compile(module, backend="pygraph")
            start = time.perf_counter()
            result = _result(model(**inputs))
            compiled = time.perf_counter()
            model(**inputs)
            done = time.perf_counter()
            difference = float((result - _result(module(**inputs))).abs().max())
            status.update(f"{name}: explaining")
            (share,) = pygraph.explain(module, **inputs).shares
            table.add_row(
                name,
                f"{compiled - start:.1f}",
                f"{(done - compiled) * 1e3:.0f}",
                f"{difference:.1e}",
                f"{share.fraction:.0%} of {share.total:.0f} {share.unit}",
            )
            if difference > 1e-3:
                raise SystemExit(f"{name}: the compiled result is wrong by {difference}")
    console.print(table)


def main() -> int:
    """Runs what this machine can; returns the process's exit code."""
    parser = argparse.ArgumentParser(description="PyGraph's main job")
    parser.add_argument("--example", help="the C++ example, to show the engine without a GPU")
    options = parser.parse_args()
    if torch.cuda.is_available():
        run_on_gpu()
        return 0
    run_on_cpu()
    if options.example:
        console.print("\nThe engine on the simulated driver: recorded twice, relocated, replayed\n")
        return subprocess.run([options.example, "--simulated"], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
