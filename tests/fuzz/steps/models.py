"""Random small models, whose Python reads flags, lists and numbers."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


class Scale(torch.autograd.Function):
    """With a state of its own in its class."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = Scale.factor
        return x * w * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient * w * ctx.factor, (gradient * x * ctx.factor).sum(0)


class Layer(torch.nn.Module):
    """One of several kinds, chosen by the program's seed."""

    def __init__(self, r: random.Random, width: int) -> None:
        super().__init__()
        self.kind = r.choice(
            ("plain", "scaled", "flag", "moving", "checkpointed", "routed", "gated", "views", "written")
        )
        self.linear: Any = torch.nn.Linear(width, width, bias=r.random() < 0.8)
        wrap = r.choice(
            (None, None, None, parametrizations.weight_norm, parametrizations.spectral_norm)
        )
        if wrap is not None:
            self.linear = wrap(self.linear)
        norms = (torch.nn.Identity, torch.nn.BatchNorm1d, torch.nn.LayerNorm)
        kind = r.choice(norms)
        self.norm = kind() if kind is torch.nn.Identity else kind(width)
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros(()))
        self.flag, self.expert, self.gain = True, 0, 1.0
        self.experts = [torch.nn.Linear(width, width) for _ in range(2)]  # not submodules
        self.options = {"slope": 0.1, "act": "relu"}

    def extra_parameters(self) -> list[torch.nn.Parameter]:
        return [p for of in self.experts for p in of.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpointed" and torch.is_grad_enabled():
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.linear(x)) * self.gain
        if self.kind == "scaled":
            h = Scale.apply(h, self.weight)
        elif self.kind == "flag" and self.flag:
            h = h * self.weight
        elif self.kind == "moving" and self.training:
            with torch.no_grad():
                self.mean.lerp_(h.detach().mean(0), 0.1)
                self.seen.add_(1)
            h = h - self.mean
        elif self.kind == "routed":
            h = h + self.experts[self.expert](x)
        elif self.kind == "gated":
            h = torch.where(h > self.seen, h, h * self.weight)
        elif self.kind == "views":
            a, b = h.chunk(2, -1)
            h = torch.cat((b, a * 2), -1)
        elif self.kind == "written":
            h = h.clone()
            h[:, 0] += 1
            h.mul_(2)
        if self.options["act"] == "relu":
            return F.leaky_relu(h, self.options["slope"])
        return torch.tanh(h) + x


class Model(torch.nn.Module):
    def __init__(self, r: random.Random, width: int = 4) -> None:
        super().__init__()
        self.layers = [Layer(r, width) for _ in range(r.randint(1, 3))]
        self.inner = torch.nn.ModuleList(self.layers)
        self.head = torch.nn.Linear(width, 3)
        if r.random() < 0.2:
            self.layers[-1].weight = self.layers[0].weight  # tied
        self.skip: set[int] = set()
        self.cast = r.random() < 0.15

    def every_parameter(self) -> list[torch.nn.Parameter]:
        return [*self.parameters(), *[p for of in self.layers for p in of.extra_parameters()]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            for i, layer in enumerate(self.layers):
                if i not in self.skip:
                    x = layer(x)
            out: torch.Tensor = self.head(x)
        return out.float()
