"""What the engine is told of a call that a replay has made, so that it can make the next calls of the
same kind without Python (bindings/callables/served_calls.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from pygraph.callables.signature import Form

if TYPE_CHECKING:
    from pygraph import _engine


class OfStep(TypedDict):
    """What the step function knows."""

    state: _engine.State
    state_tensors: list[torch.Tensor]  # inputs, as in each call
    differentiated: list[torch.Tensor]  # whose gradients are looked at
    used: list[torch.Tensor]  # whose gradients from before are inputs
    groups: list[dict[str, Any]]  # whose learning rates are inputs
    # Of the rates as they are now, or None where no tensors may be made.
    make_rates: Callable[[], list[torch.Tensor] | None]
    made: list[torch.Tensor]  # left with gradients, the last outputs
    cleared: list[torch.Tensor]  # left without
    result_count: int  # outputs that the result is made of
    # A function that makes the result of these outputs and the tensors that were passed; `tuple` or
    # `list`; or None where the result is the first output.
    result_of: Callable[..., Any] | None


class KnownCall(OfStep):
    """The engine holds it, and refers to what it has."""

    owner: object  # by which it is forgotten
    form: _engine.ArgumentForm
    watch: _engine.HostWatch
    held: tuple[Form, Any]  # what the form and the watch refer to
    probes_hold: Callable[[], bool] | None
    pattern: bytes  # which of `differentiated` have gradients before a call
    layouts: bytes  # of the gradients of `used` before a call
    beside: list[torch.Tensor]  # by neighbour: the tensor whose gradient lies in the same memory
    neighbours: list[torch.Tensor]
    sharing: list[torch.Tensor]  # whose gradients lie in one memory with those of `shared_with`
    shared_with: list[torch.Tensor]
    written_state: list[int]  # positions
    written_arguments: list[int]
    counted: list[torch.Tensor]  # whose gradients from before are written
    written_neighbours: list[int]
    # The engine's callable, or a function of the list of inputs that returns the outputs, or None where
    # no graph serves the call.
    replay: Any
