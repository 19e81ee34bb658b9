"""The state of a program before calls that must leave no trace: copied, and put back afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pygraph.callables.host.host_state import HostState


class ProgramState:
    """What can be reached from some objects, as it is when this is made: tensors, their gradients,
    attributes, dictionaries, lists, closures; and PyTorch's random numbers. Copies all tensors."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """roots: a callable, and what is passed to it, by name. Raises Unseen."""
        self._host = HostState(roots)
        self._tensors = list(self._host.found.tensors.values())
        self._values = [tensor.detach().clone() for tensor in self._tensors]
        self._gradients = [gradient_of(tensor) for tensor in self._tensors]
        self._gradient_values = [None if g is None else g.clone() for g in self._gradients]
        self._random = _random_states()

    def tensors_now(self) -> dict[str, torch.Tensor]:
        """What can be reached now, by path."""
        return self._host.now().found.tensors

    def put_back(self) -> None:
        """Makes everything what it was; tensors keep their memory. May be called again."""
        self._host.restore()
        kept = (self._tensors, self._values, self._gradients, self._gradient_values)
        for tensor, value, gradient, gradient_value in zip(*kept, strict=True):
            _write(tensor, value)
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = gradient
            if gradient is not None and gradient_value is not None:
                gradient.detach().copy_(gradient_value)
        for generator, state in self._random:
            generator.set_state(state)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        target = tensor.detach()
        if target.layout == torch.strided:
            for dim, stride in enumerate(target.stride()):
                if stride == 0 and target.shape[dim] > 1:  # expanded: one element for all
                    target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
        target.copy_(value)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a leaf that requires one; None for others."""
    return tensor.grad if tensor.requires_grad and tensor.is_leaf else None


def _random_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    generators = [torch.default_generator, *on_gpus]
    return [(generator, generator.get_state()) for generator in generators]
