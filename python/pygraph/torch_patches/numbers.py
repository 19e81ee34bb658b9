"""Converts NumPy numbers in a model to tensors by the engine's ``as_tensor``.

Dynamo converts such a number up to four times per call: for two guards, and twice to pass it. (Python's
numbers, if they vary, once.) The engine takes a seventh of the time, and passes it once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch._dynamo import eval_frame, guards
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.source import ChainedSource, NumpyTensorSource

from pygraph import runtime
from pygraph.torch_patches.parameters import writes_python
from pygraph.torch_patches.state import Attempt

dynamos_from_numpy = guards.from_numpy


def from_numpy(value: Any) -> Any:
    """As Dynamo's, which guards call with arrays and numbers, and with what takes their place. It lets
    modes see the call, such as that of a default device."""
    if isinstance(value, guards.np.generic) and not torch._C._len_torch_function_stack():
        return runtime.engine().as_tensor(value)
    return dynamos_from_numpy(value)


def apply_to_guards() -> None:
    eval_frame.skip_code(from_numpy.__code__)  # as frames of PyTorch's own
    guards.from_numpy = from_numpy
    guards._get_closure_vars()["___from_numpy"] = from_numpy


def apply_to_arguments(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    """Changes how the code that Dynamo will write loads the graph's arguments that are numbers."""
    # By their sources, Dynamo finds the arguments that a specialization is for.
    if output.shape_env.specializations or writes_python():
        return
    for node in gm.graph.find_nodes(op="placeholder"):
        _load_cheaply(node.meta.get("grapharg"))


@dataclasses.dataclass(frozen=True)
class _NumberSource(ChainedSource):  # type: ignore[misc]
    """A Python or NumPy number, loaded as a tensor. Only loaded: guards know its base."""

    engine: str  # its module's name

    @property
    def _name_template(self) -> str:
        return "___as_tensor({0})"

    def reconstruct(self, codegen: Any) -> None:
        codegen.add_push_null(lambda: codegen.load_import_from(self.engine, "as_tensor"))
        codegen(self.base)
        codegen.extend_output(create_call_function(1, False))


def _load_cheaply(argument: Any) -> None:
    """Changes how the generated code loads a graph's argument, if that is a number."""
    if argument is None or not argument.pass_arg_as_tensor or argument.source is None:
        return
    source = argument.source
    if isinstance(source, NumpyTensorSource):
        source = source.base  # an array or a number
    argument.source = _NumberSource(source, runtime.engine().__name__)
    argument.pass_arg_as_tensor = False
