"""Reinforcement learning and adversarial training: several losses, optimizers, copies of a network."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.models.generators import DCGAN
from benchmarks.steps.program import Batch, Program, Setting, train

_OBSERVED, _ACTIONS, _WIDTH = 64, 6, 256


def _network(inputs: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    hidden = [nn.Linear(inputs, _WIDTH), activation(), nn.Linear(_WIDTH, _WIDTH), activation()]
    return nn.Sequential(*hidden, nn.Linear(_WIDTH, outputs))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = _network(_OBSERVED, _ACTIONS, nn.Tanh)
        self.critic = _network(_OBSERVED, 1, nn.Tanh)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(seen).log_softmax(-1), self.critic(seen).squeeze(-1)


def ppo(setting: Setting) -> Program:
    """One minibatch of PPO: clipped ratio, value loss, entropy."""
    model = ActorCritic().to(setting.device)
    parameters = list(model.parameters())
    optimizer = setting.adamw(parameters)
    call = setting.compile(model)

    def step(
        seen: torch.Tensor,
        actions: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        log_probabilities, values = call(seen)
        chosen = log_probabilities.gather(-1, actions[:, None]).squeeze(-1)
        ratio = (chosen - old).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        policy = -torch.min(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        loss = policy + 0.5 * F.mse_loss(values, returns) - 0.01 * entropy
        train(loss, parameters, optimizer)
        return (loss.detach(),)

    return Program(step, [model], [optimizer])


def ppo_batch(batch: int, device: str) -> Batch:
    actions = torch.randint(0, _ACTIONS, (batch,), device=device)
    rest = [torch.randn(batch, device=device) for _ in range(3)]
    return torch.randn(batch, _OBSERVED, device=device), actions, -rest[0].abs(), rest[1], rest[2]


class Critic(nn.Module):
    """Of a state and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _network(_OBSERVED + _ACTIONS, 1, nn.ReLU)

    def forward(self, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.network(torch.cat([seen, action], -1)).squeeze(-1)
        return value


class Critics(nn.Module):
    """Two, as SAC has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Critic(), Critic()

    def forward(self, seen: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(seen, action), self.second(seen, action)


def _sample(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An action of the squashed Gaussian policy, and its log probability."""
    mean, deviation = output.chunk(2, -1)
    deviation = deviation.tanh().mul(3.5).sub(1.5).exp()
    noise = torch.randn_like(mean)
    action = (mean + deviation * noise).tanh()
    density = -0.5 * noise.square() - deviation.log() - (1 - action.square() + 1e-6).log()
    return action, density.sum(-1)


def sac(setting: Setting) -> Program:
    """One update of SAC: critics, actor, temperature, and targets that follow the critics."""
    device = setting.device
    actor = _network(_OBSERVED, 2 * _ACTIONS, nn.ReLU).to(device)
    critics = Critics().to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros((), device=device, requires_grad=True)
    of_critics, of_actor = list(critics.parameters()), list(actor.parameters())
    followed = list(zip(targets.parameters(), of_critics, strict=True))
    critics_optimizer, actor_optimizer = setting.adamw(of_critics), setting.adamw(of_actor)
    alpha_optimizer = setting.adamw([log_alpha])
    act, judge, target = map(setting.compile, (actor, critics, targets))

    def step(
        seen: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, then: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, density = _sample(act(then))
            wanted = reward + 0.99 * (torch.min(*target(then, next_action)) - alpha * density)
        first, second = judge(seen, action)
        critics_loss = F.mse_loss(first, wanted) + F.mse_loss(second, wanted)
        train(critics_loss, of_critics, critics_optimizer)
        new_action, density = _sample(act(seen))
        actor_loss = (alpha * density - torch.min(*judge(seen, new_action))).mean()
        train(actor_loss, of_actor, actor_optimizer)
        critics_optimizer.zero_grad()
        alpha_loss = -(log_alpha.exp() * (density.detach() - _ACTIONS)).mean()
        train(alpha_loss, [log_alpha], alpha_optimizer)
        with torch.no_grad():
            for follower, parameter in followed:
                follower.lerp_(parameter, 0.005)
        return critics_loss.detach(), actor_loss.detach(), alpha_loss.detach()

    optimizers = [critics_optimizer, actor_optimizer, alpha_optimizer]
    return Program(step, [actor, critics, targets], optimizers, [log_alpha])


def sac_batch(batch: int, device: str) -> Batch:
    seen, then = (torch.randn(batch, _OBSERVED, device=device) for _ in range(2))
    action = torch.rand(batch, _ACTIONS, device=device) * 2 - 1
    return seen, action, torch.randn(batch, device=device), then


def dcgan(setting: Setting, features: int = 64) -> Program:
    """One step of the discriminator, then one of the generator."""
    both = DCGAN(features).to(setting.device)
    generator, discriminator = both.generator, both.discriminator
    of_generator, of_discriminator = list(generator.parameters()), list(discriminator.parameters())
    generator_optimizer = setting.adamw(of_generator)
    discriminator_optimizer = setting.adamw(of_discriminator)
    make, judge = setting.compile(generator), setting.compile(discriminator)
    loss_of = F.binary_cross_entropy_with_logits

    def step(images: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = make(noise)
        real, fake = judge(images).flatten(), judge(made.detach()).flatten()
        loss = loss_of(real, torch.ones_like(real)) + loss_of(fake, torch.zeros_like(fake))
        train(loss, of_discriminator, discriminator_optimizer)
        judged = judge(made).flatten()
        deceived = loss_of(judged, torch.ones_like(judged))
        train(deceived, of_generator, generator_optimizer)
        discriminator_optimizer.zero_grad()
        return loss.detach(), deceived.detach()

    return Program(step, [both], [generator_optimizer, discriminator_optimizer])


def dcgan_batch(batch: int, device: str) -> Batch:
    images = torch.randn(batch, 3, 64, 64, device=device)
    return images, torch.randn(batch, 100, 1, 1, device=device)
