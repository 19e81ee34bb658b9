"""Which forms of optimizers a graph can hold. Those that count their steps on the CPU it cannot hold;
they are refused, or made capturable (docs/explanation/whole-steps.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_GROUP = re.compile(r"(?P<optimizer>.*?)\.?param_groups\[(?P<group>\d+)\]\['(?P<key>\w+)'\].*")


def is_of_pytorch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its class is one of ``torch.optim``'s, and not derived from one."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def can_be_captured_on(device: torch.device) -> bool:
    """Whether an optimizer may be capturable there."""
    return device.type == "cuda"


def adapt(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Makes PyTorch's optimizers capturable, and moves their step counts to the parameters' GPU.
    Returns the names of the classes of those that were not. Fused ones need it not."""
    found = []
    for optimizer in optimizers:
        groups = [group for group in optimizer.param_groups if _is_to_adapt(group)]
        if not groups or not is_of_pytorch(optimizer):
            continue
        for group in groups:
            group["capturable"] = True
            for parameter in group["params"]:
                _move_counts(optimizer.state.get(parameter, {}), parameter.device)
        optimizer.defaults["capturable"] = True  # for groups that are added later
        found.append(type(optimizer).__name__)
    return found


def _is_to_adapt(group: dict[str, Any]) -> bool:
    if group.get("capturable") is not False or group.get("fused") or group.get("differentiable"):
        return False
    return all(can_be_captured_on(parameter.device) for parameter in group["params"])


def _move_counts(state: dict[str, Any], device: torch.device) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != device:
            state[key] = value.to(device=device, dtype=torch.float32)


class HostCounts:
    """The step counts of optimizers that a graph would freeze, before a call."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """optimizers: by path."""
        self._optimizers = dict(optimizers)
        self._before = {path: _counts(of) for path, of in self._optimizers.items()}

    def refusal(self) -> str:
        """Why the call that was made since then cannot have a graph; empty if no count has moved."""
        for path, optimizer in self._optimizers.items():
            if _counts(optimizer) != self._before[path]:
                return (
                    f"{path} counts its steps on the CPU, which a graph would freeze; "
                    f"{_remedy(optimizer)}"
                )
        return ""


def _counts(optimizer: torch.optim.Optimizer) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    is_known = is_of_pytorch(optimizer)
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            step = state.get("step") if isinstance(state, dict) else None
            if isinstance(step, torch.Tensor) and (is_known or step.device != parameter.device):
                found.append((id(step), None if step.is_inference() else step._version))
            elif is_known and isinstance(step, (int, float)):
                found.append((id(parameter), step))
    return found


def _remedy(optimizer: torch.optim.Optimizer) -> str:
    """How an optimizer can count on the GPU."""
    kind = type(optimizer).__name__
    is_known = is_of_pytorch(optimizer)
    ways = ["make it with fused=True"] if is_known and kind in _FUSED else []
    if is_known and "capturable" in optimizer.defaults:
        ways.append("use pygraph.graph(..., adapt_optimizers=True), which makes it capturable")
    if not ways:
        return f"{kind} has no other form: call its step outside of the graph"
    return ", or ".join(ways)


def place_of(
    path: str, optimizers: Mapping[str, torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, dict[str, Any], str] | None:
    """The optimizer, its group and the key in it that a path leads to; None for another path."""
    found = _GROUP.fullmatch(path)
    optimizer = optimizers.get(found["optimizer"]) if found is not None else None
    if found is None or optimizer is None or int(found["group"]) >= len(optimizer.param_groups):
        return None
    return optimizer, optimizer.param_groups[int(found["group"])], found["key"]


def advice(path: str, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
    """What to do if a number of an optimizer, which ``path`` leads to, moves in each call. Empty for
    another path."""
    found = _GROUP.fullmatch(path)
    if found is None:
        return ""
    optimizer = optimizers.get(found["optimizer"])
    key = found["key"]
    if key in ("betas", "momentum"):
        return "keep it fixed: make the scheduler with cycle_momentum=False"
    if key != "lr" or optimizer is None:
        return "keep it fixed between calls"
    kind = type(optimizer).__name__
    if is_of_pytorch(optimizer):
        if kind in _FUSED and not optimizer.param_groups[int(found["group"])].get("fused"):
            return f"make {kind} with fused=True, whose rate a graph follows"
        if "capturable" in optimizer.defaults or kind in _FUSED:
            return "use pygraph.graph(..., adapt_optimizers=True), with which a graph follows it"
    return (
        f"{kind} takes no other rate than a number: change it rarely, or call its step outside of the "
        "graph"
    )
