"""One node in the program's autograd graph, in place of all that a graphed callable has there.

Arguments and parameters are its inputs, so hooks on them, and what accumulates their gradients, run as
always. It keeps what the backward needs with ``save_for_backward``: so PyTorch notices where the
program writes to it, and frees it after a backward without ``retain_graph``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from pygraph.callables.backward_function import Backwards
from pygraph.callables.kept_graph import Structure

_TWICE = (
    b"pygraph.graph: a graphed callable cannot be differentiated twice; "
    b"make such calls under `with pygraph.uncaptured():`"
)


@dataclasses.dataclass
class Made:
    """What a call has made. results: those that require gradients. made: memory that is saved.
    arguments: that are saved. watched: other tensors whose memory is saved, to which the program must
    not write before the backward."""

    structure: Structure
    backwards: Backwards
    results: list[torch.Tensor]
    made: list[torch.Tensor]
    arguments: list[torch.Tensor]
    watched: list[torch.Tensor]


class GraphedCallable(torch.autograd.Function):
    """Named as it is to show up so in ``grad_fn``."""

    @staticmethod
    def forward(ctx: Any, made: Made, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.structure, ctx.backwards = made.structure, made.backwards
        ctx.made, ctx.arguments = len(made.made), len(made.arguments)
        ctx.save_for_backward(*made.made, *made.arguments, *made.watched)
        return tuple(made.results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        saved = list(ctx.saved_tensors)  # raises where one was written to, or they are gone
        ctx.maybe_clear_saved_tensors()
        is_differentiated = torch.is_grad_enabled()  # create_graph
        needed = tuple(ctx.needs_input_grad[1:])
        arguments = saved[ctx.made : ctx.made + ctx.arguments]
        del saved[ctx.made :]
        with torch.no_grad():
            found = ctx.backwards.run(ctx.structure, saved, arguments, gradients, needed)
        found = _raising(found) if is_differentiated else found
        given = iter(found)
        return (None, *[next(given) if is_needed else None for is_needed in needed])


def _raising(gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients, with a history that raises, as ``once_differentiable`` gives them."""
    found = [g for g in gradients if g is not None]
    raising = torch._C._functions.DelayedError(_TWICE, len(found))
    results = raising(*[gradient.detach().requires_grad_() for gradient in found])
    given = iter((results,) if isinstance(results, torch.Tensor) else results)
    return [None if gradient is None else next(given) for gradient in gradients]


def with_gradient(made: Made, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, as functions of the sources."""
    if not made.results:
        return []
    return list(GraphedCallable.apply(made, *sources))
