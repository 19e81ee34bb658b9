"""The 25 workloads of the paper (arXiv 2503.19779, table 1), by its acronyms, modes and batch sizes.

Models come from transformers, timm and torchvision, from configurations with random weights; what
cannot be installed or would need a download is built in ``benchmarks/models`` with the same structure
and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.models.cpu import ClipOnTheCpu, SpeechTransformer
from benchmarks.models.detectors import EfficientDet, MaskRCNN
from benchmarks.models.generators import DALLE2, DCGAN
from benchmarks.models.ocean import GRID, EquationOfState, TurbulentKineticEnergy
from benchmarks.models.recommenders import DLRM, Autoencoder
from benchmarks.models.speech_decoder import SpeechDecoder
from benchmarks.workloads import Inputs, Scalar, Workload


def _transformer(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return Scalar(getattr(transformers, name)(getattr(transformers, config)(**settings)))

    return build


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return Scalar(timm.create_model(name))

    return build


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return Scalar(torchvision.models.get_model(name))

    return build


def _ids(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device="cuda")


def _language(length: int, vocabulary: int) -> Callable[[int], Inputs]:
    def make(batch: int) -> Inputs:
        ids = _ids(batch, length, vocabulary)
        return (), {"input_ids": ids, "labels": ids.clone()}

    return make


def _question(length: int, vocabulary: int) -> Callable[[int], Inputs]:
    def make(batch: int) -> Inputs:
        positions = torch.randint(0, length, (2, batch), device="cuda").unbind()
        ids = {"input_ids": _ids(batch, length, vocabulary)}
        return (), {**ids, "start_positions": positions[0], "end_positions": positions[1]}

    return make


def _images(size: int) -> Callable[[int], Inputs]:
    return lambda batch: ((torch.randn(batch, 3, size, size, device="cuda"),), {})


def _text_and_image(batch: int) -> Inputs:
    return (_ids(batch, 77, 49000), torch.randn(batch, 3, 224, 224, device="cuda")), {}


def _speech(batch: int) -> Inputs:
    return (torch.randn(batch, 204, 320, device="cuda"), _ids(batch, 22, 4233)), {}


def _prompt(batch: int) -> Inputs:
    noise = torch.randn(batch, 512, device="cuda")
    return (_ids(batch, 77, 49000), noise, torch.randn(batch, 3, 64, 64, device="cuda")), {}


def _double(make: Callable[..., torch.Tensor], *shape: int) -> torch.Tensor:
    """The ocean models compute in double precision, as they do in the original suite."""
    return make(*shape, device="cuda", dtype=torch.float64)


def _sea(_: int) -> Inputs:
    salinity = _double(torch.rand, *GRID) * 10 + 0.01
    temperature = _double(torch.rand, *GRID) * 32 - 12
    return (salinity, temperature, _double(torch.rand, 1, 1, GRID[2]) * 1000), {}


def _turbulence(_: int) -> Inputs:
    fields = [_double(torch.randn, *GRID) for _ in range(5)]
    viscosity, forcing = _double(torch.rand, *GRID), _double(torch.rand, *GRID[:2])
    depth = _double(torch.rand, GRID[2]) + 1
    bottom = torch.randint(0, GRID[2], GRID[:2], device="cuda")
    return (*fields, viscosity, forcing, depth, bottom), {}


def _ratings(batch: int) -> Inputs:
    return (torch.rand(batch, 197951, device="cuda"),), {}


def _clicks(batch: int) -> Inputs:
    dense = torch.rand(batch, 512, device="cuda")
    indices = torch.randint(0, 1_000_000, (8, batch * 10), device="cuda")
    offsets = torch.arange(0, batch * 10, 10, device="cuda").expand(8, -1).contiguous()
    return (dense, indices, offsets), {}


def _photo(_: int) -> Inputs:
    return (torch.rand(3, 480, 640, device="cuda"),), {}


def _labelled_image(batch: int) -> Inputs:
    anchors = 9 * sum(n * n for n in (64, 32, 16, 8, 4))
    classes = torch.randint(0, 90, (batch, anchors), device="cuda")
    boxes = torch.randn(batch, anchors, 4, device="cuda")
    return (torch.randn(batch, 3, 512, 512, device="cuda"), classes, boxes), {}


_XLNET = _transformer("XLNetLMHeadModel", "XLNetConfig", use_mems_eval=False)
_MT5 = _transformer(
    *("MT5ForConditionalGeneration", "MT5Config"),
    d_model=768,
    d_ff=2048,
    num_layers=12,
    num_heads=12,
    use_cache=False,
)
_BLENDERBOT = _transformer(
    "BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", use_cache=False
)

PAPER: list[Workload] = [
    Workload("XLNET-I", "inference", 1, _XLNET, _language(512, 32000)),
    Workload("MMC", "inference", 1, ClipOnTheCpu, _text_and_image, fits_one_graph=False),
    Workload("ST", "inference", 1, SpeechTransformer, _speech, fits_one_graph=False),
    Workload("DALLE2", "inference", 1, DALLE2, _prompt, fits_one_graph=False),
    Workload("EOS", "inference", 1048576, EquationOfState, _sea),
    Workload("TKE", "inference", 1048576, TurbulentKineticEnergy, _turbulence),
    Workload(
        *("VM", "inference", 1, MaskRCNN, _photo),
        input_sets=2,
        warm_up=150,
        fits_one_graph=False,
        has_polyfills=True,
    ),
    Workload("DR-I", "inference", 8192, Autoencoder, _ratings, input_sets=1),
    Workload("XLNET-T", "training", 8, _XLNET, _language(512, 32000)),
    Workload("MTCG-T", "training", 16, _MT5, _language(128, 250112)),
    Workload("DLRM", "inference", 2048, DLRM, _clicks, fits_one_graph=False),
    Workload(
        "MBERT",
        "inference",
        128,
        _transformer("MobileBertForQuestionAnswering", "MobileBertConfig"),
        _question(128, 30522),
    ),
    Workload("TEFD", "training", 1, EfficientDet, _labelled_image),
    Workload("ALNET", "inference", 2, _torchvision("alexnet"), _images(224)),
    Workload("DCGAN", "training", 32, DCGAN, _images(64)),
    Workload(
        "BERT", "training", 16, _transformer("BertForMaskedLM", "BertConfig"), _language(128, 30522)
    ),
    Workload("LCNET", "inference", 256, _timm("lcnet_050"), _images(224)),
    Workload("DR-T", "training", 256, lambda: Scalar(Autoencoder()), _ratings),
    Workload("DNET", "inference", 64, _torchvision("densenet121"), _images(224)),
    Workload("MTCG-I", "inference", 16, _MT5, _language(128, 250112)),
    Workload(
        "DBV2",
        "inference",
        1,
        _transformer("DebertaV2ForQuestionAnswering", "DebertaV2Config"),
        _question(512, 128100),
    ),
    Workload("BSCG", "training", 64, _BLENDERBOT, _language(128, 50265)),
    Workload(
        "DGPT2",
        "training",
        16,
        _transformer("GPT2LMHeadModel", "GPT2Config", n_layer=6, use_cache=False),
        _language(512, 50257),
    ),
    Workload("STCLM", "training", 256, SpeechDecoder, lambda batch: ((_ids(batch, 128, 10000),), {})),
    Workload(
        "DMLM",
        "training",
        8,
        _transformer("DebertaForMaskedLM", "DebertaConfig"),
        _language(512, 50265),
    ),
]
