"""A decode loop whose key-value cache is an ordinary argument that each step writes."""

from __future__ import annotations

import torch

from benchmarks.models.cpu import Decoder

from .support import captured, compiled

STEPS = 256


def _decode(step: object, module: Decoder) -> torch.Tensor:
    cache = module.make_cache(1, STEPS, "cuda")
    token = torch.tensor([[11]], device="cuda")
    tokens = []
    with torch.no_grad():
        for i in range(STEPS):
            token = step(token, torch.tensor([i], device="cuda"), cache)  # type: ignore[operator]
            tokens.append(token)
    return torch.cat(tokens)


def test_a_decode_loop_is_one_graph_and_gives_eager_tokens() -> None:
    torch.manual_seed(0)
    module = Decoder(width=256, heads=4, layers=4).cuda().eval()
    expected = _decode(module, module)
    actual = _decode(compiled(module), module)
    assert torch.equal(actual, expected)
    (row,) = captured()
    assert row.replays >= STEPS - 2
