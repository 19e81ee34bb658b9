"""Image generators: DCGAN's training step, and a DALL-E 2-like text-to-image sampler."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn


class DCGAN(nn.Module):
    """Loss of the discriminator on real images and on those of the generator, 64 x 64."""

    def __init__(self, features: int = 64, noise: int = 100) -> None:
        super().__init__()
        self.noise = noise
        widths = [features * 2**i for i in range(4)]
        down: list[nn.Module] = [nn.Conv2d(3, features, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for a, b in itertools.pairwise(widths):
            down += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*down, nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False))
        up: list[nn.Module] = [nn.ConvTranspose2d(noise, widths[-1], 4, 1, 0, bias=False)]
        for a, b in zip(widths[::-1], [*widths[-2::-1], 3], strict=True):
            up += [nn.BatchNorm2d(a), nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False)]
        self.generator = nn.Sequential(*up, nn.Tanh())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(images.shape[0], self.noise, 1, 1, device=images.device)
        real = self.discriminator(images).flatten()
        fake = self.discriminator(self.generator(noise)).flatten()
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(real, torch.ones_like(real)) + loss(fake, torch.zeros_like(fake))


class Block(nn.Module):
    """A residual convolution block that is told the time step."""

    def __init__(self, inner: int, outer: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, 1, 1), nn.Conv2d(outer, outer, 3, 1, 1)
        self.norm1, self.norm2 = nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)
        self.time = nn.Linear(time, outer)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self.norm1(self.first(x)))
        h = h + self.time(time)[:, :, None, None]
        return self.skip(x) + nn.functional.silu(self.norm2(self.second(h)))


class UNet(nn.Module):
    def __init__(self, width: int = 128, scales: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        super().__init__()
        widths = [width * scale for scale in scales]
        time = 4 * width
        self.inlet, self.outlet = nn.Conv2d(3, width, 7, 1, 3), nn.Conv2d(width, 3, 1)
        pairs = list(zip([width, *widths[:-1]], widths, strict=True))
        self.down = nn.ModuleList(
            nn.ModuleList([Block(a, b, time), Block(b, b, time), nn.Conv2d(b, b, 4, 2, 1)])
            for a, b in pairs
        )
        self.middle = Block(widths[-1], widths[-1], time)
        self.attention = nn.MultiheadAttention(widths[-1], 8, batch_first=True)
        self.up = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose2d(b, b, 4, 2, 1), Block(2 * b, b, time), Block(b, a, time)])
            for a, b in reversed(pairs)
        )

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        skips = []
        for first, second, shrink in self.down:
            x = second(first(x, time), time)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        x = tokens.transpose(1, 2).view_as(x)
        for grow, first, second in self.up:
            x = second(first(torch.cat([grow(x), skips.pop()], 1), time), time)
        return self.outlet(x)


class DALLE2(nn.Module):
    """Text to an image embedding (a transformer prior), then to pixels (a U-Net), few steps each.

    The noise schedule is on the CPU, one number per step.
    """

    def __init__(self, width: int = 512, steps: int = 4) -> None:
        super().__init__()
        self.width, self.steps = width, steps
        settings = {"batch_first": True, "norm_first": True, "activation": nn.functional.silu}
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, **settings)
        self.text = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.prior = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.embed = nn.Embedding(49408, width)
        self.positions = nn.Parameter(torch.zeros(256, width))
        self.unet, self.condition = UNet(), nn.Linear(width, 512)
        alphas = torch.cos(torch.linspace(0, math.pi / 2 * 0.98, 1000)) ** 2
        # Not one tensor: Inductor hands a kernel the address of a CPU tensor that it takes a number of.
        self.alphas = [alphas[i * 1000 // steps].clone() for i in range(steps)]

    def _time(self, step: int, width: int, device: torch.device) -> torch.Tensor:
        rates = torch.exp(torch.arange(width // 2) * (-math.log(10000.0) / (width // 2)))
        angles = step * rates
        return torch.cat([angles.sin(), angles.cos()]).to(device)[None]

    def forward(self, tokens: torch.Tensor, noise: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        device = tokens.device
        text = self.text(self.embed(tokens) + self.positions[: tokens.shape[1]])
        embedding = noise
        for i in reversed(range(self.steps)):
            step = i * 1000 // self.steps
            query = embedding[:, None] + self._time(step, self.width, device)
            predicted = self.prior(torch.cat([text, query], 1))[:, -1]
            alpha = self.alphas[i]
            embedding = alpha.sqrt() * predicted + (1 - alpha).sqrt() * embedding
        condition = self.condition(embedding)
        for i in reversed(range(self.steps)):
            step = i * 1000 // self.steps
            predicted = self.unet(image, condition + self._time(step, 512, device))
            alpha = self.alphas[i]
            image = (image - (1 - alpha).sqrt() * predicted) / alpha.sqrt()
        return image.clamp(-1, 1)
