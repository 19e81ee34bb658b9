"""Gradients from before a call that the call uses: what a graph of it depends on, and which of them a
replay must tell autograd that it wrote to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from pygraph import runtime
from pygraph.callables.observation import Gradient
from pygraph.callables.saved_tensors import address_of


@dataclasses.dataclass
class UsedGradients:
    """tensors: whose gradients are used. layouts: of these gradients, by the engine. counted: those of
    ``tensors`` whose gradients the call has written to, as far as autograd was told.

    The callable may reach the memory of such a gradient through other tensors, too. neighbours: these;
    beside: for each of them, the tensor that has the gradient. written: positions of neighbours that
    the call has written to, as far as autograd was told.

    sharing, shared_with: tensors whose gradients lie in one memory with each other's, such as parts of
    one flat tensor.
    """

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    layouts: bytes = b""
    counted: list[torch.Tensor] = dataclasses.field(default_factory=list)
    neighbours: list[torch.Tensor] = dataclasses.field(default_factory=list)
    beside: list[torch.Tensor] = dataclasses.field(default_factory=list)
    written: list[int] = dataclasses.field(default_factory=list)
    sharing: list[torch.Tensor] = dataclasses.field(default_factory=list)
    shared_with: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def hold(self) -> bool:
        """Whether the gradients lie in memory as they did."""
        if not self.tensors:
            return True
        engine = runtime.engine()
        if engine.gradient_layouts(self.tensors) != self.layouts:
            return False
        if not engine.gradients_share_memory(self.sharing, self.shared_with):
            return False
        return engine.gradients_lie_in(self.beside, self.neighbours)

    def bump_versions(self) -> None:
        """Of a replay, which leaves the gradients that it makes afterwards."""
        if self.tensors:
            runtime.engine().bump_gradient_versions(self.counted)
            runtime.engine().bump_versions(self.neighbours, self.written)


class OldGradients:
    """Where gradients lie before an observed call."""

    def __init__(self, tensors: Sequence[torch.Tensor], reachable: Sequence[torch.Tensor]) -> None:
        """tensors: that may have them. reachable: all that the callable reaches."""
        by_address: dict[int, list[torch.Tensor]] = {}
        for tensor in reachable:
            by_address.setdefault(address_of(tensor), []).append(tensor)
        by_address.pop(0, None)  # of what has no memory
        layouts_of = runtime.engine().gradient_layouts
        addresses = [address_of(tensor.grad) for tensor in tensors]
        self._of = {
            id(tensor): (layouts_of([tensor]), address, by_address.get(address, []))
            for tensor, address in zip(tensors, addresses, strict=True)
        }

    def used(self, gradients: Sequence[Gradient], written: Sequence[torch.Tensor]) -> UsedGradients:
        """After the call. gradients: what it has done to them. written: tensors that it has written to,
        as far as autograd was told."""
        found = UsedGradients([gradient.tensor for gradient in gradients if gradient.is_used])
        found.counted = [of.tensor for of in gradients if of.is_used and of.is_counted]
        known = set(map(id, written))
        first: dict[int, torch.Tensor] = {}  # by address
        for tensor in found.tensors:
            layouts, address, neighbours = self._of[id(tensor)]
            if address and first.setdefault(address, tensor) is not tensor:
                found.sharing.append(tensor)
                found.shared_with.append(first[address])
            found.layouts += layouts
            found.neighbours += neighbours
            found.beside += [tensor] * len(neighbours)
        found.written = [i for i, tensor in enumerate(found.neighbours) if id(tensor) in known]
        return found
