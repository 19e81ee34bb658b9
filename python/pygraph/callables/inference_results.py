"""Results that a callable makes in another inference mode than the one that its call is made in.

A tensor that is made under ``torch.inference_mode`` is an inference tensor: autograd refuses to save
it, and it cannot be written to outside of that mode. A replay makes all tensors in the mode of the
call. Those that were of the other kind when the callable was observed are made once more, on the same
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph.callables.host.kinds import is_of
from pygraph.gpu.fingerprint import marked_as


def inference_among(leaves: Sequence[Any]) -> frozenset[int]:
    """Positions of tensors of inference mode."""
    return frozenset(i for i, x in enumerate(leaves) if is_of(x, torch.Tensor) and x.is_inference())


def as_observed(
    leaves: Sequence[Any], inference: frozenset[int], arguments: Sequence[torch.Tensor]
) -> Sequence[Any]:
    """The results of a replay. inference: positions of those that are to be tensors of inference mode.
    (A result that is an argument itself is what that is.)"""
    if not inference and not torch.is_inference_mode_enabled():
        return leaves
    made = {id(tensor): tensor for tensor in arguments}
    found = list(leaves)
    for i, leaf in enumerate(leaves):
        if is_of(leaf, torch.Tensor):
            if id(leaf) not in made:
                is_right = leaf.is_inference() == (i in inference)
                made[id(leaf)] = leaf if is_right else _remade(leaf, i in inference)
            found[i] = made[id(leaf)]
    return found


def _remade(tensor: torch.Tensor, is_inference: bool) -> torch.Tensor:
    with torch.inference_mode(is_inference), torch.no_grad():
        made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made = made.set_(marked_as(tensor, tensor))  # type: ignore[call-overload]
        return marked_as(made, tensor)
