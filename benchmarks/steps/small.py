"""Small models, in which the host is the bottleneck."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.steps.program import Batch, Program, Setting, supervised


def mlp(setting: Setting, width: int = 1024, depth: int = 4) -> Program:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
    return supervised(setting, nn.Sequential(*layers), F.cross_entropy)


def mlp_batch(batch: int, device: str, width: int = 1024) -> Batch:
    x = torch.randn(batch, width, device=device)
    return x, torch.randint(0, width, (batch,), device=device)


class Block(nn.Module):
    """A layer of a decoder, with the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 1024, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        heads = width // 64
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(ids) + self.places)))
        return logits


def _next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def transformer(setting: Setting, width: int = 384, layers: int = 6) -> Program:
    return supervised(setting, Decoder(width=width, layers=layers), _next_token)


def tokens(batch: int, device: str, length: int = 64, vocabulary: int = 1024) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Tagger(nn.Module):
    """Two layers of an LSTM, which Dynamo leaves to PyTorch (cuDNN's on a GPU)."""

    def __init__(self, vocabulary: int = 1024, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.embedding(ids))[0])
        return logits


def lstm(setting: Setting) -> Program:
    return supervised(setting, Tagger(), _next_token)
