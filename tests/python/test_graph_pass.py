"""The pass over one graph of a compiled program, transformed for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pygraph.fx_passes.fx_nodes import is_on_cpu, is_on_gpu
from pygraph.fx_passes.graph_pass import GraphPass
from pygraph.options import TRANSFORMS

X = torch.randn(8, 8)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _transformed(function: Callable[..., Any], x: torch.Tensor, *on_cpu: torch.Tensor) -> Any:
    """The graph as traced, with what writes in place, transformed for a fake GPU."""
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        fake = [mode.from_tensor(t) for t in (x, *on_cpu)]
        gm = make_fx(function)(fake[0].to("cuda"), *fake[1:])
    GraphPass(frozenset(TRANSFORMS)).transform(gm.graph)
    return gm


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t[1:3], lambda t: t.t()])
def test_a_round_trip_of_what_is_written_later_is_a_copy(part: Callable[..., Any]) -> None:
    """Inductor's graphs may write in their middle, which AOTAutograd's do not."""

    def function(x: torch.Tensor) -> torch.Tensor:
        there_and_back = part(x.cpu()).to(x.device)
        row = there_and_back[0]
        x.add_(1)
        return row * 2

    transformed = _transformed(function, X)
    assert any("clone" in str(node.target) for node in _calls(transformed.graph))
    assert not any(is_on_cpu(node) for node in _calls(transformed.graph))


def test_a_branch_gets_no_constants() -> None:
    """Inductor gives constants of graphs inside another one no value."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(0, 1, 8).exp().to(x.device)

    mode = FakeTensorMode()
    for is_outermost in (True, False):
        with mode, torch.no_grad():
            gm = make_fx(function)(mode.from_tensor(X).to("cuda"))
        outermost = gm if is_outermost else torch.fx.symbolic_trace(torch.nn.Identity())
        GraphPass(frozenset(TRANSFORMS), outermost=outermost).transform(gm.graph)
        assert bool(list(gm.graph.find_nodes(op="get_attr"))) == is_outermost


def test_a_graph_is_seen_once_with_those_inside_of_it() -> None:
    with FakeTensorMode() as mode, torch.no_grad():
        x = mode.from_tensor(X).to("cuda")
        branch = make_fx(lambda x: x + torch.arange(8).to("cuda"))(x)
        outermost = make_fx(lambda x: x.exp())(x)
    seen: list[tuple[fx.Graph, int]] = []
    graph_pass = GraphPass(
        frozenset(TRANSFORMS),
        watch=lambda graph, applied: seen.append((graph, len(applied))),
        outermost=outermost,
    )
    graph_pass(branch.graph)
    graph_pass(outermost.graph)
    assert seen == [(outermost.graph, 1)]


@pytest.mark.parametrize(("size", "inside"), [(8, True), (1 << 23, False)])
def test_a_graph_that_takes_nothing_copies_what_it_makes(size: int, inside: bool) -> None:
    """A branch without operands, or a constant too large to be kept."""
    with FakeTensorMode(), torch.no_grad():
        gm = make_fx(lambda: torch.linspace(0, 1, size).to("cuda").cos())()
    outermost = torch.fx.symbolic_trace(torch.nn.Identity()) if inside else gm
    GraphPass(frozenset(TRANSFORMS), outermost=outermost).transform(gm.graph)
    assert [str(node.target) for node in _calls(gm.graph)] == [
        "aten.linspace.default",
        "pygraph.to_device.default",
        "aten.cos.default",
    ]


@pytest.mark.parametrize(
    ("number", "dtype", "rounded"),
    [
        (0.1, torch.float16, 0.0999755859375),
        (1e-9, torch.float16, 0.0),
        (1.001, torch.bfloat16, 1.0),
        (3.7, torch.int64, 3),
        (2.5, torch.bool, True),
        (float("-inf"), torch.bfloat16, float("-inf")),
    ],
)
def test_a_filled_tensor_holds_the_number_as_rounded(number: float, dtype: Any, rounded: Any) -> None:
    """A kernel that takes the number itself would compute with more digits than the tensor has."""
    gm = _transformed(lambda x: x * torch.full((8,), number, dtype=dtype).to(x.device), X)
    (full,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert not is_on_cpu(full)
    assert full.args[1] == rounded
    assert type(full.args[1]) is type(rounded)


INTEGERS, HALVES = torch.arange(8), torch.ones(8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("operation", "operands", "moves"),
    [
        (lambda a, b: torch.cat([a, b]), (INTEGERS, HALVES), False),  # a cast that rounds
        (lambda a, b: torch.cat([a, b]), (INTEGERS, INTEGERS.int()), True),
        (lambda a, b: torch.where(a > 3, a, b), (INTEGERS, HALVES), False),
        (lambda a, b: torch.where(a > 3, b, b), (INTEGERS, HALVES), True),
        (lambda a: a > 0.5, (INTEGERS,), False),  # compared as floats
        (lambda a: a > 5, (INTEGERS,), True),
        (lambda a: a * 0.5, (INTEGERS,), False),
    ],
)
def test_only_what_rounds_nowhere_moves(operation: Any, operands: Any, moves: bool) -> None:
    gm = _transformed(lambda x, *cpu: x + operation(*cpu)[:8].to(x.device), X, *operands)
    computed = [n for n in _calls(gm.graph) if is_on_cpu(n) and "pygraph" not in str(n.target)]
    assert (not computed) is moves


def test_ranges_with_a_fraction_are_computed_on_the_cpu() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(0, 10.5, 1, dtype=torch.int64)[:8].to(x.device)

    gm = _transformed(function, X)
    assert not any("arange" in str(n.target) and is_on_gpu(n) for n in _calls(gm.graph))


def test_copies_keep_the_order_of_dimensions() -> None:
    """Who looks at the memory itself, through a view of a view, sees what the program would."""

    def function(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copy = table.to(x.device)
        return copy, x + copy.t().as_strided((8, 8), (8, 1))

    table = torch.randn(8, 8).t()
    gm = _transformed(function, X, table)
    (output,) = gm.graph.find_nodes(op="output")
    assert output.args[0][0].meta["val"].stride() == table.stride()
    (sent,) = [n for n in _calls(gm.graph) if "to_device" in str(n.target)]
    assert sent.meta["val"].stride() == table.stride()


def test_a_constant_that_the_graph_writes_is_read_at_every_call() -> None:
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    gm.register_buffer("state", torch.zeros(8))
    mode = FakeTensorMode()
    with mode:
        x_value, state_value = torch.empty(8, 8, device="cuda"), torch.empty(8)
    graph = gm.graph
    x = graph.placeholder("x")
    state = graph.get_attr("state")
    put = graph.call_function(torch.ops.prims.device_put.default, (state, torch.device("cuda", 0)))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, put))
    write = graph.call_function(torch.ops.aten.add_.Tensor, (state, 1))
    graph.output((total,))
    x.meta["val"] = total.meta["val"] = x_value
    state.meta["val"] = write.meta["val"] = state_value
    with mode:
        put.meta["val"] = torch.empty(8, device="cuda")
    GraphPass(frozenset(TRANSFORMS)).transform(graph)
    assert put in graph.nodes
