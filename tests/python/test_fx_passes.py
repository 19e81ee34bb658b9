"""The code transformations, on graphs traced for a GPU that need not be there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph.fx_passes.fx_nodes import drop_unused, is_device_copy, is_on_cpu, is_on_gpu
from pygraph.observations import Observation
from pygraph.options import TRANSFORMS
from pygraph.report.fake_gpu import trace

X = torch.randn(8, 8)
SCALAR = torch.tensor(2.0)


def _trace(function: Callable[..., Any], *args: Any, transforms: Any = TRANSFORMS) -> Observation:
    return trace(function, args, {}, transforms)


def _graph(observation: Observation) -> fx.Graph:
    ((_, graph),) = observation.graphs
    return graph


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _names(observation: Observation) -> set[str]:
    return {note.transform for note in observation.applied}


def _mixes_devices(graph: fx.Graph) -> bool:
    """Whether GPU work still takes an operand from the CPU, other than through one early copy."""
    return any(
        is_on_gpu(node) and any(is_on_cpu(a) for a in node.all_input_nodes)
        for node in _calls(graph)
        if "pygraph." not in str(node.target)
    )


@pytest.mark.parametrize("number", [SCALAR, np.float64(3.0)])
def test_a_cpu_scalar_is_copied_before_the_graph(number: Any) -> None:
    observation = _trace(lambda x, s: (x.sin() * s).cos() + s, X, number)
    graph = _graph(observation)
    assert _names(observation) == {"cpu_scalars"}
    assert not _mixes_devices(graph)
    assert "pygraph.scalars_to_device" in str(_calls(graph)[0].target)
    assert [note.where.rsplit("/", 1)[-1].split(":")[0] for note in observation.applied] == [
        "test_fx_passes.py"
    ]


def test_several_scalars_share_one_copy() -> None:
    graph = _graph(_trace(lambda x, s, t: x * s + t, X, SCALAR, torch.tensor(3.0)))
    copies = [node for node in _calls(graph) if "to_device" in str(node.target)]
    assert len(copies) == 1
    assert len(copies[0].args[0]) == 2  # type: ignore[arg-type]


def test_an_index_on_the_cpu_is_copied() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.index = torch.tensor([1, 2, 3])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()[self.index].cos()

    observation = _trace(Model(), X)
    assert _names(observation) == {"cpu_tensors"}
    assert not _mixes_devices(_graph(observation))


class WithTable(nn.Module):
    """Holds a tensor on the CPU that model.cuda() does not move."""

    def __init__(self, size: int, dtype: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.table = torch.arange(size).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + (self.table[:8] * 2).to(x.device)


def test_exact_operations_on_a_small_cpu_tensor_move_along() -> None:
    graph = _graph(_trace(WithTable(8), X))
    assert not any(is_on_cpu(node) for node in _calls(graph))
    assert not any(is_device_copy(node, "cuda") for node in _calls(graph))


def test_inexact_operations_stay_on_the_cpu() -> None:
    graph = _graph(_trace(WithTable(8, torch.float32), X))
    on_cpu = [str(node.target) for node in _calls(graph) if is_on_cpu(node)]
    assert any("mul" in name for name in on_cpu)
    assert not _mixes_devices(graph)


def test_a_large_table_is_not_copied_for_a_small_part_of_it() -> None:
    graph = _graph(_trace(WithTable(1 << 20), X))
    (copy,) = [node for node in _calls(graph) if "to_device" in str(node.target)]
    assert copy.args[0].meta["val"].numel() == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(("with_index", "stays"), [(False, False), (True, True)])
def test_a_number_that_fills_a_mask_stays_where_it_would_be_repeated(
    with_index: bool, stays: bool
) -> None:
    def function(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if with_index:
            x[x[:, 0] > 0, torch.zeros(1, dtype=torch.int64, device=x.device)] = s
        else:
            x[x > 0] = s
        return x

    graph = _graph(_trace(function, X, SCALAR))
    values = [node.args[2] for node in _calls(graph) if "index_put" in str(node.target)]
    values += [node.args[1] for node in _calls(graph) if "where" in str(node.target)]
    (value,) = values
    assert is_on_cpu(value) is stays  # type: ignore[arg-type]


def test_an_index_into_a_cpu_table_is_not_moved() -> None:
    """A wrong index must raise, not end the process."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.index = torch.arange(8), torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.index_select(0, self.index).to(x.device)

    graph = _graph(_trace(Model(), X))
    assert any(is_on_cpu(node) and "index" in str(node.target) for node in _calls(graph))


def test_constants_are_made_on_the_gpu() -> None:
    observation = _trace(lambda x: x + torch.arange(8).to(x.device), X)
    graph = _graph(observation)
    assert _names(observation) == {"constants"}
    assert not any(is_on_cpu(node) for node in _calls(graph))


def test_what_is_computed_of_constants_alone_is_computed_once() -> None:
    observation = _trace(lambda x: x + torch.linspace(0, 1, 8).exp().to(x.device), X)
    graph = _graph(observation)
    assert _names(observation) == {"constants"}
    assert not any("exp" in str(node.target) for node in _calls(graph))
    (constant,) = [node for node in graph.nodes if node.op == "get_attr"]
    kept = getattr(graph.owning_module, str(constant.target))
    assert torch.equal(kept.cpu(), torch.linspace(0, 1, 8).exp())


def test_a_number_computed_of_constants_is_compiled_into_the_kernels() -> None:
    observation = _trace(lambda x: x * torch.tensor(3.0).sqrt(), X)
    graph = _graph(observation)
    assert not any(is_on_cpu(node) for node in _calls(graph))
    values = [node.args[1] for node in _calls(graph) if "full" in str(node.target)]
    assert values == [torch.tensor(3.0).sqrt().item()]


def test_a_scalar_used_by_both_is_copied_and_kept() -> None:
    observation = _trace(lambda x, s: (x * s, s + 1), X, SCALAR)
    (output,) = _graph(observation).find_nodes(op="output")
    devices = {node.meta["val"].device.type for node in output.all_input_nodes}
    assert devices == {"cpu", "cuda"}
    assert not _mixes_devices(_graph(observation))


def test_cpu_outputs_come_last() -> None:
    observation = _trace(lambda x: (x.sin().sum().cpu() * 2, x.cos().exp().sum(0)), X)
    nodes = _calls(_graph(observation))
    assert _names(observation) == {"cpu_outputs"}
    first_on_cpu = next(i for i, node in enumerate(nodes) if is_on_cpu(node))
    assert not any(is_on_gpu(node) for node in nodes[first_on_cpu:])


def test_a_round_trip_over_the_cpu_is_left_out() -> None:
    graph = _graph(_trace(lambda x: x.sum().cpu().to(x.device) + x, X))
    assert not any(is_on_cpu(node) for node in _calls(graph))


def test_work_on_the_cpu_between_gpu_work_stays() -> None:
    graph = _graph(_trace(lambda x: x.sum().cpu().exp().to(x.device) + x, X))
    assert any(is_on_cpu(node) and "exp" in str(node.target) for node in _calls(graph))


@pytest.mark.parametrize(
    ("name", "function", "args"),
    [
        ("cpu_scalars", lambda x, s: x * s, (X, SCALAR)),
        ("cpu_tensors", WithTable(8), (X,)),
        ("constants", lambda x: x + torch.arange(8).to(x.device), (X,)),
        ("cpu_outputs", lambda x: (x.sum().cpu(), x.cos().sum()), (X,)),
    ],
)
def test_each_can_be_switched_off(name: str, function: Callable[..., Any], args: Any) -> None:
    assert name in _names(_trace(function, *args))
    others = [other for other in TRANSFORMS if other != name]
    assert name not in _names(_trace(function, *args, transforms=others))


def test_what_has_effects_stays_though_nobody_uses_its_result() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.sin.default, (x,))
    graph.call_function(torch.ops.aten.copy_.default, (x, x))
    graph.call_function(torch.ops.aten.bernoulli.default, (x,))
    graph.call_function(print, (x,))
    graph.output((x,))
    drop_unused(graph)
    assert [str(node.target).split(".")[-2] for node in _calls(graph)[:2]] == ["copy_", "bernoulli"]
    assert len(_calls(graph)) == 3


def test_fake_tensors_know_the_operators() -> None:
    from pygraph.fx_passes import fake_operators  # noqa: F401

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with FakeTensorMode():
        host = torch.empty(3, 4, dtype=torch.int64).t()
        copy, kept = torch.ops.pygraph.to_device(host, gpu), torch.ops.pygraph.keep_on_cpu(host)
        both = torch.ops.pygraph.scalars_to_device([torch.empty(()), torch.empty(())], gpu)
    assert (copy.device, copy.stride(), copy.dtype) == (gpu, host.stride(), host.dtype)
    assert (kept.device, kept.stride(), kept.dtype) == (cpu, host.stride(), host.dtype)
    assert (both.device, both.shape, both.dtype) == (gpu, (2,), torch.float32)


def test_what_fake_tensors_need_is_not_loaded_with_programs_from_a_cache() -> None:
    code = (
        "import sys, pygraph.compile.backend, pygraph.operators, pygraph.fx_passes.graph_pass\n"
        "print('pygraph.fx_passes.fake_operators' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False"], done.stderr


def test_values_are_what_they_were() -> None:
    """The operators themselves, on the CPU."""
    from pygraph import operators  # noqa: F401

    cpu = torch.device("cpu")
    for host in (torch.randn(3, 4).t(), torch.arange(5), torch.empty(0), torch.tensor(True)):
        copy = torch.ops.pygraph.to_device(host, cpu)
        assert torch.equal(host, copy)
        assert copy.stride() == host.clone().stride()
        kept = torch.ops.pygraph.keep_on_cpu(host)
        assert torch.equal(kept, host)
        assert kept.numel() == 0 or kept.data_ptr() != host.data_ptr()
    scalars = [torch.tensor(2.0, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64)]
    both = torch.ops.pygraph.scalars_to_device(scalars, cpu)
    assert torch.equal(both, torch.tensor([2.0, 3.0], dtype=torch.float64))
    with pytest.raises(RuntimeError, match="0-d tensors of one dtype"):
        torch.ops.pygraph.scalars_to_device([*scalars, torch.tensor(1)], cpu)
