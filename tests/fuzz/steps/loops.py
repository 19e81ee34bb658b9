"""One random training loop: what its step does, and what is done between the calls.

A program is made twice from one seed. One of the two calls its step, the other one a graphed step. All
that can be told apart must be equal after each call: results and how they share memory, parameters,
gradients, moments, buffers, what is on the host, and what is raised.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .models import Model, Scale

SETTINGS: dict[str, Any] = {"smoothing": 0.0}


@dataclasses.dataclass
class Config:
    weight: float = 1.0
    clip: str = "norm"
    penalty: bool = False
    norm: float = 1.0


class Program:
    """What the graphed callable can reach."""

    def __init__(self, r: random.Random) -> None:
        self.model = Model(r)
        self.config = Config(clip=r.choice(("norm", "value", "each", "none", "foreach", "own")))
        self.config.penalty = r.random() < 0.15
        self.optimizer: Any = None
        self.scheduler: Any = None  # if the step makes its steps
        self.ema = copy.deepcopy(self.model) if r.random() < 0.3 else None
        if self.ema is not None:
            self.ema.requires_grad_(False)
        self.zero = r.choice(("first", "last", "first", "outside", "to zero", "by hand", "never"))
        self.returns = r.choice(("loss", "tuple", "dict", "views", "nothing", "numbers", "state"))
        self.by_grad = r.random() < 0.15
        self.counts: dict[str, int] = defaultdict(int)
        self.counted = r.random() < 0.05
        self.log: list[Any] = []
        self.logs, self.fails = False, False
        scale = 1.0

        def closed(loss: torch.Tensor) -> torch.Tensor:
            return loss * scale

        def set_scale(value: float) -> None:
            nonlocal scale
            scale = value

        self.closed, self.set_scale = closed, set_scale

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        found = F.cross_entropy(out, y, label_smoothing=SETTINGS["smoothing"]) * self.config.weight
        if self.config.penalty and torch.is_grad_enabled() and self.model.head.weight.requires_grad:
            (g,) = torch.autograd.grad(found, [self.model.head.weight], create_graph=True)
            found = found + g.square().sum() * 0.1
        return self.closed(found)

    def clip(self) -> None:
        of, parameters = torch.nn.utils, self.model.every_parameter()
        kind = self.config.clip
        if kind in ("norm", "foreach"):
            of.clip_grad_norm_(parameters, self.config.norm, foreach=kind == "foreach" or None)
        elif kind == "value":
            of.clip_grad_value_(parameters, 0.1)
        elif kind == "each":
            for p in parameters:
                of.clip_grad_norm_([p], 0.5)
        elif kind == "own":
            with torch.no_grad():
                found = [p.grad for p in parameters if p.grad is not None]
                if found:
                    total = torch.stack([g.norm() for g in found]).norm()
                    for g in found:
                        g.div_(total + 1)

    def step(self, batches: list[tuple[torch.Tensor, torch.Tensor]], flag: bool = True) -> Any:
        if self.zero == "first":
            self.optimizer.zero_grad()
        losses = []
        for x, y in batches:
            loss = self.loss(x, y) / len(batches)
            if self.by_grad:
                need = [p for p in dict.fromkeys(self.model.every_parameter()) if p.requires_grad]
                for p, g in zip(need, torch.autograd.grad(loss, need, allow_unused=True), strict=True):
                    p.grad = g
            else:
                loss.backward()
            losses.append(loss)
        self.clip()
        if self.fails:
            raise ValueError("asked for")
        if self.counted:
            self.counts["steps"] += 1
        if self.logs:
            self.log.append(len(batches))
        if flag:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None and flag:
            with torch.no_grad():
                ours, theirs = list(self.ema.parameters()), list(self.model.parameters())
                if self.config.weight > 0.4:
                    torch._foreach_lerp_(ours, theirs, 0.1)
                else:
                    for a, b in zip(ours, theirs, strict=True):
                        a.mul_(0.9).add_(b, alpha=0.1)
        if self.zero == "last":
            self.optimizer.zero_grad()
        elif self.zero == "to zero":
            self.optimizer.zero_grad(set_to_none=False)
        elif self.zero == "by hand":
            for p in self.model.every_parameter():
                p.grad = None
        return self.result(losses)

    def result(self, losses: list[torch.Tensor]) -> Any:
        loss = losses[-1]
        if self.returns == "loss":
            return loss
        if self.returns == "tuple":
            return loss, loss, torch.stack([of.detach() for of in losses])
        if self.returns == "dict":
            return {"loss": loss.detach(), "lr": 0.5, "n": [len(losses), None]}
        if self.returns == "views":
            values = torch.stack([of.detach() for of in losses])
            return values, values[:1], values.view(-1)
        if self.returns == "numbers":
            return len(losses), self.config.weight
        if self.returns == "state":
            return self.model.head.weight, loss.detach()
        return None


class Loop:
    """wrap: what makes a graphed callable of one."""

    def __init__(self, seed: int, wrap: Callable[[Any], Any]) -> None:
        torch.manual_seed(seed)
        r = self.r = random.Random(seed)
        SETTINGS["smoothing"], Scale.factor = 0.0, 1.0
        self.of = Program(r)
        self.make_optimizer()
        self.kind = r.choice(("step", "step", "step", "module", "loss"))
        self.logs = r.choice((False, False, False, False, False, "every", "third"))
        self.size, self.chunks, self.accumulates = 6, 1, r.random() < 0.2
        self.context: Callable[[], Any] = torch.enable_grad
        self.fails_at = r.randrange(60) if r.random() < 0.1 else -1
        self.number = 0
        self.hooks: list[Any] = []
        self.versions: dict[int, tuple[torch.Tensor, int]] = {}  # with what each was counted of
        self.kept: list[torch.Tensor] = []
        self.scheduler: Any = None
        if r.random() < 0.3:
            of = torch.optim.lr_scheduler
            kinds = (
                lambda o: of.StepLR(o, 7, 0.5),
                lambda o: of.CosineAnnealingLR(o, 10),
                lambda o: of.LambdaLR(o, lambda epoch: 1.0 if epoch < 9 else 0.3),
                lambda o: of.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
            )
            self.scheduler = r.choice(kinds)(self.of.optimizer)
            if r.random() < 0.1:
                self.scheduler, self.of.scheduler = None, self.scheduler
        made = {"step": self.of.step, "module": self.of.model, "loss": self.of.loss}[self.kind]
        self.run = wrap(made)

    def make_optimizer(self) -> None:
        r, parameters = self.r, self.of.model.every_parameter()
        parameters = list(dict.fromkeys(parameters))
        half = len(parameters) // 2
        groups: Any = parameters
        if r.random() < 0.3:
            groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 0.01}]
        of = torch.optim
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: of.SGD(groups, lr=0.05),
            lambda: of.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
            lambda: of.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True),
            lambda: of.AdamW(groups, lr=0.01, fused=True),
            lambda: of.Adam(groups, lr=0.01, fused=True, amsgrad=True),
            lambda: of.Adam(groups, lr=0.01, capturable=True),
            lambda: of.AdamW(groups, lr=torch.tensor(0.01), capturable=True, foreach=True),
            lambda: of.RMSprop(groups, lr=0.01, capturable=True, momentum=0.5),
            lambda: of.NAdam(groups, lr=0.01, capturable=True),
            lambda: of.Adam(groups, lr=0.01),
        )
        self.of.optimizer = r.choice(kinds)()

    # One call, and what can be told afterwards.

    def call(self) -> Any:
        self.number += 1
        self.of.fails = self.number == self.fails_at
        self.of.logs = self.logs == "every" or (self.logs == "third" and self.number % 3 == 0)
        generator = torch.Generator().manual_seed(self.number)
        if self.of.zero == "outside":
            self.of.optimizer.zero_grad()
        dtype = self.of.model.head.weight.dtype
        batches = [
            (
                torch.randn(self.size, 4, generator=generator).to(dtype),
                torch.randint(0, 3, (self.size,), generator=generator),
            )
            for _ in range(self.chunks)
        ]
        with self.context():
            if self.kind == "step":
                found = self.run(batches, not self.accumulates or self.number % 2 == 0)
            else:
                found = self.outside(*batches[0])
        if self.scheduler is not None:
            self.scheduler.step()
        return found

    def outside(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        """A loop around a graphed model, or a graphed loss."""
        if self.of.fails:
            x = x[:, :3]
        out = self.run(x) if self.kind == "module" else self.run(x, y)
        loss = F.cross_entropy(out, y) if self.kind == "module" else out
        if not loss.requires_grad:
            return loss
        again = self.number % 5 == 4
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
        self.of.optimizer.step()
        self.of.optimizer.zero_grad()
        return out

    def seen(self) -> list[Any]:
        """All that a program could tell."""
        parameters = [*self.of.model.every_parameter()]
        found: list[Any] = [*parameters]
        found += [p.requires_grad for p in parameters]
        found += [p.grad for p in parameters]
        found += list(self.of.model.buffers())
        found += [] if self.of.ema is None else [*self.of.ema.parameters()]
        for p in dict.fromkeys(parameters):
            of = self.of.optimizer.state.get(p, {})
            found += [of[name] for name in sorted(of)]
        found += [group["lr"] for group in self.of.optimizer.param_groups]
        return [*found, dict(self.of.counts), list(self.of.log), *self.kept]

    def written(self) -> list[bool]:
        """To which parameters and buffers autograd has seen writes since this was asked last."""
        kept = [*self.of.model.every_parameter(), *self.of.model.buffers()]
        found = [self.versions.get(id(t), (t, t._version))[1] != t._version for t in kept]
        self.versions = {id(t): (t, t._version) for t in kept}
        return found
