"""Models with work on the CPU in the middle, which used to keep their kernels out of graphs."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class TemperatureAttention(nn.Module):
    """Attention whose temperature is a NumPy scalar, as speech-transformer's is."""

    def __init__(self, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = np.power(width // heads, 0.5)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        scores = q @ k.transpose(-1, -2) / self.temperature
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(mixed))


class FeedForward(nn.Module):
    def __init__(self, width: int = 512, inner: int = 2048) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, inner),
            nn.Linear(inner, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x).relu()))


class SpeechTransformer(nn.Module):
    """Six encoder and six decoder layers over 320 filter-bank features; positions made on the CPU."""

    def __init__(self, width: int = 512, layers: int = 6, vocabulary: int = 4233) -> None:
        super().__init__()
        self.width = width
        self.embed_in, self.norm_in = nn.Linear(320, width), nn.LayerNorm(width)
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            nn.ModuleList([TemperatureAttention(width), FeedForward(width)]) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.ModuleList(
                [TemperatureAttention(width), TemperatureAttention(width), FeedForward(width)]
            )
            for _ in range(layers)
        )
        self.project = nn.Linear(width, vocabulary, bias=False)

    def _positions(self, length: int) -> torch.Tensor:
        position = torch.arange(length).unsqueeze(1).float()
        rate = torch.exp(torch.arange(0, self.width, 2).float() * -(np.log(10000.0) / self.width))
        return torch.stack([torch.sin(position * rate), torch.cos(position * rate)], -1).flatten(1)

    def forward(self, speech: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm_in(self.embed_in(speech))
        x = x + self._positions(speech.shape[1]).to(speech.device)
        for attention, forward in self.encoder:
            x = forward(attention(x, x))
        y = self.embed(tokens) + self._positions(tokens.shape[1]).to(speech.device)
        ahead = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool().to(speech.device)
        for own, cross, forward in self.decoder:
            y = forward(cross(own(y, y, ahead), x))
        return self.project(y)


class ClipOnTheCpu(nn.Module):
    """CLIP that hands its embeddings to the CPU before it goes on to the logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        self.model = CLIPModel(CLIPConfig())

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.model(input_ids=input_ids, pixel_values=pixel_values)
        embeddings = out.text_embeds.cpu(), out.image_embeds.cpu()
        return (out.logits_per_image.softmax(-1), *embeddings)


class Decoder(nn.Module):
    """One step of a GPT-2-like decoder. The caches are ordinary arguments that the step writes."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(50257, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def make_cache(self, batch: int, length: int, device: str) -> torch.Tensor:
        width = self.tokens.weight.shape[1] // self.heads
        return torch.zeros(len(self.blocks), 2, batch, self.heads, length, width, device=device)

    def forward(self, token: torch.Tensor, position: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x = self.tokens(token) + self.positions(position)
        seen = torch.arange(cache.shape[-2], device=cache.device) <= position
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            q, k, v = block["qkv"](block["norm"](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            keys, values = layer_cache
            keys.index_copy_(2, position, k.transpose(1, 2))
            values.index_copy_(2, position, v.transpose(1, 2))
            mixed = nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), keys, values, attn_mask=seen
            )
            x = x + block["out"](mixed.transpose(1, 2).flatten(2))
            x = x + block["down"](nn.functional.gelu(block["up"](block["norm2"](x))))
        return (self.norm(x) @ self.tokens.weight.T).argmax(-1)


class XlnetWithCpuPositions(nn.Module):
    """XLNet that computes its position encodings on the CPU, as transformers did until 2024."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import XLNetConfig, XLNetLMHeadModel

        config = XLNetConfig(n_layer=12, d_model=768, n_head=12, d_inner=3072, use_mems_eval=False)
        self.model = XLNetLMHeadModel(config)
        transformer = self.model.transformer
        encode = transformer.relative_positional_encoding

        def on_the_cpu(
            qlen: int, klen: int, bsz: int | None = None, device: torch.device | None = None
        ) -> torch.Tensor:
            return encode(qlen, klen, bsz=bsz, device=torch.device("cpu")).to(device)

        transformer.relative_positional_encoding = on_the_cpu

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits
