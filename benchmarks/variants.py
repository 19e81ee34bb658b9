"""The variants of a workload: each compiles the module and makes one step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.results_table import WITHOUT_POLYFILLS
from benchmarks.workloads import Inputs, Workload
from pygraph import operators
from pygraph.fx_passes.graph_pass import GraphPass
from pygraph.options import TRANSFORMS

VARIANTS = ("eager", "inductor+graphs", "inductor", "pygraph", "hand-made graph")
# What each of PyGraph's parts adds, in this order: the code transformations under Inductor's graphs,
# then relocation instead of copies, then ("pygraph") selection. And PyGraph with kernels one after the
# other, as recorded.
ABLATION = ("inductor+graphs+transforms", "pygraph, every graph", "pygraph, one lane")
# Variants whose code another one has compiled before: they share its caches, which saves time, and
# keeps kernels that are tuned by chance from differing. What PyGraph's graphs could reach is
# shown by a hand-made graph with PyGraph's kernels, as far as they are the same.
SAME_CODE = {
    "inductor": "inductor+graphs",
    "hand-made graph": "pygraph",
    "inductor+graphs+transforms": "inductor+graphs",
    "pygraph, every graph": "pygraph",
    "pygraph, one lane": "pygraph",
}


def names_for(workload: Workload, wanted: Sequence[str]) -> list[str]:
    """Of the wanted variants, those that the workload allows; the hand-made graph last: it may hold the
    workspace that cuBLAS had on its stream, which measuring others frees."""
    names = [name for name in wanted if name != "hand-made graph"]
    if "pygraph" in names and workload.has_polyfills and WITHOUT_POLYFILLS not in names:
        names.append(WITHOUT_POLYFILLS)
    return names + (
        ["hand-made graph"] if "hand-made graph" in wanted and workload.fits_one_graph else []
    )


@dataclasses.dataclass
class Row:
    """Results of one variant on one workload. Times in microseconds, memory in MiB."""

    workload: str
    mode: str
    batch: int
    backend: str
    us: float = 0.0  # per call, calls in a row
    us_spread: float = 0.0  # (largest - smallest) / median over the rounds
    latency_us: float = 0.0  # per call, with a synchronize after each
    host_us: float = 0.0  # of the caller's thread per call
    peak_mib: float = 0.0  # device memory in use after calls, with model and inputs, without libraries
    compile_peak_mib: float = 0.0  # the same when it has been compiled and called a few times
    # From torch.compile through the first calls, less what as many take later; with empty caches.
    compile_s: float | None = None
    in_graphs: float = 0.0  # share of the kernels of one call that ran in graphs
    copied_bytes: int = 0  # into the fixed inputs of graphs, in one call
    # PyGraph's, by what became of them; empty for others.
    graphs: dict[str, int] = dataclasses.field(default_factory=dict)
    rel_err: float = 0.0  # largest difference from uncaptured Inductor / its largest value


class Variant:
    """One way to run the workload's step."""

    def __init__(self, name: str, workload: Workload, module: torch.nn.Module) -> None:
        self.name = name
        self.row = Row(workload.name, workload.mode, workload.batch, name)
        self._training = workload.mode == "training"
        self._module = module
        self.model: Callable[..., Any] = _compile(name, module)

    def step(self, inputs: Inputs) -> Any:
        """One call, or one forward and backward; gradients are on where the caller has them on."""
        args, kwargs = inputs
        if not self._training:
            return self.model(*args, **kwargs)
        self._module.zero_grad(set_to_none=True)
        loss = self.model(*args, **kwargs)
        loss.backward()
        return loss


class HandMadeGraph(Variant):
    """torch.cuda.graph around one whole step of the Inductor variant, on one fixed input.

    Gradients are results of the graph instead of being accumulated, and parameters are tensors of the
    graph's own, in the same memory: AccumulateGrad nodes remember the stream they were made on and
    break the capture where that is another one.
    """

    def __init__(self, workload: Workload, module: torch.nn.Module, inputs: Inputs) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            module = _with_shared_memory(module)
            super().__init__("hand-made graph", workload, module)
            self._inductor = Variant("inductor", workload, module)
            for _ in range(3):
                self._captured_step(inputs)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._output = self._captured_step(inputs)

    def _captured_step(self, inputs: Inputs) -> Any:
        if not self._training:
            return self._inductor.step(inputs)
        args, kwargs = inputs
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        return torch.autograd.grad(self._inductor.model(*args, **kwargs), parameters, allow_unused=True)

    def step(self, inputs: Inputs) -> Any:
        self._graph.replay()
        return self._output


def _with_shared_memory(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module whose parameters are new tensors in the same memory."""
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()
    }
    memo |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _compile(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    if name == "inductor":
        return torch.compile(module)
    if name == "inductor+graphs":
        return torch.compile(module, mode="reduce-overhead")
    if name == "inductor+graphs+transforms":
        return torch.compile(module, options=_with_transforms())
    if name == "pygraph":
        return torch.compile(module, backend="pygraph")
    if name == "pygraph, every graph":
        return torch.compile(module, backend="pygraph", options={"pygraph.select": "always"})
    if name == "pygraph, one lane":
        return torch.compile(module, backend="pygraph", options={"pygraph.lanes": 1})
    if name == WITHOUT_POLYFILLS:
        transforms = [name for name in TRANSFORMS if name != "library_functions"]
        options: dict[str, Any] = {"pygraph.transforms": transforms}
        return torch.compile(module, backend="pygraph", options=options)
    return module


def _with_transforms() -> dict[str, Any]:
    """Inductor's options for graphs, with PyGraph's code transformations."""
    graph_pass = GraphPass(enabled=frozenset(TRANSFORMS), user_pass=None, watch=None)
    return {
        "triton.cudagraphs": True,
        "graph_partition": True,
        "custom_should_partition_ops": operators.outside_of_graphs(),
        "post_grad_custom_post_pass": graph_pass,
    }
