"""One model that is called again and again, each result compared with the first ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from .models import Model

INPUTS = 4
# Of a result's norm: between compilers, which fuse in other ways; and between runs where the order of
# additions is left to chance. Nothing is tolerated elsewhere.
TOLERANCE = 1e-2


class Load:
    """A model in inference or training, called by one thread."""

    def __init__(self, model: Model, trains: bool, backend: str, device: str) -> None:
        self.name = f"{model.name} {'training' if trains else 'inference'}"
        self.model = model
        self._trains = trains
        self._device = device
        generator = torch.Generator().manual_seed(len(model.name))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            module = model.make()
        self._module = copy.deepcopy(module).to(device).train(trains)
        self._inputs = [
            tuple(t.to(device) for t in model.inputs(number, generator)) for number in range(INPUTS)
        ]
        self._call: Any = self._module
        if backend != "eager":
            self._call = torch.compile(self._module, backend=backend, dynamic=model.dynamic)
        self._expected: list[Tensor] = []
        self._is_exact = False
        self._flag = torch.zeros((), dtype=torch.bool, device=device)
        self.calls = 0

    def begin(self) -> list[Tensor]:
        """Calls with each input, without graphs; later results are compared with theirs."""
        self._expected = [self._result(number).clone() for number in range(INPUTS)]
        again = [self._result(number).clone() for number in range(INPUTS)]
        pairs = zip(self._expected, again, strict=True)
        self._is_exact = not self.model.draws and all(torch.equal(a, b) for a, b in pairs)
        return [result.cpu() for result in self._expected]

    def step(self) -> None:
        """One call. Does not wait for the device."""
        number = self.calls % INPUTS
        self.calls += 1
        result, expected = self._result(number), self._expected[number]
        if self.model.draws:
            wrong = ~result.isfinite().all() | (result.norm() > 2 * expected.norm() + 1)
        elif not self._is_exact or self.model.chance:
            wrong = ~((result - expected).norm() <= TOLERANCE * expected.norm())
        else:
            wrong = (result.view(torch.int32) != expected.view(torch.int32)).any()
        self._flag.logical_or_(wrong)

    def check(self) -> bool:
        """Whether a result since the last check was wrong. Waits for this thread's stream."""
        is_wrong = bool(self._flag.item())
        self._flag.zero_()
        return is_wrong

    def _result(self, number: int) -> Tensor:
        """All of one call's results, side by side."""
        if not self._trains:
            with torch.no_grad():
                return self._call(*self._inputs[number]).flatten()
        self._module.zero_grad(set_to_none=True)
        loss = self._call(*self._inputs[number]).square().mean()
        loss.backward()
        parts = [p.grad.flatten() for p in self._module.parameters() if p.grad is not None]
        return torch.cat([loss.detach().view(1), *parts])


def differs(a: list[Tensor], b: list[Tensor]) -> str:
    """How results of two backends differ, or nothing if they are as close as compilers come."""
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        distance = float((x - y).norm() / (x.norm() + 1e-6))
        if not distance <= TOLERANCE:
            return f"input {number}: {distance:.2e} of the norm"
    return ""
