"""The definition of a workload of whole training steps.

Each variant of a workload has a program of its own, built from the same seed: modules, optimizers and a
step over them, as in a training script. The variant decides whether modules are compiled (variants.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
Step = Callable[..., tuple[torch.Tensor, ...]]  # a batch's tensors -> losses, detached


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is built.

    compile: makes what the step calls in place of a module. capturable: for optimizers whose step is
    captured by hand, which PyTorch refuses else; fused kernels are the same.
    """

    device: str
    compile: Callable[[nn.Module], Callable[..., Any]]
    capturable: bool = False

    def adamw(self, parameters: Iterable[torch.Tensor]) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, lr=3e-4, fused=True, capturable=self.capturable)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step with all that it trains. modules: also those that no optimizer trains, such as targets."""

    step: Step
    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    values: Sequence[torch.Tensor] = ()  # that are in no module

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, those that are shared once."""
        found = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        return list({id(t): t for t in (*found, *self.values)}.values())

    def restart(self, values: Sequence[torch.Tensor]) -> None:
        """Makes it what it was when its tensors had these values and no step had been made.

        Everything keeps its memory, so that graphs stay valid.
        """
        with torch.no_grad():
            for tensor, value in zip(self.tensors(), values, strict=True):
                tensor.copy_(value)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()


@dataclasses.dataclass(frozen=True)
class StepWorkload:
    """One row of the table."""

    name: str
    batch: int
    build: Callable[[Setting], Program]
    make_batch: Callable[[int, str], Batch]  # batch size, device
    mode: str = "step"

    @property
    def key(self) -> str:
        return f"{self.name}/{self.mode}"


def train(
    loss: torch.Tensor, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Everything of a step after the loss."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def supervised(
    setting: Setting, model: nn.Module, loss_of: Callable[[Any, torch.Tensor], torch.Tensor]
) -> Program:
    """One model, one optimizer, batches of inputs and targets."""
    model = model.to(setting.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = setting.adamw(parameters)
    call = setting.compile(model)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = loss_of(call(inputs), targets)
        train(loss, parameters, optimizer)
        return (loss.detach(),)

    return Program(step, [model], [optimizer])
