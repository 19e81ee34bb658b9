"""What the CPU computes with stays on the CPU, also in the pass of Inductor's that runs next."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.source import ConstantSource
from torch._inductor.fx_passes import post_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pygraph.fx_passes.fx_nodes import is_on_cpu
from pygraph.fx_passes.graph_pass import GraphPass
from pygraph.fx_passes.sink_cpu_outputs import keep_cpu_values
from pygraph.options import TRANSFORMS

from .test_fx_passes import SCALAR, X, _calls, _graph, _mixes_devices, _trace


def test_a_scalar_that_the_cpu_computes_with_stays_there() -> None:
    """PyTorch 2.11 would move it to the GPU, and the CPU's operation with it."""
    graph = _graph(_trace(lambda x, s: x * (s * 0.5).exp(), X, SCALAR))
    (scalar,) = [node for node in graph.find_nodes(op="placeholder") if is_on_cpu(node)]
    assert all("pygraph" in str(user.target) for user in scalar.users)


def test_a_returned_constant_stays_on_the_cpu() -> None:
    graph = _graph(_trace(lambda x: (x + 1, torch.arange(4)), X))
    assert _moved_by_inductor(graph) == []


def test_what_the_cpu_computes_of_sizes_and_constants_stays_there() -> None:
    """``2.0 / x.numel()`` of a symbolic size is computed by operators on 0-d CPU tensors."""
    graph = fx.Graph()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    assert mode.shape_env is not None
    symbol = mode.shape_env.create_symbol(7, ConstantSource("n"))

    def placeholder(name: str, value: Any) -> fx.Node:
        node = graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        values = pytree.tree_map_only(fx.Node, lambda a: a.meta["val"], (args, kwargs))
        node.meta["val"] = target(*values[0], **values[1])
        return node

    aten = torch.ops.aten
    with mode:
        n = placeholder("n", mode.shape_env.create_symintnode(symbol, hint=7))
        x = placeholder("x", torch.empty(8, device="cuda"))
        two = call(aten.full.default, [], 2.0, dtype=torch.float64, device=torch.device("cpu"))
        size = call(
            torch.ops.prims.convert_element_type.default,
            call(aten.scalar_tensor.default, n),
            torch.float64,
        )
        share = call(aten.true_divide.Tensor, two, size)
        graph.output((call(aten.mul.Tensor, x, share),))
        gm = fx.GraphModule(nn.Module(), graph)
        GraphPass(frozenset(TRANSFORMS)).transform(gm.graph)
    assert not _mixes_devices(gm.graph)
    assert _moved_by_inductor(gm.graph) == []


def _moved_by_inductor(graph: fx.Graph) -> list[fx.Node]:
    """Operators whose constants Inductor's pass moves to another device than their values have."""
    settings = {"triton.cudagraphs": True, "graph_partition": True}
    with (
        torch._inductor.config.patch(settings),
        mock.patch.object(post_grad, "get_gpu_type", lambda: "cuda"),
    ):
        post_grad.move_constructors_to_gpu(graph)
    nodes = [node for node in _calls(graph) if "device" in node.kwargs]
    return [n for n in nodes if torch.device(n.kwargs["device"]).type != n.meta["val"].device.type]  # type: ignore[arg-type]


def test_a_token_is_made_without_a_device() -> None:
    """Operators with effects, such as the check of linalg.cholesky, are ordered by tokens."""
    graph = fx.Graph()
    token = graph.call_function(torch.ops.prims._make_token.default)
    token.meta["val"] = torch.empty(0)
    zeros = graph.call_function(torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cpu")})
    zeros.meta["val"] = torch.zeros(2)
    graph.output((token, zeros))
    keep_cpu_values(graph)
    assert dict(token.kwargs) == {} and dict(zeros.kwargs) == {"device": "cpu"}
