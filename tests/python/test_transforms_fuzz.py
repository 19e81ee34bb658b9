"""Random programs that mix the CPU and the GPU: a transformed program computes the same bits.

The programs are traced on a fake GPU and transformed; then the graph's GPU becomes the CPU, and its
results are compared with the program's own. (That every device computes the same bits is the business
of ``pygraph.transforms.values``; here it is whether values end up in the right places.)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pygraph.transforms.graph_pass import GraphPass
from pygraph.transforms.names import TRANSFORMS
from pygraph.transforms.rewrite import is_on_cpu, is_on_gpu

CPU = torch.device("cpu")
SIZE = 4
_UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t + 1,
    lambda t: t * 2,
    lambda t: t * -1,
    lambda t: t.clamp(min=0),
    lambda t: t.float().sin(),
    lambda t: t.to(torch.int64),
    lambda t: t.flip(0) if t.dim() else t,
    lambda t: t[:2].repeat(2) if t.dim() else t,
    lambda t: t > 0,
]
_BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: torch.where(a > b, a.float(), b.float()),
    lambda a, b: torch.maximum(a.float(), b.float()),
]


Step = tuple[str, int, int]  # what, and two positions or numbers


def _make_steps(seed: int, count: int = 14) -> list[Step]:
    """Random steps that fit together: "gpu" and "cpu" pools grow as the program goes."""
    choose = random.Random(seed)
    on_gpu, on_cpu, scalars = 2, 2, [0, 1]  # sizes of the pools; positions of 0-d values on the CPU
    steps: list[Step] = []
    for _ in range(count):
        what = choose.choice(["arange", "constant", "cpu", "to_gpu", "to_cpu", "scale", "gpu", "join"])
        if what in ("arange", "constant"):
            steps.append((what, choose.randrange(1, 5), 0))
            on_cpu += 1
        elif what == "cpu":
            position = choose.randrange(on_cpu)
            steps.append((what, position, choose.randrange(len(_UNARY))))
            if position in scalars:
                scalars.append(on_cpu)
            on_cpu += 1
        elif what == "to_cpu":
            steps.append((what, choose.randrange(on_gpu), 0))
            on_cpu += 1
        else:
            first = choose.randrange(on_cpu if what == "to_gpu" else on_gpu)
            second = 0
            if what == "scale":
                second = choose.choice(scalars)
            elif what != "to_gpu":
                second = choose.randrange(len(_UNARY) if what == "gpu" else on_gpu)
            steps.append((what, first, second))
            on_gpu += 1
    return steps


def _make_program(seed: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    steps = _make_steps(seed)

    def program(
        x: torch.Tensor, y: torch.Tensor, scalar: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        on_gpu, on_cpu = [x, y], [scalar, other]
        for what, a, b in steps:
            if what == "arange":
                on_cpu.append(torch.arange(SIZE) * a)
            elif what == "constant":
                on_cpu.append(torch.tensor([1.0, 2.0, 3.0, float(a)]))
            elif what == "cpu":
                on_cpu.append(_UNARY[b](on_cpu[a]))
            elif what == "to_gpu":
                on_gpu.append(on_cpu[a].to(x.device))
            elif what == "to_cpu":
                on_cpu.append(on_gpu[a].cpu())
            elif what == "scale":
                on_gpu.append(on_gpu[a] * on_cpu[b])
            elif what == "gpu":
                on_gpu.append(_UNARY[b](on_gpu[a]))
            else:
                on_gpu.append(_BINARY[(a + b) % len(_BINARY)](on_gpu[a], on_gpu[b]))
        return (*on_gpu[-4:], *on_cpu[-4:])

    return program


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(SIZE, generator=generator) for _ in range(2))
    return [x, y, torch.tensor(1.5), torch.tensor(3)]


def _on_the_cpu(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """The graph with its GPU replaced by the CPU."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda device: CPU, (node.args, node.kwargs)
        )
    return fx.GraphModule(gm, copy).cpu()  # constants, too, where there is a GPU


class Compiled:
    """A backend that transforms what AOTAutograd traced, and runs both on the CPU afterwards."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self.graphs: list[fx.Graph] = []
        self.calls: list[tuple[list[str], Callable[..., Any], Callable[..., Any]]] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        aot = aot_autograd(inference_compiler=self._compile, fw_compiler=self._compile)
        compiled = aot(gm, inputs)
        self.calls.append((names, compiled, _on_the_cpu(gm, gm.graph)))
        return compiled

    def _compile(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        GraphPass(frozenset(TRANSFORMS), frozenset()).transform(gm.graph)
        self.graphs.append(gm.graph)
        on_the_cpu = _on_the_cpu(gm, gm.graph)
        (output,) = gm.graph.find_nodes(op="output")
        values = [node.meta["val"] for node in output.args[0]]

        def run(*args: torch.Tensor) -> list[torch.Tensor]:
            if not any(isinstance(arg, FakeTensor) for arg in args):
                return list(on_the_cpu(*args))
            with self._mode:
                return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in values]

        return make_boxed_func(run)


@pytest.mark.parametrize("seed", range(80))
def test_a_transformed_program_computes_the_same(seed: int) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    backend = Compiled(mode)
    inputs = _inputs()
    with mode, torch.no_grad():
        fake = [mode.from_tensor(t) for t in inputs]
        torch._dynamo.reset()
        torch.compile(_make_program(seed), backend=backend)(
            *(t.to("cuda") for t in fake[:2]), *fake[2:]
        )
    by_name = dict(zip(("l_x_", "l_y_", "l_scalar_", "l_other_"), inputs, strict=True))
    assert backend.calls
    for names, compiled, original in backend.calls:
        args = [by_name[name] for name in names]
        with torch.no_grad():
            expected, actual = original(*args), compiled(*args)
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
    for graph in backend.graphs:
        for node in graph.nodes:
            if is_on_gpu(node) and node.op == "call_function" and "pygraph." not in str(node.target):
                assert not any(is_on_cpu(operand) for operand in node.all_input_nodes)
