"""A program with something for each patch, and what can be seen of its guards and code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph.torch_patches import sources
from pygraph.torch_patches.table import PATCHES

# Those that a program gets where it asks for them. (The others are applied by the backend, on demand.)
WITH_A_PROGRAM = tuple(patch for patch in PATCHES if patch.scope != "on demand")
# The patches that fit the installed release of PyTorch. Others are of no use there.
FITTING = frozenset(patch.name for patch in WITH_A_PROGRAM if sources.release() in patch.releases)


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test of a patch where that is left off."""
    reason = f"{name} is left off for PyTorch {sources.release()}"
    return pytest.mark.skipif(name not in FITTING, reason=reason)


class Layer(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), scale))
        self.bias = nn.Parameter(torch.full((3,), scale / 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return x + self.bias if type(self).forward is Layer.forward else x


class Model(nn.Module):
    """Has something for each patch."""

    factor = np.float64(0.5)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(1.0 + i) for i in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.factor


def code_of(function: Any) -> Any:
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    return entry.code


def loads_parameters_at_once(function: Any) -> bool:
    return any(name.startswith("__pygraph_parameters") for name in code_of(function).co_names)


def described(function: Any) -> str:
    """Guards and code of a program, without addresses and counters."""
    (entry,) = _debug_get_cache_entry_list(function.__code__)  # type: ignore[attr-defined]
    instructions = " ".join((*entry.code.co_names, entry.code.co_code.hex()))
    text = re.sub(r"^.*(?:Guard latency|_guards.py).*$", "", str(entry.guard_manager), flags=re.M)
    counted = r"(?<=compiled_fn_)\w+|0x[0-9a-f]+|\d{4,}|_c\d+(?:_\d+)?|(?<=dict___)\d+|(?<=tmp_)\d+"
    return re.sub(counted, "", text + instructions)
