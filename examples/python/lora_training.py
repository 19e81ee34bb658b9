"""LoRA fine-tuning, before and after: a small GPT-2 of transformers with random weights.

python examples/python/lora_training.py [--size small]

The model is frozen but for small matrices beside its attention layers, which are written here. (peft
does the same with more options.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from before_and_after import DEVICE, STEPS, arguments, compare, compiled, graphed
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

options = arguments("GPT-2 with LoRA", STEPS)
SIZES: dict[str, dict[str, Any]] = {
    "small": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, "attn_pdrop": 0.0},
    "base": {"n_layer": 6, "n_embd": 384, "n_head": 6, "vocab_size": 8192},
}
config = GPT2Config(**SIZES[options.size], use_cache=False, bos_token_id=0, eos_token_id=0)
BATCH, LENGTH = {"small": (2, 8), "base": (4, 128)}[options.size]


class Lora(nn.Module):
    """A frozen layer, and what is learnt to be added to it."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inputs, rank) / rank)
        self.up = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2.0 * (x @ self.down @ self.up)


def make_step(backend: str) -> Callable[[], Any]:
    model = GPT2LMHeadModel(config).train().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn, config.n_embd, 3 * config.n_embd)
    model = model.to(DEVICE)
    forward = compiled(model, backend)
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-4, fused=True)

    def train_step(tokens: torch.Tensor) -> torch.Tensor:
        logits = forward(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train_step = graphed(train_step, backend)

    def step() -> torch.Tensor:
        return train_step(torch.randint(0, config.vocab_size, (BATCH, LENGTH + 1), device=DEVICE))

    return step


compare(options, make_step)
