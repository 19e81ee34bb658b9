"""Recommenders: a wide autoencoder, and DLRM with its interaction of embeddings."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class Autoencoder(nn.Module):
    """DeepRecommender's shape: a very wide input and output around a narrow middle."""

    def __init__(self, items: int = 197951) -> None:
        super().__init__()
        sizes = [items, 512, 512, 1024]
        encoder = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        decoder = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes[::-1])]
        self.layers = nn.ModuleList(encoder + decoder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.selu(layer(x))
        return x


class DLRM(nn.Module):
    """Dense features through one network, sparse ones through embedding bags, then all pairs."""

    def __init__(self, tables: int = 8, rows: int = 1_000_000, width: int = 64) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = self._network([512, 512, width])
        pairs = (tables + 1) * tables // 2
        self.top = self._network([width + pairs, 1024, 1024, 1024, 1])

    @staticmethod
    def _network(sizes: list[int]) -> nn.Sequential:
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*itertools.chain(*layers))

    def forward(
        self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        x = self.bottom(dense)
        sparse = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        features = torch.stack([x, *sparse], 1)
        products = features @ features.transpose(1, 2)
        count = features.shape[1]
        # As the original: the index lists are made on the CPU at every call.
        first = torch.tensor([i for i in range(count) for _ in range(i)])
        second = torch.tensor([j for i in range(count) for j in range(i)])
        return torch.sigmoid(self.top(torch.cat([x, products[:, first, second]], 1)))
