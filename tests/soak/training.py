"""Long training: thousands of steps by ``pygraph.graph``, bit by bit beside the uncaptured steps.

    python -m tests.soak.training                                  on an H200: some minutes
    python -m tests.soak.training --steps 1000 --other-steps 100 --only AdamW

A step of a small network with dropout, AMP in bfloat16 and gradient clipping, and a schedule that moves
the rate after each step. Fused AdamW and SGD make 10 000 steps, each other optimizer of ``torch.optim``
500, in each form that can have a graph. The uncaptured program runs twice: where it differs from
itself, nothing can be said. An adapted optimizer is compared with the uncaptured step of the same form.
Ends with code 1 if a result differs, or if a form that must have a graph made too few replays.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import pygraph

_BATCHES = 64  # different ones
_WITHOUT_GRAPHS = 20  # of the steps: observed, recorded, audited


@dataclasses.dataclass(frozen=True)
class Form:
    """Of an optimizer. is_adapted: with ``adapt_optimizers``. is_scheduled: whether the rate moves.
    has_graph: whether its steps must be replays."""

    name: str
    options: dict[str, Any]
    is_adapted: bool = False
    is_scheduled: bool = True
    has_graph: bool = True
    is_long: bool = False

    def __str__(self) -> str:
        words = [self.name, *(f"{name}={value}" for name, value in self.options.items())]
        words += ["adapted"] if self.is_adapted else []
        return " ".join(words + ([] if self.is_scheduled else ["fixed rate"]))


FORMS = (
    Form("AdamW", {"fused": True}, is_long=True),
    Form("SGD", {"fused": True, "momentum": 0.9}, is_adapted=True, is_long=True),
    Form("Adam", {"fused": True, "amsgrad": True}),
    Form("SGD", {"fused": True}, is_scheduled=False),
    *(
        Form(name, {}, is_adapted=True)
        for name in (
            "Adam",
            "AdamW",
            "NAdam",
            "RAdam",
            "Adamax",
            "RMSprop",
            "Rprop",
            "Adadelta",
            "ASGD",
        )
    ),
    *(Form(name, {"capturable": True}, is_scheduled=False) for name in ("Adam", "RAdam", "RMSprop")),
    Form("SGD", {"momentum": 0.9, "nesterov": True}, is_scheduled=False),
    Form("Muon", {}, is_scheduled=False),
    *(Form(name, {}, has_graph=False) for name in ("SGD", "Muon", "Adagrad", "Adafactor")),
)


class Training:
    """A network, its optimizer, its schedule and the step, the same at each construction."""

    def __init__(self, form: Form, steps: int, device: str) -> None:
        torch.manual_seed(0)
        self._device = torch.device(device)
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(32, 96), torch.nn.LayerNorm(96), torch.nn.GELU(), torch.nn.Dropout(0.1)),
            *(
                torch.nn.Linear(96, 96, bias=form.name != "Muon"),
                torch.nn.GELU(),
                torch.nn.Dropout(0.1),
            ),
            torch.nn.Linear(96, 10),
        ).to(device)
        parameters = [p for p in self.model.parameters() if form.name != "Muon" or p.dim() == 2]
        self._optimizer = getattr(torch.optim, form.name)(parameters, lr=1e-3, **form.options)
        self._scheduler = None
        if form.is_scheduled:
            self._scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self._optimizer, 2e-3, steps + 1, cycle_momentum=False
            )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = F.cross_entropy(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def run(self, step: Callable[..., torch.Tensor], steps: int) -> list[torch.Tensor]:
        """The loss of each step, then all that the training has changed."""
        batches = _batches(self._device)
        losses = torch.empty(steps, device=self._device)
        for i in range(steps):
            losses[i] = step(*batches[i % _BATCHES]).detach()
            if self._scheduler is not None:
                self._scheduler.step()
        states = [
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [x.detach().cpu() for x in (losses, *self.model.state_dict().values(), *states)]


def _batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 32, generator=generator).to(device),
            torch.randint(0, 10, (32,), generator=generator).to(device),
        )
        for _ in range(_BATCHES)
    ]


def difference(expected: list[torch.Tensor], found: list[torch.Tensor]) -> str:
    """The first loss or tensor that differs in a bit; empty for none."""
    losses = expected[0].ne(found[0]).nonzero()
    if losses.numel():
        return f"the loss of step {losses[0].item()}"
    for i, (a, b) in enumerate(zip(expected[1:], found[1:], strict=True)):
        if not torch.equal(a, b):
            return f"tensor {i} of the state"
    return ""


def train(form: Form, steps: int, device: str) -> dict[str, Any]:
    """One row of the report."""

    def uncaptured() -> list[torch.Tensor]:
        at = Training(form, steps, device)
        step = pygraph.graph(at.step, adapt_optimizers=True).prepared() if form.is_adapted else at.step
        return at.run(step, steps)

    pygraph.reset()
    expected = uncaptured()
    itself = difference(expected, uncaptured())
    at = Training(form, steps, device)
    # Every graph is used, and counted.
    graphed = pygraph.graph(at.step, adapt_optimizers=form.is_adapted, select="always")
    start = time.perf_counter()
    found = at.run(graphed, steps)
    seconds = time.perf_counter() - start
    rows = pygraph.stats()
    replays = sum(row.replays for row in rows)
    wrong = "" if itself else difference(expected, found)
    missing = form.has_graph and replays < steps - _WITHOUT_GRAPHS
    return {
        "optimizer": str(form),
        "steps": steps,
        "replays": replays,
        "seconds": round(seconds, 2),
        "uncaptured_differs_from_itself": itself,
        "differs": wrong,
        "reasons": sorted({row.reason for row in rows if row.reason}),
        "passed": not wrong and not missing,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000, help="of fused AdamW and SGD")
    parser.add_argument("--other-steps", type=int, default=500)
    parser.add_argument("--only", nargs="+", default=[], help="optimizers")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default="build/training.json")
    args = parser.parse_args(arguments)
    rows = []
    for form in FORMS:
        if not args.only or form.name in args.only:
            if not hasattr(torch.optim, form.name):  # in this release
                continue
            rows.append(train(form, args.steps if form.is_long else args.other_steps, args.device))
            print(json.dumps(rows[-1]), flush=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows and all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
