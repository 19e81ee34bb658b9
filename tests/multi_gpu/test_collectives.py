"""A model that two ranks compute together: its collectives run between graphs, at every rank alike."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import _functional_collectives as collectives

import pygraph

_CALLS = 30  # beyond recording and the trial of each graph
_WIDTH = 256


class Half(nn.Module):
    """A rank's half of some blocks of two layers: columns of the first one, rows of the second."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = slice(rank * _WIDTH, (rank + 1) * _WIDTH)
        weights = [torch.randn(2, 2 * _WIDTH, _WIDTH) / 16 for _ in range(3)]
        self.up = nn.ParameterList(w[0, own] for w in weights)
        self.down = nn.ParameterList(w[1, own] for w in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + collectives.all_reduce(torch.relu(x @ up.T) @ down, "sum", [0, 1])
        return x


def _infer(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    module = Half(rank).cuda().eval()
    model = torch.compile(module, backend="pygraph", options={"pygraph.select": "always"})
    differences = []
    with torch.no_grad():
        for call in range(_CALLS):
            torch.manual_seed(call)
            x = torch.randn(32, _WIDTH, device="cuda")
            differences.append((model(x) - module(x)).abs().max().item())
    states = [row.state for row in pygraph.stats()]
    torch.save({"differences": differences, "states": states}, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def test_ranks_that_communicate(tmp_path: object) -> None:
    mp.spawn(_infer, args=(29513, str(tmp_path)), nprocs=2)
    for rank in range(2):
        result = torch.load(os.path.join(str(tmp_path), f"{rank}.pt"))
        assert max(result["differences"]) < 1e-3
        assert result["states"].count("captured") >= 3, result["states"]
