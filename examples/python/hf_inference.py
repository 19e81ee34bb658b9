"""A model of Hugging Face transformers in inference, batch 1, with random weights.

python examples/python/hf_inference.py [--size small]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from before_and_after import DEVICE, arguments, compare, compiled
from transformers import BertConfig, BertModel

options = arguments("BERT in inference")
SIZES = {
    "small": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 100},
    "base": {},
}
config = BertConfig(**SIZES[options.size])


def make_step(backend: str) -> Callable[[], Any]:
    model = compiled(BertModel(config).to(DEVICE).eval(), backend)
    tokens = torch.randint(0, config.vocab_size, (1, 64), device=DEVICE)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(input_ids=tokens).last_hidden_state

    return step


compare(options, make_step)
