"""Speech2Text2's decoder as a language model (no longer part of transformers)."""

from __future__ import annotations

import torch
from torch import nn


class SpeechDecoder(nn.Module):
    """Six causal layers of width 256; the loss of predicting the next token."""

    def __init__(self, vocabulary: int = 10000, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2048, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.project = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        logits = self.project(self.layers(x, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
