"""Which programs AOTAutograd may load from its cache, and what their keys lack.

AOTAutograd's key holds the program as Dynamo wrote it, and the size, type and place of each input. What
AOTAutograd makes of that also depends on

* which inputs share memory: a program that writes one of them is another program then, and gets a guard
  that a loaded one would not have;
* streams and memory pools (``with torch.cuda.stream``), which are only noted beside the program;
* Python code that AOTAutograd traces through: of operators that are not PyTorch's (their gradients,
  their results' shapes, what they are composed of), and of subclasses of tensors;
* which inputs are leaves of autograd: it writes to a leaf and to another tensor in different ways;
* what operators take where a program names no type and no number of a device;
* switches that choose operators, such as the allowed kernels of attention.

Leaves, defaults and switches become a part of the key; a program with one of the others is compiled in
every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pygraph import runtime
from pygraph.compile import attachment

# Of operators whose code belongs to PyTorch, whose version is in the key, or to PyGraph.
_NAMESPACES = frozenset(
    (
        *("aten", "prim", "prims", "rngprims", "inductor", "inductor_prims", "higher_order"),
        *("quantized", "quantized_decomposed", "mkldnn", "mkl", "onednn", "fsdp", "pygraph"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "profiler", "streams"),
    )
)


def why_not(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Why a program must be compiled in every process; empty if it may be loaded. Never raises.

    gm, inputs: as Dynamo gave them to the backend.
    """
    try:
        if attachment.places_its_work_itself(gm):
            return "it works on streams or in memory pools of its own"
        for operator in _operators(gm):
            if operator.partition("::")[0] not in _NAMESPACES:
                return f"{operator} is not PyTorch's, and its code may change"
        return _why_not_inputs([*inputs, *gm.parameters(), *gm.buffers()])
    except Exception as error:
        return f"{type(error).__name__}: {runtime.first_line(error)}"


def _operators(gm: torch.fx.GraphModule) -> Iterator[str]:
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if isinstance(node.target, OpOverload):
                yield node.target._name
            elif isinstance(node.target, OpOverloadPacket):
                yield node.target._qualified_op_name


def _why_not_inputs(inputs: Sequence[Any]) -> str:
    tensors = {id(x): x for x in inputs if isinstance(x, torch.Tensor)}.values()
    if any(is_traceable_wrapper_subclass(x) for x in tensors):
        return "the code of a tensor's class may change"
    if any(x.layout is not torch.strided for x in tensors):
        return "a tensor is not strided"
    # A storage, and not its address: memory of fake tensors has none.
    storages = {x.untyped_storage()._cdata for x in tensors}
    return "" if len(storages) == len(tensors) else "inputs share memory"


def missing_key(inputs: Sequence[Any]) -> tuple[object, ...]:
    """What AOTAutograd's result depends on, and its key does not contain.

    inputs: as Dynamo gave them to the backend.
    """
    return (_results_of_operators(inputs), *_defaults(), *_switches())


def _results_of_operators(inputs: Sequence[Any]) -> tuple[int, ...]:
    """The inputs with a history in autograd. The others that need a gradient are leaves."""
    return tuple(i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and not x.is_leaf)


def _defaults() -> tuple[object, ...]:
    """What a program means by a new tensor, and by "cuda"."""
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    device = torch.cuda.current_device() if is_initialized else 0
    return str(torch.get_default_dtype()), device  # the keys before PyTorch 2.15 lack the type, too


def _switches() -> tuple[object, ...]:
    """What AOTAutograd's choice of operators depends on."""
    einsum = torch.backends.opt_einsum
    return (
        runtime.engine().signature([], 0),  # of no arguments: the switches alone
        bool(torch.backends.mkldnn.enabled),
        (einsum.enabled, einsum.strategy),
        # The keys of PyTorch 2.11 and 2.12 only say whether any of them is on.
        *((torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cuda", "cpu")),
    )
