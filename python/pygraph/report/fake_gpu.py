"""Traces a program as if its model and inputs were on a GPU, on a machine that has none.

Dynamo and AOTAutograd run as ever, on fake tensors: they have shapes and a device, but no memory. What
comes out are the post-grad graphs that Inductor would get; nothing is compiled, nothing runs.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.lowering  # some decompositions look things up there
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from pygraph import polyfills, runtime
from pygraph.fx_passes.graph_pass import GraphPass
from pygraph.observations import Cut, Observation, line_of, observing
from pygraph.options import TRANSFORMS

# Else Dynamo would run them, which fake tensors cannot.
_DATA_DEPENDENT_TOO = torch._dynamo.config.patch(
    capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
)


_ONLY_A_RUN = "only a run on a GPU tells what follows"


def trace(
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    transforms: Sequence[str] = TRANSFORMS,
) -> Observation:
    """Calls ``model`` once on a fake GPU; what the compiler saw.

    Parameters, buffers and tensor arguments count as on the GPU, but for 0-d arguments, which are
    numbers. Where an argument is a fake tensor on the GPU already, all others stay where they are.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    given = next((t for t in leaves if isinstance(t, FakeTensor)), None)
    mode = given.fake_mode if given is not None else FakeTensorMode(allow_non_fake_inputs=True)
    moves = given is None or given.device.type != "cuda"

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fake = value if isinstance(value, FakeTensor) else mode.from_tensor(value)
        with mode:
            return fake.to("cuda") if moves and fake.dim() > 0 else fake

    placed_args, placed_kwargs = pytree.tree_map(place, (tuple(args), kwargs))
    fake_model = on_fake_gpu(model, mode) if isinstance(model, nn.Module) else model
    polyfills.register()
    torch._dynamo.reset()
    try:
        # Autograd asks the driver for streams even on fake tensors, so this is forward only.
        with (
            observing() as observation,
            mode,
            torch.no_grad(),
            _DATA_DEPENDENT_TOO,
            # An H100's. What asks for it chooses between kernels.
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        ):
            try:
                backend = _TracingBackend(transforms, mode, observation)
                torch.compile(fake_model, backend=backend)(*placed_args, **placed_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                if not any(_reads_a_number(graph) for _, graph in observation.graphs):
                    reason = f"the program's way depends on the result of {error.func}"
                    observation.breaks.append(Cut("graph break", reason, "", _ONLY_A_RUN))
            except Exception as error:
                cause = _asks_for_a_gpu(error)
                if cause is None:
                    raise
                reason = f"the tracing ended where a real GPU was asked for: {cause}"
                observation.breaks.append(Cut("graph break", reason, _line_of(error), _ONLY_A_RUN))
    finally:
        torch._dynamo.reset()
    return observation


def _asks_for_a_gpu(error: BaseException) -> str | None:
    """In words, what failed for want of a GPU: an operator that has no form for fake tensors, or a call
    of the CUDA runtime. None for other errors."""
    chain = _causes(error)
    if not any(isinstance(e, torch.AcceleratorError) or "NVIDIA driver" in str(e) for e in chain):
        return None
    text = next((str(e) for e in chain if isinstance(e, NotImplementedError)), str(chain[-1]))
    return runtime.first_line(text)[:120]


def _causes(error: BaseException) -> list[BaseException]:
    """The error and those that it came from, the first one last."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _line_of(error: BaseException) -> str:
    """The last line of the user's that Dynamo traced, or that ran, or empty."""
    frames = list(getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__))
    return line_of(frame for frame in frames if "/pygraph/" not in frame.filename)


def _reads_a_number(graph: torch.fx.Graph) -> bool:
    """Whether the graph hands a number to the caller, who then asks its fake tensor for it."""
    item = torch.ops.aten._local_scalar_dense.default
    return bool(graph.find_nodes(op="call_function", target=item))


def on_fake_gpu(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the model with its parameters and buffers as fake tensors on the GPU."""
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    with mode:
        for module in fake.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    moved = nn.Parameter(parameter.detach().to("cuda"), parameter.requires_grad)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to("cuda")
    return fake


class _TracingBackend:
    """Transforms every graph and notes it; programs that it compiles return fresh fake tensors."""

    def __init__(
        self, transforms: Sequence[str], mode: FakeTensorMode, observation: Observation
    ) -> None:
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self._transforms = tuple(transforms)
        self._mode = mode
        self._observation = observation
        self._traced = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            inference_compiler=self._compiler("inference"),
            decompositions=select_decomp_table(),
        )

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self._observation.note_break(getattr(gm, "compile_subgraph_reason", None))
        return self._traced(gm, inputs)

    def transforms_for(self) -> tuple[str, ...]:
        """As :meth:`pygraph.compile.backend.Backend.transforms_for`."""
        return self._transforms

    def _compiler(self, name: str) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        def note(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            applied = GraphPass(frozenset(self._transforms)).transform(gm.graph)
            self._observation.note_graph(name, gm.graph, applied)
            (output,) = gm.graph.find_nodes(op="output")
            return make_boxed_func(lambda *args: _fresh(output.args[0], self._mode))

        return note


def _fresh(outputs: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors like the graph's results."""

    def number(value: Any) -> Any:
        """A size that depends on data counts as 1."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.hint if value.node.has_hint() else 1
        return value

    def make(node: Any) -> Any:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if not isinstance(value, torch.Tensor):
            return number(value)
        size, stride = [number(n) for n in value.shape], [number(n) for n in value.stride()]
        with mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)

    return [make(node) for node in outputs]
