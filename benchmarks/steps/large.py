"""Models of libraries: torchvision's ResNets; BERT, and GPT-2 with LoRA, from transformers.

They have no dropout: Inductor draws other random numbers than PyTorch, and the results of all variants
are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.steps.program import Batch, Program, Setting, supervised


def resnet(name: str) -> Callable[[Setting], Program]:
    def build(setting: Setting) -> Program:
        import torchvision

        return supervised(setting, torchvision.models.get_model(name, num_classes=100), F.cross_entropy)

    return build


def images(size: int) -> Callable[[int, str], Batch]:
    def make(batch: int, device: str) -> Batch:
        targets = torch.randint(0, 100, (batch,), device=device)
        return torch.randn(batch, 3, size, size, device=device), targets

    return make


def bert(setting: Setting, **sizes: Any) -> Program:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    model = BertForSequenceClassification(config).train()
    return supervised(setting, model, lambda output, targets: F.cross_entropy(output.logits, targets))


def sentences(batch: int, device: str, vocabulary: int = 30000) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, 128), device=device)
    return ids, torch.randint(0, 2, (batch,), device=device)


class Lora(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, rank) / rank)
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        corrected: torch.Tensor = self.layer(x) + 2.0 * (x @ self.down @ self.up)
        return corrected


def lora(setting: Setting, **sizes: Any) -> Program:
    """GPT-2 with LoRA in its attention; everything else is frozen."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = GPT2Config(**off, **sizes)
    model = GPT2LMHeadModel(config).train().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn, config.n_embd, 3 * config.n_embd)

    def loss_of(output: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    return supervised(setting, model, loss_of)


def text(batch: int, device: str, length: int = 128, vocabulary: int = 50000) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
