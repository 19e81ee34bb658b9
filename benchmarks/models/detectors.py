"""Object detectors: Mask R-CNN from torchvision, and EfficientDet's structure over EfficientNet-B0."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MaskRCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection import maskrcnn_resnet50_fpn

        self.model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)

    def forward(self, image: torch.Tensor) -> list[dict[str, Any]]:
        return self.model([image])


def _separable(inner: int, outer: int) -> nn.Sequential:
    depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
    return nn.Sequential(depthwise, nn.Conv2d(inner, outer, 1), nn.BatchNorm2d(outer), nn.SiLU())


class Fusion(nn.Module):
    """A weighted sum of feature maps, then a convolution: BiFPN's node."""

    def __init__(self, width: int, inputs: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(inputs))
        self.convolution = _separable(width, width)

    def forward(self, *maps: torch.Tensor) -> torch.Tensor:
        weights = self.weights.relu()
        weights = weights / (weights.sum() + 1e-4)
        total = sum(w * m for w, m in zip(weights.unbind(), maps, strict=True))
        return self.convolution(total)


class BiFPN(nn.Module):
    """Features of five sizes, first from coarse to fine, then back."""

    def __init__(self, width: int, levels: int = 5) -> None:
        super().__init__()
        self.down = nn.ModuleList(Fusion(width, 2) for _ in range(levels - 1))
        self.up = nn.ModuleList(Fusion(width, 3 if i < levels - 2 else 2) for i in range(levels - 1))

    def forward(self, maps: list[torch.Tensor]) -> list[torch.Tensor]:
        coarse = [maps[-1]]
        for fusion, finer in zip(self.down, reversed(maps[:-1]), strict=True):
            larger = nn.functional.interpolate(coarse[0], size=finer.shape[-2:])
            coarse.insert(0, fusion(finer, larger))
        result = [coarse[0]]
        for i, fusion in enumerate(self.up, 1):
            smaller = nn.functional.adaptive_max_pool2d(result[-1], maps[i].shape[-2:])
            is_last = i == len(maps) - 1
            inputs = (maps[i], smaller) if is_last else (maps[i], coarse[i], smaller)
            result.append(fusion(*inputs))
        return result


class EfficientDet(nn.Module):
    """EfficientDet-D0 with a focal and a box loss; the targets come as plain tensors."""

    def __init__(self, width: int = 64, classes: int = 90, anchors: int = 9) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model("efficientnet_b0", features_only=True, out_indices=(2, 3, 4))
        channels = self.backbone.feature_info.channels()
        self.laterals = nn.ModuleList(nn.Conv2d(c, width, 1) for c in channels)
        self.extra = nn.ModuleList(
            [nn.Conv2d(channels[-1], width, 3, 2, 1), nn.Conv2d(width, width, 3, 2, 1)]
        )
        self.pyramid = nn.ModuleList(BiFPN(width) for _ in range(3))
        self.classify = nn.Sequential(
            *(_separable(width, width) for _ in range(3)), nn.Conv2d(width, anchors * classes, 1)
        )
        self.regress = nn.Sequential(
            *(_separable(width, width) for _ in range(3)), nn.Conv2d(width, anchors * 4, 1)
        )
        self.classes = classes

    def forward(
        self, image: torch.Tensor, class_targets: torch.Tensor, box_targets: torch.Tensor
    ) -> torch.Tensor:
        features = self.backbone(image)
        maps = [lateral(f) for lateral, f in zip(self.laterals, features, strict=True)]
        maps.append(self.extra[0](features[-1]))
        maps.append(self.extra[1](maps[-1]))
        for layer in self.pyramid:
            maps = layer(maps)
        batch = image.shape[0]
        scores = torch.cat(
            [self.classify(m).permute(0, 2, 3, 1).reshape(batch, -1, self.classes) for m in maps], 1
        )
        boxes = torch.cat([self.regress(m).permute(0, 2, 3, 1).reshape(batch, -1, 4) for m in maps], 1)
        probability = scores.sigmoid()
        one_hot = nn.functional.one_hot(class_targets, self.classes).to(scores.dtype)
        cross = nn.functional.binary_cross_entropy_with_logits(scores, one_hot, reduction="none")
        certainty = torch.where(one_hot > 0, 1 - probability, probability)
        return (0.25 * certainty**1.5 * cross).sum() / batch + 50 * nn.functional.huber_loss(
            boxes, box_targets
        )
