"""What PyTorch's compiler must know of operators: PyGraph's own (bindings/ops.cc), and which wait."""

from __future__ import annotations

import torch

from pygraph import runtime

# They always wait for the GPU, to see whether they converged. One of them in a partition would keep all
# of it uncaptured. (Not for what waits with some arguments only, as histc does without bounds.)
WAITING = ["aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig"]

# Inductor must leave these outside of graphs; PyGraph's own, because they read CPU memory.
OUTSIDE_OF_GRAPHS = ["pygraph::to_device", "pygraph::scalars_to_device", *WAITING]

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
