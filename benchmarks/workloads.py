"""The workloads: real models from configurations with random weights, and small ones with one point.

A workload builds its module and makes input sets; the runner calls ``module(*args, **kwargs)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.cpu import ClipOnTheCpu, Decoder, SpeechTransformer, XlnetWithCpuPositions
from benchmarks.models.detectors import MaskRCNN
from benchmarks.models.recommenders import Autoencoder

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """One row of the table: a model in one mode at one batch size."""

    name: str
    mode: str  # "inference" or "training"
    batch: int
    build: Callable[[], nn.Module]
    make_inputs: Callable[[int], Inputs]  # batch -> inputs on the GPU
    input_sets: int = 4
    warm_up: int = 4  # calls before the timing; more where shapes vary and are recorded late
    fits_one_graph: bool = True  # whether a hand-made graph can hold the whole step
    has_polyfills: bool = False  # whether PyGraph compiles other code for a library's functions

    @property
    def key(self) -> str:
        return f"{self.name}/{self.mode}"


class Chain(nn.Module):
    """Elementwise operations over all inputs: nothing but launch and input costs."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = inputs[0]
        for x in inputs[1:]:
            y = torch.tanh(y) + x
        return y.sum(-1), y


class Scalar(nn.Module):
    """A model with its loss, so that every training step ends in one number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        if not self.training:
            return out
        loss = getattr(out, "loss", None)
        return loss if loss is not None else out.float().square().mean()


def _tokens(vocabulary: int, length: int, key: str) -> Callable[[int], Inputs]:
    def make(batch: int) -> Inputs:
        ids = torch.randint(0, vocabulary, (batch, length), device="cuda")
        kwargs: dict[str, Any] = {"input_ids": ids}
        if key == "classes":
            kwargs["attention_mask"] = torch.ones_like(ids)
            kwargs["labels"] = torch.randint(0, 2, (batch,), device="cuda")
        else:
            kwargs["labels"] = ids.clone()
        return (), kwargs

    return make


def _images(batch: int) -> Inputs:
    return (torch.randn(batch, 3, 224, 224, device="cuda"),), {}


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return Scalar(BertForSequenceClassification(BertConfig()))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Scalar(GPT2LMHeadModel(GPT2Config(use_cache=False)))


def _xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetLMHeadModel

    config = XLNetConfig(n_layer=12, d_model=768, n_head=12, d_inner=3072, use_mems_eval=False)
    return Scalar(XLNetLMHeadModel(config))


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return Scalar(timm.create_model(name))

    return build


def _models(mode: str, batch: int, image_batch: int) -> list[Workload]:
    return [
        Workload("bert", mode, batch, _bert, _tokens(30000, 128, "classes")),
        Workload("gpt2", mode, batch, _gpt2, _tokens(50000, 128, "labels")),
        Workload("xlnet", mode, batch, _xlnet, _tokens(30000, 128, "labels")),
        Workload("resnet18", mode, image_batch, _timm("resnet18"), _images),
        Workload("deit_tiny", mode, image_batch, _timm("deit_tiny_patch16_224"), _images),
    ]


def _ids(batch: int) -> Inputs:
    return (torch.randint(0, 30000, (batch, 128), device="cuda"),), {}


def _speech(batch: int) -> Inputs:
    speech = torch.randn(batch, 204, 320, device="cuda")
    return (speech, torch.randint(0, 4233, (batch, 22), device="cuda")), {}


def _text_and_image(batch: int) -> Inputs:
    ids = torch.randint(0, 49000, (batch, 77), device="cuda")
    return (ids, torch.randn(batch, 3, 224, 224, device="cuda")), {}


def _photo(_: int) -> Inputs:
    return (torch.rand(3, 480, 640, device="cuda"),), {}


def _decoder_state(batch: int) -> Inputs:
    token = torch.randint(0, 50257, (batch, 1), device="cuda")
    cache = torch.zeros(12, 2, batch, 12, 256, 64, device="cuda")
    return (token, torch.tensor([17], device="cuda"), cache), {}


WORKLOADS: list[Workload] = [
    Workload(
        "chain_16x1KB",
        "inference",
        1,
        Chain,
        lambda _: (tuple(torch.randn(256, device="cuda") for _ in range(16)), {}),
    ),
    Workload(
        "chain_4x256MB",
        "inference",
        1,
        Chain,
        lambda _: (tuple(torch.randn(8192, 8192, device="cuda") for _ in range(4)), {}),
        input_sets=2,
    ),
    Workload(
        "autoencoder",
        "inference",
        8192,
        Autoencoder,
        lambda batch: ((torch.rand(batch, 197951, device="cuda"),), {}),
    ),
    *_models("inference", 1, 1),
    Workload("xlnet_cpu", "inference", 1, XlnetWithCpuPositions, _ids),
    Workload("speech_transformer", "inference", 1, SpeechTransformer, _speech),
    Workload("clip", "inference", 1, ClipOnTheCpu, _text_and_image),
    Workload(
        *("mask_rcnn", "inference", 1, MaskRCNN, _photo),
        input_sets=2,
        warm_up=150,
        has_polyfills=True,
    ),
    Workload("gpt2_decode", "inference", 1, Decoder, _decoder_state),
    *_models("training", 8, 16),
]
