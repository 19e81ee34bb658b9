"""Why a callable cannot have a graph, as far as an observed call shows."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime
from pygraph.callables.host.host_state import HostState
from pygraph.callables.observation import Observation, tensors_in
from pygraph.callables.signature import Arguments, special_layout

if TYPE_CHECKING:
    from pygraph import _engine

_LARGEST_NUMBER = 16  # bytes
_LARGEST_HOST_TENSOR = 16  # elements of a tensor on the CPU whose values a graph may freeze


def of_memory(
    seen: Observation,
    before: HostState,
    observer: _engine.CallObserver,
    arguments: Arguments,
    device: torch.device,
) -> str:
    """Why there can be no graph, by the memory and the gradients that the call used; empty if there can
    be one. before: of no use afterwards."""
    if _share_memory(arguments.tensors, list(seen.host.found.tensors.values())):
        return "an argument shares memory with what it reaches"
    # Whether a backward in the call may have added to a gradient of an argument's.
    has_gradients = any(t.requires_grad and t.is_leaf and t.grad is not None for t in arguments.tensors)
    if observer.backward_nodes and has_gradients:
        return "an argument requires a gradient; pass it detached"
    if observer.unknown:
        return f"operator {observer.unknown} works on tensors whose memory is not known"
    if observer.used_other_devices(device):
        return "it uses more than one device"
    if seen.state.unowned:
        return f"operator {seen.state.unowned} uses memory that no tensor known from before holds"
    if seen.form.is_differentiable:  # what autograd has saved is still alive
        return _host_tensors(observer, device) or _not_differentiable(seen, before, observer)
    hooked = _hooked(before) if observer.backward_nodes else ""
    if hooked:
        return hooked
    gradients = [gradient.tensor.grad for gradient in seen.gradients]
    known = [*tensors_in(seen.result), *(g for g in gradients if g is not None)]
    before.forget()  # keeps a container that the call has filled and replaced
    return _host_tensors(observer, device) or _survivors(observer, known, device)


def unfit_argument(arguments: Arguments) -> str:
    """Why no graph can be given such arguments; empty if one can."""
    for i, number in arguments.numbers.items():
        special = special_layout(arguments.tensors[number])
        if special:
            return (
                f"argument {i} is a {special} tensor; make a plain one of it before the call, or leave "
                "what uses it outside"
            )
    return ""


def _not_differentiable(seen: Observation, before: HostState, observer: _engine.CallObserver) -> str:
    """Why a callable cannot have a graph inside of a differentiated program; empty if it may."""
    if any(gradient.is_used or gradient.after != "kept" for gradient in seen.gradients):
        return "it sets gradients, and returns a result that requires one; split it into two callables"
    if any(t.requires_grad and t.is_leaf for t in tensors_in(seen.result)):
        return "a result that requires a gradient is no function of anything that does"
    for path, tensor in before.found.tensors.items():
        if tensor.grad_fn is not None and observer.has_used(tensor):
            return f"it uses {path}, which has a history of its own in autograd; pass it as an argument"
    return ""


def _hooked(before: HostState) -> str:
    """The reason if a backward in the call may have run hooks that the walk does not see, or empty."""
    for path, tensor in before.found.tensors.items():
        if runtime.engine().has_accumulator_hooks(tensor):
            return f"the node that accumulates the gradient of {path} has hooks; hook the tensor"
    return ""


def new_history(host: HostState, histories: dict[int, Any], nodes: set[int]) -> str:
    """The path of a tensor through which gradients flow to what the call used; empty if there is none.
    histories: of tensors before the call. nodes: whose backward was run in it."""
    for path, tensor in host.found.tensors.items():
        history = tensor.grad_fn
        if history is None or history is histories.get(id(tensor)):
            continue
        if history._sequence_nr() not in nodes:
            return path
    return ""


def _share_memory(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether one of the tensors lies in the memory of one of the others."""
    addresses = {t.untyped_storage().data_ptr() for t in others if t.layout == torch.strided} - {0}
    return any(
        t.untyped_storage().data_ptr() in addresses for t in tensors if t.layout == torch.strided
    )


def _host_tensors(observer: _engine.CallObserver, device: torch.device) -> str:
    """Why tensors on the CPU that the call used keep it from having a graph."""
    if device.type == "cpu":
        return ""
    for tensor, user, is_written, size in observer.host_tensors():
        if tensor is None and size <= _LARGEST_NUMBER:
            continue  # an operator's, made of a number
        if is_written:
            return (
                f"operator {user} writes to a tensor on the CPU, which a replay would not do; if it is "
                "the step count of an optimizer, make that with fused=True or capturable=True"
            )
        if tensor is None or tensor.numel() > _LARGEST_HOST_TENSOR:
            return f"operator {user} reads a tensor on the CPU; move it to the GPU"
    return ""


def _survivors(observer: _engine.CallObserver, known: list[torch.Tensor], device: torch.device) -> str:
    """Why memory that the call made, and that is neither a result nor a gradient, keeps it from having
    a graph: a replay would not update it."""
    makers = observer.makers_of_survivors(known, device)
    if makers:
        gc.collect()  # it may only be part of a cycle
        makers = observer.makers_of_survivors(known, device)
    if not makers:
        return ""
    more = f" and {len(makers) - 1} more" if len(makers) > 1 else ""
    return (
        f"it keeps a tensor from operator {makers[0]}{more}, which replays would not update; return it"
    )
