"""A PPO-like loop, before and after: rollouts in a small simulated world, then epochs of minibatches.

python examples/python/ppo_training.py [--size small]

The models are tiny, so launching kernels keeps the host busy. Two functions have graphs: one that acts,
without gradients, and one that learns from a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from before_and_after import DEVICE, STEPS, arguments, compare, compiled, graphed
from torch import nn

options = arguments("a PPO-like loop", STEPS)
WIDTH, WORLDS, LENGTH, EPOCHS = {"small": (8, 4, 2, 1), "base": (256, 64, 16, 4)}[options.size]
SEEN, ACTIONS, MINIBATCHES = 16, 4, 4


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SEEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.actor, self.critic = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden).log_softmax(-1), self.critic(hidden).squeeze(-1)


def make_step(backend: str) -> Callable[[], Any]:
    model = ActorCritic().to(DEVICE)
    policy = compiled(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    pushes = torch.randn(ACTIONS, SEEN, device=DEVICE)  # what the actions do

    @torch.no_grad()
    def act(seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Draws actions; the world answers with rewards and what is seen next."""
        log_probabilities, values = policy(seen)
        actions = torch.multinomial(log_probabilities.exp(), 1)
        chosen = log_probabilities.gather(-1, actions).squeeze(-1)
        then = 0.9 * seen + 0.1 * pushes[actions.squeeze(-1)] + 0.01 * torch.randn_like(seen)
        return actions, chosen, values, -then.square().mean(-1), then

    def learn(
        seen: torch.Tensor,
        actions: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
    ) -> torch.Tensor:
        log_probabilities, values = policy(seen)
        ratio = (log_probabilities.gather(-1, actions).squeeze(-1) - old).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        loss = F.mse_loss(values, returns) - gain - 0.01 * entropy
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    act, learn = graphed(act, backend), graphed(learn, backend)
    seen = torch.randn(WORLDS, SEEN, device=DEVICE)

    def step() -> torch.Tensor:
        """A rollout, and EPOCHS over it in minibatches."""
        nonlocal seen
        rollout = []
        for _ in range(LENGTH):
            *rest, then = act(seen)
            rollout.append((seen, *rest))
            seen = then
        returns = torch.zeros(WORLDS, device=DEVICE)
        targets = []
        for *_, reward in reversed(rollout):
            returns = reward + 0.99 * returns
            targets.insert(0, returns)
        states, actions, old, values, _ = (torch.cat(part) for part in zip(*rollout, strict=True))
        target = torch.cat(targets)
        advantages = target - values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(target), device=DEVICE).chunk(MINIBATCHES):
                batch = (tensor[chosen] for tensor in (states, actions, old, advantages, target))
                loss = learn(*batch)
        return loss

    return step


compare(options, make_step)
