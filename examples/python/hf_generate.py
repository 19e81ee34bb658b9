"""``generate`` of Hugging Face transformers with a static cache. Random weights; a step is one text.

The library compiles the decoding step itself, and takes the name of the backend as an option. With
``python -m pygraph script.py`` even that is not necessary.

python examples/python/hf_generate.py [--size small]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from before_and_after import BEFORE, DEVICE, arguments, compare
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

options = arguments("Llama, generate with a static cache")
SIZES = {
    "small": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    },
    "base": {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 2816}
    | {"num_attention_heads": 16, "num_key_value_heads": 16},
}
NEW_TOKENS = {"small": 4, "base": 64}[options.size]
config = LlamaConfig(**SIZES[options.size])


def make_step(backend: str) -> Callable[[], Any]:
    model = LlamaForCausalLM(config).to(DEVICE).eval()
    tokens = torch.randint(3, config.vocab_size, (1, 8), device=DEVICE)
    how: dict[str, Any] = {"disable_compile": True}
    if backend != BEFORE:
        compilation = CompileConfig(backend=backend, mode="default")
        compilation._compile_all_devices = True  # also where there is no GPU
        how = {"compile_config": compilation}

    def step() -> torch.Tensor:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            **how,
        )

    return step


compare(options, make_step)
