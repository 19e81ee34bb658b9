"""Graphs for ``optimizer.step()`` in plain training loops around a compiled model
(docs/explanation/whole-steps.md, "Plain loops").

PyTorch calls a method of an optimizer, ``_optimizer_step_code``, after each step. The method does
nothing. The patch ``optimizer_steps`` replaces it by one that checks whether the optimizer's parameters
are those of a program that the backend has compiled for training. Such an optimizer gets an attribute
``step`` of its own, as schedulers give it one:

    the call      optimizer.step() -> Route (route.py) -> a graphed callable (graphed.py)
                  -> the step as it was
    arguments     the gradients, which are fresh memory at each step; GradScaler's scale and found_inf
    state         parameters, moments and step counts; rates of the forms that follow them (rates.py)

The attribute is not pickled or copied with the optimizer; a copy by a class that copies all attributes
steps as it does without. As without it, only one thread at a time may call an optimizer's step.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pygraph import runtime
from pygraph.callables import trained
from pygraph.callables.route import Route
from pygraph.callables.serving import is_calling
from pygraph.options import Options

_PATCH = "optimizer_steps"
_SCALER = ("grad_scale", "found_inf")  # attributes that GradScaler gives an optimizer for one step

_LOOKS = 4  # steps whose gradients are looked at one by one

# Optimizers that were looked at, by identity, with the number of programs then.
_seen: MutableMapping[torch.optim.Optimizer, int] = WeakIdKeyDictionary()


@functools.cache
def install() -> None:
    """Replaces what PyTorch calls after each step of an optimizer."""

    def _optimizer_step_code(self: torch.optim.Optimizer) -> None:
        if not torch.compiler.is_compiling():
            _look_at(self)

    own: Any = torch.optim.Optimizer
    own._optimizer_step_code = functools.wraps(own._optimizer_step_code)(_optimizer_step_code)


def _look_at(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer a route, if a program has been compiled for its parameters."""
    if _seen.get(optimizer) == trained.programs() or is_calling():
        return
    with runtime.harmless("looking at an optimizer"):
        is_known = optimizer in _seen and hasattr(optimizer.__dict__.get("step"), "pygraph_route")
        _seen[optimizer] = trained.programs()
        options = None if is_known else _options_for(optimizer)
        if options is not None and runtime.unavailable_reason() is None:
            _give_route(optimizer, options)


def _options_for(optimizer: torch.optim.Optimizer) -> Options | None:
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    return trained.options_for(_parameters(optimizer), _PATCH)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _give_route(optimizer: Any, options: Options) -> None:
    before = optimizer.step
    own = optimizer.__dict__.get("step")  # a scheduler's, say
    # Without one of its own, it has the step that its class has at each call.
    by_class = lambda *args, **kwargs: type(optimizer).step(optimizer, *args, **kwargs)  # noqa: E731
    function = by_class if own is None else own
    route = _Steps(optimizer, function, options)

    @functools.wraps(getattr(before, "__func__", before))  # which both take the optimizer
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self is not optimizer:  # a copy that has got the attributes
            return _step_of(self, own, optimizer)(*args, **kwargs)
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return route.step(args, kwargs)

    step.pygraph_route = route  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)


def _step_of(copied: Any, own: Any, optimizer: Any) -> Callable[..., Any]:
    """The step that a copy of an optimizer has. own: the optimizer's attribute, as it was."""
    if own is None:
        return types.MethodType(type(copied).step, copied)
    if isinstance(own, types.MethodType) and own.__self__ is optimizer:
        return types.MethodType(own.__func__, copied)
    return own  # type: ignore[no-any-return]


class _Steps:
    """The steps of one optimizer. Thread-safe as the optimizer is."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, function: Callable[..., Any], options: Options
    ) -> None:
        """function: makes a step as it was."""
        self._optimizer = optimizer
        self._function = function
        self._looks_left = _LOOKS
        make = functools.partial(_step_function, optimizer, function)
        self._route = Route(f"{type(optimizer).__name__}.step", make, options)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a step, by a graph where there is one."""
        has_closure = any(x is not None for x in (*args, *kwargs.values()))
        if has_closure or self._route.has_given_up or self._has_hooks():
            return self._function(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:  # in a backward, as a hook of a parameter
            return self._function(*args, **kwargs)
        gradients = [parameter.grad for parameter in _parameters(self._optimizer)]
        if all(gradient is None for gradient in gradients) or not self._may_pass(gradients):
            return self._function(*args, **kwargs)
        attributes = self._optimizer.__dict__
        given = {name: attributes[name] for name in _SCALER if name in attributes}
        try:
            for name in given:
                del attributes[name]
            made = self._route.call(gradients, given, *((args, kwargs) if args or kwargs else ()))
        finally:
            attributes.update(given)
        return self._function(*args, **kwargs) if made is None else made[0]

    def _may_pass(self, gradients: list[torch.Tensor | None]) -> bool:
        """In the first steps: whether a graph can have such gradients. Later steps are compared with
        these by the graph."""
        if self._looks_left == 0:
            return True
        if not all(g is None or (trained.is_plain(g) and not g.requires_grad) for g in gradients):
            return False
        self._looks_left -= 1
        return True

    def _has_hooks(self) -> bool:
        optimizer = self._optimizer
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )


def _step_function(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], begin: Callable[[Any], None]
) -> Callable[..., Any]:
    """A step as a function of gradients and of what GradScaler gives. It leaves the latter as it was,
    and of gradients that are not the parameters' own what the step makes of them."""

    def run(
        gradients: list[torch.Tensor | None],
        given: dict[str, Any],
        args: tuple[None, ...] = (),
        kwargs: dict[str, None] | None = None,
    ) -> Any:
        parameters = _parameters(optimizer)
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            for name, value in given.items():
                setattr(optimizer, name, value)
            begin(gradients)
            return step(*args, **(kwargs or {}))
        finally:
            for name in given:
                optimizer.__dict__.pop(name, None)
            for parameter, gradient, own in zip(parameters, gradients, before, strict=True):
                if own is not gradient and parameter.grad is gradient:  # else the step has changed it
                    parameter.grad = own

    return run
