"""Small models, whose memory shows what each variant takes besides tensors: graphs, their pools, and
libraries' scratch memory. One of them, the Llama, is small for its kind.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.workloads import Inputs, Scalar, Workload

_NODES, _EDGES, _FEATURES, _CLASSES = 2708, 10556, 1433, 7  # of the citation graph Cora
_VOCABULARY = 32000


class GraphNetwork(nn.Module):
    """Two graph convolutions of torch_geometric."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.first = GCNConv(_FEATURES, 16)
        self.second = GCNConv(16, _CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x, edges)), edges)


def _graph(_: int) -> Inputs:
    edges = torch.randint(0, _NODES, (2, _EDGES), device="cuda")
    return (torch.rand(_NODES, _FEATURES, device="cuda"), edges), {}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12}
    return LlamaForCausalLM(
        LlamaConfig(num_attention_heads=12, vocab_size=_VOCABULARY, use_cache=False, **sizes)
    )


def _text(batch: int) -> Inputs:
    ids = torch.randint(0, _VOCABULARY, (batch, 128), device="cuda")
    return (), {"input_ids": ids, "labels": ids.clone()}


def _layers() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers)


def _vectors(batch: int) -> Inputs:
    return (torch.randn(batch, 1024, device="cuda"),), {}


def _models(mode: str) -> list[Workload]:
    return [
        # Each batch has other numbers of loops, which are shapes.
        Workload("graph_network", mode, 1, lambda: Scalar(GraphNetwork()), _graph, warm_up=2000),
        Workload("mlp", mode, 64, lambda: Scalar(_layers()), _vectors),
        Workload("llama", mode, 4, lambda: Scalar(_llama()), _text),
    ]


SMALL: list[Workload] = [*_models("inference"), *_models("training")]
