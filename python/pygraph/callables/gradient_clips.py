"""Graphs for ``torch.nn.utils.clip_grad_norm_`` in plain training loops around a compiled model
(docs/explanation/whole-steps.md, "Plain loops").

What programs have imported, under whichever name, is a wrapper that turns gradients off and calls the
function in its closure. The patch ``gradient_clips`` replaces that function:

    the call      clip_grad_norm_(parameters, 1.0) -> PyTorch's wrapper -> ``clip_grad_norm_`` here
                  -> Route -> a graphed callable (graphed.py) -> PyTorch's function
    arguments     the gradients, which are fresh memory at each step and are written in place; numbers
    result        the total norm

PyTorch's function reads nothing of a parameter but its gradient. So the graphed callable gets gradients
alone, and passes objects that have one. It keeps no parameter alive. Calls whose parameters begin with
the same one share a route: another number of gradients is another variant of its callable, other shapes
are another signature.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables import trained
from pygraph.callables.route import Route
from pygraph.callables.serving import is_calling

_PATCH = "gradient_clips"
_NAME = "clip_grad_norm_"
_TOTAL_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"  # its parts, by name
# As PyTorch has it, where PyTorch's would name a line of ours.
_WARNING = "`parameters` is an empty generator, no gradient clipping will occur."


class _Seen:
    """What is known of calls whose parameters begin with this one."""

    __slots__ = ("counts", "parameter", "programs", "route")

    def __init__(self, parameter: torch.Tensor) -> None:
        key = id(parameter)

        def forget(reference: Any) -> None:
            found = _seen.get(key)
            if found is not None and found.parameter is reference:
                del _seen[key]

        self.parameter = weakref.ref(parameter, forget)
        self.programs = trained.programs()  # that there were then
        self.route: Route | None = None  # none: they run as they are
        self.counts: set[int] = set()  # of gradients that were looked at one by one

    def is_valid(self) -> bool:
        return self.route is not None or self.programs == trained.programs()


_seen: dict[int, _Seen] = {}  # by the identity of the parameter


class _Holder:
    """In place of a parameter."""

    __slots__ = ("grad",)

    def __init__(self, gradient: torch.Tensor) -> None:
        self.grad = gradient


@functools.cache
def install() -> None:
    """Replaces what PyTorch's wrapper calls. Raises RuntimeError if it is not the known wrapper."""
    wrapper: Any = getattr(sys.modules["torch.nn.utils.clip_grad"], _NAME)
    cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    if list(cells) != ["func"] or cells["func"].cell_contents is not wrapper.__wrapped__:
        raise RuntimeError(f"another package has changed {_NAME}")
    cells["func"].cell_contents = _replacement(wrapper.__wrapped__)


def _replacement(own: Callable[..., Any]) -> Callable[..., Any]:
    """own: PyTorch's function."""
    scope = own.__globals__
    total_norm, scale = scope[_TOTAL_NORM], scope[_SCALE]

    @functools.wraps(own)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: Any = False,
        foreach: Any = None,
    ) -> Any:
        if torch.compiler.is_compiling() or error_if_nonfinite or is_calling():
            return own(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not listed and isinstance(parameters, types.GeneratorType):
            warnings.warn(_WARNING, stacklevel=3)
        made = None
        if scope.get(_TOTAL_NORM) is total_norm and scope.get(_SCALE) is scale:
            made = _clip(own, listed, max_norm, norm_type, foreach)
        return own(listed, max_norm, norm_type, False, foreach) if made is None else made[0]

    return clip_grad_norm_


def _clip(
    own: Callable[..., Any], parameters: list[Any], max_norm: Any, norm_type: Any, foreach: Any
) -> tuple[Any] | None:
    """The total norm in a tuple; None if nothing has been done."""
    seen = _seen_of(own, parameters)
    if seen is None or seen.route is None or seen.route.has_given_up:
        return None
    are_numbers = isinstance(max_norm, (int, float)) and isinstance(norm_type, (int, float, str))
    is_switch = foreach is None or type(foreach) is bool
    if not (are_numbers and is_switch):  # tensors, maybe, which would be read
        return None
    if torch._C._current_graph_task_id() != -1:  # in a backward, as a hook of a parameter
        return None
    gradients = [g for p in parameters if (g := p.grad) is not None]
    if len(gradients) not in seen.counts:
        if not gradients or not all(_may_pass(g, gradients[0].device) for g in gradients):
            return None
        seen.counts.add(len(gradients))  # later ones are compared with these by the graph
    return seen.route.call(gradients, float(max_norm), float(norm_type), foreach)


def _may_pass(gradient: torch.Tensor, device: torch.device) -> bool:
    """Whether a graph can have it."""
    return trained.is_plain(gradient) and gradient.device == device and not gradient.requires_grad


def _seen_of(own: Callable[..., Any], parameters: list[Any]) -> _Seen | None:
    first = parameters[0] if parameters else None
    seen = _seen.get(id(first))
    if not isinstance(first, torch.Tensor):
        return None
    if seen is not None and seen.parameter() is first and seen.is_valid():
        return seen
    with runtime.harmless("looking at gradients"):
        seen = _seen[id(first)] = _Seen(first)
        options = trained.options_for(parameters, _PATCH)
        if options is not None:
            seen.route = Route(_NAME, functools.partial(_function, own), options)
    return seen


def _function(own: Callable[..., Any], begin: Callable[[Any], None]) -> Callable[..., Any]:
    """The clip as a function of gradients."""

    def run(
        gradients: list[torch.Tensor], max_norm: float, norm_type: float, foreach: bool | None
    ) -> Any:
        begin(gradients)
        return own([_Holder(g) for g in gradients], max_norm, norm_type, False, foreach)

    return run
