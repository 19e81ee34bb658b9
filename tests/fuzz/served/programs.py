"""Programs with random steps over tensors of many kinds."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .parts import PARTS


class Sub(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("turned", torch.randn(4, 4).t())
        self.register_buffer("count", torch.zeros(()))
        self.more = nn.ParameterList([torch.randn(4) for _ in range(3)])


class Program:
    """One instance is called as it is, the others graphed: all do the same with the same seed."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        torch.manual_seed(seed)
        r = self.r
        self.model = m = Model()
        self.ema = copy.deepcopy(m.a).requires_grad_(False)
        self.flat = torch.zeros(12)
        self.part = self.flat[4:8]
        self.alias = self.flat.data
        self.detached = self.flat.detach()
        self.plain = torch.ones(4)
        self.other = torch.zeros(4)
        self.cache = torch.zeros(4)
        self.written = torch.zeros(4)
        self.complex = torch.randn(4, dtype=torch.complex64)
        self.sub = torch.ones(4).as_subclass(Sub)
        with torch.inference_mode():
            self.inferred = torch.ones(4)
        if r.random() < 0.3:
            m.b.weight = m.a.weight
        if r.random() < 0.2:
            parametrize.register_parametrization(m.b, "bias", Doubling())
        kinds: list[Callable[[Any], Any]] = [
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
            lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        ]
        self.trains = r.random() < 0.6
        self.optimizer = r.choice(kinds)(m.parameters()) if self.trains else None
        self.zeroes = r.choice(("before", "after", "to zero", "never"))
        self.parts = r.sample(PARTS, r.randint(1, 8))
        self.kept: list[Any] = []

    def step(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        with torch.set_grad_enabled(self.trains):
            m = self.model
            if self.trains:
                if self.zeroes == "before":
                    self.optimizer.zero_grad()
                elif self.zeroes == "to zero":
                    self.optimizer.zero_grad(set_to_none=False)
                h = m.norm(m.b(m.a(x.expand(3, 4) * torch.arange(1.0, 4.0)[:, None]).relu()))
                loss = (h * sum(m.more)).square().sum()
                loss.backward()
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                self.optimizer.step()
                if self.zeroes == "after":
                    self.optimizer.zero_grad()
                y = y + loss.detach()
        with torch.no_grad():
            for part in self.parts:
                y = part(self, x, y)
        return y.clamp(-1000, 1000)

    def call(self, i: int) -> Any:
        return self.run(torch.full((4,), float(i % 5)))

    def keep_finite(self) -> None:
        for tensor in self.tensors().values():
            if not tensor.is_complex() and tensor.layout == torch.strided:
                tensor.data.clamp_(-100, 100)

    run: Callable[..., Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for module, name in ((self.model, "model"), (self.ema, "ema")):
            found |= {f"{name}.{k}": v for k, v in module.state_dict(keep_vars=True).items()}
        found |= {k: v for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        for k, p in self.model.named_parameters():
            if p.grad is not None:
                found[f"{k}.grad"] = p.grad
            if self.optimizer is not None:
                state = self.optimizer.state.get(p, {})
                found |= {f"{k}.{n}": v for n, v in state.items() if isinstance(v, torch.Tensor)}
        return found

    def some(self) -> torch.Tensor:
        found = self.tensors()
        return found[self.r.choice(sorted(found))]
