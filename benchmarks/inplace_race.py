"""Cost of barriers in Inductor's kernels, and of other remedies (docs/explanation/inductor-race.md).

Programs whose kernels overwrite what they read, each compiled three times: by plain Inductor, with
barriers, and without in-place buffers (which leaves inputs that a program writes unprotected). The
variants' graphs replay alternately; medians of GPU time per replay, and ratios to plain Inductor.

    python -m benchmarks.inplace_race
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config

from pygraph.compile import barriers

_ROUNDS, _REPLAYS = 15, 40

Graph = tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]  # and what it works on
Program = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]


def bias_gradient(a: torch.Tensor, b: torch.Tensor, saved: torch.Tensor) -> Any:
    masked = (a @ b) * (saved > 0)
    return masked, masked.sum(0)


def norm_backward(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    g = (a @ b) * weight
    return g - x * (g * x).mean(1, keepdim=True)


def softmax_backward(a: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> Any:
    g = (a @ b) * p
    return g - p * g.sum(1, keepdim=True)


def activation(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.nn.functional.gelu(a @ b)


def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def _with_product(rows: int, columns: int, *more: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return ((rows, 8), (8, columns), *more)


_HALF, _SINGLE = torch.bfloat16, torch.float32
PROGRAMS: dict[str, Program] = {
    f"{function.__name__} {rows} x {columns} {str(dtype)[6:]}": (
        function,
        _with_product(rows, columns, *([(rows, columns)] * (function is not activation)), *more),
        dtype,
    )
    for function, more_of in (
        (bias_gradient, lambda columns: ()),
        (softmax_backward, lambda columns: ()),
        (norm_backward, lambda columns: ((columns,),)),
        (activation, lambda columns: ()),
    )
    for rows, columns in ((64, 4096), (512, 1024), (4096, 768), (8192, 4096), (1024, 32768))
    for more in (more_of(columns),)
    for dtype in (_HALF, _SINGLE)
}
PROGRAMS |= {
    f"update {size}": (update, ((size,),) * 4, _SINGLE) for size in (1 << 14, 1 << 20, 1 << 26)
}


def _settings() -> dict[str, Callable[[], contextlib.AbstractContextManager[Any]]]:
    return {
        "Inductor": contextlib.nullcontext,
        "barriers": barriers.in_generated_kernels,
        "not in place": lambda: inductor_config.patch(inplace_buffers=False),
    }


def _captured(program: Program, setting: contextlib.AbstractContextManager[Any]) -> Graph:
    function, sizes, dtype = program
    args = [torch.rand(size, device="cuda", dtype=dtype) for size in sizes]
    torch._dynamo.reset()
    with setting, inductor_config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(function)
        for _ in range(3):
            compiled(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_REPLAYS):
                compiled(*args)
    return graph, args


def _microseconds(graph: Graph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph[0].replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / _REPLAYS


def _measure(graphs: Sequence[Graph]) -> list[float]:
    for graph in graphs:
        _microseconds(graph)
    rounds = [[_microseconds(graph) for graph in graphs] for _ in range(_ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; us per call, and ratios")
    settings = _settings()
    ratios: dict[str, list[float]] = {name: [] for name in settings}
    for name, program in PROGRAMS.items():
        times = _measure([_captured(program, make()) for make in settings.values()])
        print(f"{name:45}" + "".join(f"{t:10.2f} ({t / times[0]:.3f})" for t in times), flush=True)
        for setting, time in zip(settings, times, strict=True):
            ratios[setting].append(time / times[0])
    for setting, values in ratios.items():
        print(
            f"{setting}: geometric mean {statistics.geometric_mean(values):.4f}, most {max(values):.3f}"
        )


if __name__ == "__main__":
    main()
