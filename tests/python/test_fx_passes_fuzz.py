"""Random programs that mix the CPU and the GPU: a transformed program does the same.

The programs are traced on a fake GPU, with and without the transformations; then the graph's GPU
becomes the CPU, every copy between the two a clone, and both run. Compared are results, written
inputs, which results share memory with which others and with inputs, and a second call after the
caller has written to all results of the first. (That every device computes the same bits is the
business of ``pygraph.fx_passes.cpu_values``.)

PYGRAPH_FUZZ_SEEDS="first:last" runs other programs than CI does.
"""

from __future__ import annotations

import os
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
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from pygraph.fx_passes.graph_pass import GraphPass
from pygraph.options import TRANSFORMS

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
_KINDS = ["arange", "constant", "cpu", "to_gpu", "to_cpu", "scale", "gpu", "join"]
_KINDS += ["write_gpu", "write_cpu", "view_gpu", "view_cpu", "assert", "declared", "secret"]


def _make_steps(seed: int, count: int = 16) -> list[Step]:
    """Random steps that fit together: "gpu" and "cpu" pools grow as the program goes."""
    choose = random.Random(seed)
    on_gpu, on_cpu, scalars = 2, 2, [0, 1]  # sizes of the pools; positions of 0-d values on the CPU
    steps: list[Step] = []
    for _ in range(count):
        what = choose.choice(_KINDS)
        if what in ("arange", "constant"):
            steps.append((what, choose.randrange(1, 5), 0))
            on_cpu += 1
        elif what in ("cpu", "view_cpu"):
            position = choose.randrange(on_cpu)
            steps.append((what, position, choose.randrange(len(_UNARY))))
            if position in scalars:
                scalars.append(on_cpu)
            on_cpu += 1
        elif what == "to_cpu":
            steps.append((what, choose.randrange(on_gpu), 0))
            on_cpu += 1
        elif what in ("write_gpu", "assert", "declared"):
            steps.append((what, choose.randrange(on_gpu), choose.randrange(1, 4)))
        elif what == "write_cpu":
            steps.append((what, choose.randrange(on_cpu), choose.randrange(1, 4)))
        else:
            first = choose.randrange(on_cpu if what == "to_gpu" else on_gpu)
            second = 0
            if what == "scale":
                second = choose.choice(scalars)
            elif what not in ("to_gpu", "view_gpu", "secret"):
                second = choose.randrange(len(_UNARY) if what == "gpu" else on_gpu)
            steps.append((what, first, second))
            on_gpu += 1
    return steps


def _write(tensor: torch.Tensor, number: int) -> None:
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.add_(number)


_library = torch.library.Library("pygraph_fuzz", "DEF")
_library.define("declared(Tensor(a!) x, int number) -> ()")
_library.define("secret(Tensor x) -> Tensor")  # writes x, too


def _declared(x: torch.Tensor, number: int) -> None:
    _write(x, number)


def _secret(x: torch.Tensor) -> torch.Tensor:
    before = x.clone()
    _write(x, 5)
    return before


_library.impl("declared", _declared, "CPU")
_library.impl("secret", _secret, "CPU")
torch.library.register_fake("pygraph_fuzz::declared", lambda x, number: None, lib=_library)
torch.library.register_fake("pygraph_fuzz::secret", lambda x: torch.empty_like(x), lib=_library)


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
            elif what == "write_gpu":
                _write(on_gpu[a], b)
            elif what == "write_cpu":
                _write(on_cpu[a], b)
            elif what == "view_gpu":
                on_gpu.append(on_gpu[a].view(on_gpu[a].shape))
            elif what == "view_cpu":
                on_cpu.append(on_cpu[a].expand(on_cpu[a].shape))
            elif what == "declared":
                torch.ops.pygraph_fuzz.declared(on_gpu[a], b)
            elif what == "secret":
                on_gpu.append(torch.ops.pygraph_fuzz.secret(on_gpu[a]))
            elif what == "assert":
                torch.ops.aten._assert_async.msg((on_gpu[a] == on_gpu[a]).all(), "a NaN")
            else:
                on_gpu.append(_BINARY[(a + b) % len(_BINARY)](on_gpu[a], on_gpu[b]))
        return (*on_gpu[-4:], *on_cpu[-4:])

    return program


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(SIZE, generator=generator) for _ in range(2))
    return [x, y, torch.tensor(1.5), torch.tensor(3)]


def _on_the_cpu(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """The graph with its GPU replaced by the CPU, and copies between the two by clones."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        if node.target is torch.ops.prims.device_put.default:
            node.target, node.args, node.kwargs = torch.ops.aten.clone.default, node.args[:1], {}
        node.args, node.kwargs = pytree.tree_map_only(
            torch.device, lambda device: CPU, (node.args, node.kwargs)
        )
    return fx.GraphModule(gm, copy).cpu()  # constants, too, where there is a GPU


class Compiled:
    """A backend that runs on the CPU afterwards what AOTAutograd traced, transformed or not."""

    def __init__(self, mode: FakeTensorMode, transforms: bool) -> None:
        self._mode = mode
        self._transforms = transforms
        self.graphs: list[fx.Graph] = []
        self.calls: list[tuple[list[str], Callable[..., Any]]] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        aot = aot_autograd(
            inference_compiler=self._compile,
            fw_compiler=self._compile,
            keep_inference_input_mutations=True,  # as Inductor has it
        )
        compiled = aot(gm, inputs)
        self.calls.append((names, compiled))
        return compiled

    def _compile(self, gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        if self._transforms:
            GraphPass(frozenset(TRANSFORMS)).transform(gm.graph)
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


def _compile(seed: int, transforms: bool) -> Compiled:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    backend = Compiled(mode, transforms)
    with mode, torch.no_grad():
        fake = [mode.from_tensor(t) for t in _inputs()]
        torch._dynamo.reset()
        torch.compile(_make_program(seed), backend=backend)(
            *(t.to("cuda") for t in fake[:2]), *fake[2:]
        )
    return backend


def _trace(seed: int, transforms: bool) -> fx.GraphModule:
    """As traced, which leaves operators in place that AOTAutograd would make functional. Inductor's
    graphs have some of both."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        x, y, scalar, other = (mode.from_tensor(t) for t in _inputs())
        gm = make_fx(_make_program(seed))(x.to("cuda"), y.to("cuda"), scalar, other)
    output = gm.graph.find_nodes(op="output")[0]
    # A returned input is AOTAutograd's business.
    output.args = ([node for node in output.args[0] if node.op != "placeholder"],)
    if transforms:
        GraphPass(frozenset(TRANSFORMS)).transform(gm.graph)
    return _on_the_cpu(gm, gm.graph)


def _behaviour(names: list[str], compiled: Callable[..., Any]) -> list[Any]:
    """What two calls do, with a write to each of the first one's results in between."""
    seen: list[Any] = []
    for _ in range(2):
        inputs = dict(zip(("l_x_", "l_y_", "l_scalar_", "l_other_"), _inputs(), strict=True))
        with torch.no_grad():
            results = [r for r in compiled(*(inputs[name] for name in names)) if r is not None]
        tensors = [*results, *inputs.values()]
        seen.append([t.clone() for t in tensors])
        storages = [t.untyped_storage().data_ptr() for t in tensors]
        seen.append([[a == b for a in storages] for b in storages])
        for result in results:
            _write(result, 100)
        seen.append([t.clone() for t in tensors])
    return seen


def _assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and actual.stride() == expected.stride()
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            _assert_same(a, b)
    else:
        assert actual == expected


def _effects(graph: fx.Graph) -> int:
    return sum("assert" in str(node.target) for node in graph.nodes)


_FIRST, _LAST = map(int, os.environ.get("PYGRAPH_FUZZ_SEEDS", "0:80").split(":"))
_FOUND = [1750, 5094]  # programs that were once transformed to something else


@pytest.mark.parametrize("seed", [*_FOUND, *range(_FIRST, _LAST)])
def test_a_transformed_program_that_writes_in_its_middle_does_the_same(seed: int) -> None:
    names = ["l_x_", "l_y_", "l_scalar_", "l_other_"]
    transformed, original = _trace(seed, True), _trace(seed, False)
    _assert_same(_behaviour(names, transformed), _behaviour(names, original))
    assert _effects(transformed.graph) == _effects(original.graph)


@pytest.mark.parametrize("seed", range(_FIRST, _LAST))
def test_a_transformed_program_does_the_same(seed: int) -> None:
    transformed, original = _compile(seed, True), _compile(seed, False)
    assert transformed.calls
    for ours, theirs in zip(transformed.calls, original.calls, strict=True):
        _assert_same(_behaviour(*ours), _behaviour(*theirs))
    for graph, other in zip(transformed.graphs, original.graphs, strict=True):
        assert _effects(graph) == _effects(other)
