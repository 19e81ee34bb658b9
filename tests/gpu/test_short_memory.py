"""What fits a GPU uncaptured also fits while PyGraph compiles, tries and replays it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import pygraph
from pygraph import runtime

from .support import at_most

_STEPS = 24  # two uncaptured, at most 18 of each trial, and some after it
_TOKENS = 4096
_WORDS = 32768  # so many that the logits, 512 MiB, are most of what a step needs


class LanguageModel(nn.Module):
    """A few small layers, then logits that are larger than everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.head = nn.Linear(256, _WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return nn.functional.cross_entropy(self.head(x), words)


def _train(backend: str, limit: float = math.inf) -> list[float]:
    """limit: bytes that the process may have from the second step on. In the first one Inductor tunes
    kernels, for which it takes more than they need."""
    torch._dynamo.reset()
    runtime.partitions.clear()
    torch.manual_seed(0)
    model = LanguageModel().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend=backend)
    losses = []

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = step(torch.randint(0, _WORDS, (_TOKENS,), device="cuda"))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    train(1)
    with at_most(limit) if limit < math.inf else contextlib.nullcontext():
        torch.cuda.empty_cache()
        train(_STEPS - 1)
    return losses


@pytest.mark.parametrize("select", ["auto", "always"])
@pytest.mark.parametrize("room", [1.02, 1.1, 1.2, 1.3])
def test_training_that_fits_uncaptured_fits_with_graphs(
    select: str, room: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYGRAPH_SELECT", select)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    expected = _train("inductor")  # compiles and tunes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _train("inductor")
    needed = torch.cuda.max_memory_reserved()
    losses = _train("pygraph", room * needed)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0.0)
    states = {row.state for row in pygraph.stats()}
    assert states and states <= {"captured", "not selected", "refused"}
    if room > 1.2:
        assert "refused" not in states, pygraph.stats()
