"""What learning rates that graphs follow are called in reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def rate_names(
    optimizers: Iterable[torch.optim.Optimizer], groups: Iterable[dict[str, Any]]
) -> tuple[str, ...]:
    """Of these groups of the optimizers: ``AdamW.param_groups[0]['lr']``."""
    wanted = set(map(id, groups))
    return tuple(
        f"{type(optimizer).__name__}.param_groups[{i}]['lr']"
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
        if id(group) in wanted
    )
