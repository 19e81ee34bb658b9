"""Models of installed libraries have their graphs, themselves and as a base of the program's own class.
What their code names besides (frames, storages, ``sys.modules``) is in nothing that a call runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pygraph

from .attacked import reasons, replays

_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def _bert() -> tuple[torch.nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **_SMALL))
    return model.eval(), torch.randint(0, 100, (2, 8))


def _resnet() -> tuple[torch.nn.Module, torch.Tensor]:
    torchvision = pytest.importorskip("torchvision")
    return torchvision.models.resnet18().eval(), torch.randn(1, 3, 32, 32)


def _vit() -> tuple[torch.nn.Module, torch.Tensor]:
    timm = pytest.importorskip("timm")
    model = timm.models.VisionTransformer(img_size=32, embed_dim=32, depth=1, num_heads=2)
    return model.eval(), torch.randn(1, 3, 32, 32)


@pytest.mark.parametrize("is_derived", [False, True])
@pytest.mark.parametrize("make", [_bert, _resnet, _vit])
def test_a_model(partitions: Any, make: Any, is_derived: bool) -> None:
    model, x = make()
    if is_derived:
        model.__class__ = type("Own", (type(model),), {"__module__": __name__})
    graphed = pygraph.graph(model)
    with torch.no_grad():
        for _ in range(8):
            graphed(x)
    assert replays(partitions) > 0, reasons()
