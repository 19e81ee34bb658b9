"""What PyGraph's own operators (bindings/tensors/operators.cc) do to fake tensors.

Imported when the first program is transformed, and not before: PyTorch looks for the source of each of
these functions, among all modules, which takes some milliseconds. Programs from a cache need none.
"""

from __future__ import annotations

import torch

import pygraph.operators  # noqa: F401  registers the operators


@torch.library.register_fake("pygraph::to_device")  # type: ignore[untyped-decorator]
def _to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(host, device=device)


@torch.library.register_fake("pygraph::scalars_to_device")  # type: ignore[untyped-decorator]
def _scalars_to_device(scalars: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.empty(len(scalars), dtype=scalars[0].dtype, device=device)


@torch.library.register_fake("pygraph::keep_on_cpu")  # type: ignore[untyped-decorator]
def _keep_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
