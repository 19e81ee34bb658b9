"""Ten small models of different kinds, with inputs that come round again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz import custom_ops  # registers the operators

Inputs = tuple[Tensor, ...]
assert custom_ops.twice is not None


@dataclasses.dataclass(frozen=True)
class Model:
    """make: the module. inputs: of a number, on the CPU. trains: whether it has a training step.

    chance: gradients are sums by atomic additions. draws: results are random.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    trains: bool = True
    chance: bool = False
    draws: bool = False
    dynamic: bool | None = None


def _normal(*shape: int) -> Callable[[int, torch.Generator], Inputs]:
    return lambda number, generator: (torch.randn(*shape, generator=generator),)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


class _Decoder(nn.Module):
    """Writes keys and values of one more position into its caches."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 192)
        self.register_buffer("keys", torch.zeros(2, 4, 8, 16))
        self.register_buffer("values", torch.zeros(2, 4, 8, 16))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.inner(x).view(2, 1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(8, device=x.device) <= position
        out = F.scaled_dot_product_attention(
            q, self.keys, self.values, attn_mask=seen[None, None, None]
        )
        return out.transpose(1, 2).flatten(2)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(32, 32), nn.GRUCell(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = hidden = cell = torch.zeros_like(x[0])
        for step in x.unbind(0):
            hidden, cell = self.lstm(step, (hidden, cell))
            state = self.gru(hidden, state)
        return state


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(500, 16, mode="sum")
        self.dense, self.top = nn.Linear(8, 16), nn.Linear(32, 1)

    def forward(self, words: Tensor, dense: Tensor) -> Tensor:
        return self.top(torch.cat([self.bags(words), self.dense(dense).relu()], 1)).sigmoid()


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 4, 2, 1)
        self.up = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.dropout(self.down(x).relu(), 0.1)).tanh()


class _WithOperator(nn.Module):
    """operator: a custom one. Where it cannot be in graphs, there are two partitions."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(48, 48), nn.Linear(48, 48)
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.operator(self.first(x).relu())).tanh()


def _words(number: int, generator: torch.Generator) -> Inputs:
    words = torch.randint(0, 500, (32, 5), generator=generator)
    return words, torch.randn(32, 8, generator=generator)


def _token(number: int, generator: torch.Generator) -> Inputs:
    return torch.randn(2, 1, 64, generator=generator), torch.tensor([number])


def _lengths(number: int, generator: torch.Generator) -> Inputs:
    return (torch.randn(8 + 5 * number, 32, generator=generator),)


MODELS = [
    Model("mlp", _layers, _normal(16, 32)),
    Model("convolutions", _Convolutions, _normal(8, 3, 16, 16)),
    Model(
        "encoder",
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
        _normal(4, 16, 64),
    ),
    Model("decoder", _Decoder, _token, trains=False),
    Model("recurrent", _Recurrent, _normal(4, 8, 32)),
    Model("recommender", _Recommender, _words, chance=True),
    Model("autoencoder", _Autoencoder, _normal(4, 3, 16, 16), draws=True),
    Model("operator", lambda: _WithOperator(torch.ops.pygraph_fuzz.twice), _normal(16, 48)),
    Model("partitions", lambda: _WithOperator(torch.ops.pygraph_fuzz.outside), _normal(16, 48)),
    Model(
        "dynamic",
        lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8)),
        _lengths,
        dynamic=True,
    ),
]
