"""What PyTorch's compiler must know of PyGraph's operators (bindings/ops.cc): shapes and devices."""

from __future__ import annotations

import torch

from pygraph import runtime

# Inductor must leave these outside of graphs: they read CPU memory.
OUTSIDE_OF_GRAPHS = ["pygraph::to_device", "pygraph::scalars_to_device"]

runtime.engine()  # registers the operators


@torch.library.register_fake("pygraph::to_device")  # type: ignore[untyped-decorator]
def _to_device(host: torch.Tensor, device: torch.device, constant: bool) -> torch.Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=device)


@torch.library.register_fake("pygraph::scalars_to_device")  # type: ignore[untyped-decorator]
def _scalars_to_device(scalars: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.empty(len(scalars), dtype=scalars[0].dtype, device=device)


@torch.library.register_fake("pygraph::keep_on_cpu")  # type: ignore[untyped-decorator]
def _keep_on_cpu(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
