"""Whether a form of an optimizer takes its learning rate as a tensor on the GPU, found by trying.

Two small optimizers of the same form make the same steps, one with floats and one with tensors, and
their parameters and state are compared. Each step has another rate. Numbers that are multiplied by the
rate are large here, so that a difference in rounding shows. It is tried once for each form in the
process, and takes some milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph import signal_exceptions
from pygraph.callables.optimizer_forms import is_of_pytorch

# What a kernel may read. The GPU's fused kernels take the first, the CPU's compute in the second.
_DTYPES = (torch.float32, torch.float64)
_RATES = (0.1, 0.3, 0.0123, 0.77, 1.0 / 7.0, 0.9, 0.031, 0.567, 0.21, 0.0789)
_SHAPES = ((32, 33), (3, 5))
# Of numbers that are not zero.
_LARGE = {"weight_decay": 0.7, "lr_decay": 0.3, "lambd": 0.3, "momentum": 0.9, "dampening": 0.3}

_known: dict[Hashable, Taken | None] = {}


@dataclasses.dataclass(frozen=True)
class Taken:
    """A tensor that an optimizer takes as its rate. is_exact: with the bits that a float gives."""

    dtype: torch.dtype
    is_exact: bool


class _Waits(RuntimeError):
    """The optimizer reads the rate back."""


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where Python asks for the value of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _Waits
        return func(*args, **(kwargs or {}))


def taken_by(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Taken | None:
    """What the group's rate may be in place of a float; None for nothing else. Not while capturing."""
    kind = type(optimizer)
    if not is_of_pytorch(optimizer) or group.get("differentiable"):
        return None
    options = _options(optimizer, group)
    parameters = {(parameter.device, parameter.dtype) for parameter in group["params"]}
    devices = {device for device, _ in parameters}
    if options is None or len(devices) != 1:
        return None
    device = devices.pop()
    dtypes = tuple(sorted({dtype for _, dtype in parameters}, key=str))
    key = (kind, device, dtypes, torch.get_default_dtype(), tuple(options.items()))
    if key not in _known:
        _known[key] = _probe(functools.partial(_steps, kind, options, dtypes, device))
    return _known[key]


def _options(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any] | None:
    """What distinguishes forms: switches, and which numbers are zero. None if there are tensors."""
    found: dict[str, Any] = {}
    for name in optimizer.defaults:
        value = group.get(name)
        parts = value if isinstance(value, (tuple, list)) else (value,)
        if any(isinstance(part, torch.Tensor) for part in parts):
            return None
        if value is None or isinstance(value, (bool, str)):
            found[name] = value
        elif name in _LARGE:
            found[name] = _LARGE[name] if value != 0 else 0.0
    return found


def _probe(steps: Callable[[torch.dtype | None], list[torch.Tensor]]) -> Taken | None:
    possible = None
    try:
        expected = steps(None)
    except Exception as error:  # it has no such form
        signal_exceptions.pass_on(error)
        return None
    for dtype in _DTYPES:
        try:
            found = steps(dtype)
        except Exception as error:  # of the optimizer, or _Waits
            signal_exceptions.pass_on(error)
            continue
        pairs = zip(expected, found, strict=True)
        if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
            return Taken(dtype, True)
        possible = possible or Taken(dtype, False)
    return possible


def _steps(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    rate_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Parameters and state after a few steps. rate_dtype: of the rates, or None for floats."""
    generator = torch.Generator().manual_seed(0)

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return made.to(dtype).to(device)

    with torch.inference_mode(False), torch.no_grad():
        parameters = [torch.nn.Parameter(values(shape, dtype)) for dtype in dtypes for shape in _SHAPES]
        optimizer: Any = kind(parameters, lr=_RATES[0])  # type: ignore[call-arg]
        step: Any = kind.step
        if getattr(step, "hooked", False):  # by hooks that a program has registered for all optimizers
            step = step.__wrapped__
        (group,) = optimizer.param_groups
        group.update(options)
        if options.get("fused"):  # Adagrad has made its state
            for state in optimizer.state.values():
                state["step"] = state["step"].to(device)
        for i, rate in enumerate(_RATES):
            for parameter in parameters:
                parameter.grad = values(tuple(parameter.shape), parameter.dtype)
            group["lr"] = rate
            if rate_dtype is None or i == 0:  # in the first one, state is made of numbers
                step(optimizer)
                continue
            group["lr"] = torch.full((), rate, dtype=rate_dtype, device=device)
            with _NoReads():  # type: ignore[no-untyped-call]
                step(optimizer)
    state = [value for of in optimizer.state.values() for value in of.values()]
    return [*parameters, *(value for value in state if isinstance(value, torch.Tensor))]
