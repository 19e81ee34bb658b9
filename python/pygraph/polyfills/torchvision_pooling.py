"""Feature pyramids' ``_multiscale_roi_align``: every level pools all boxes, without reading the GPU.

Each level pools all boxes, but those of other levels lie far outside the image, where the kernel reads
nothing and returns zeros; then every box takes the result of its own level. Same kernel, same boxes:
same bits. It costs a write and a read of the result per further level. So it is for results up to a
size where that is less than torchvision's reads of the GPU cost; and for inference, because a backward
would keep the results of all levels.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph.polyfills import substitute

# Of torchvision 0.26, and of 0.28, which has a way of its own for quantized maps.
DIGESTS = ("93009e13e01b17ab", "e48190fa0fd1a23d")

# Elements of a result: 1300 boxes of 256 channels and 7 x 7 pixels. By two runs of Mask R-CNN on an
# H200 a level's turn in the loop costs some 0.25 ms, and pooling 12.5 M elements more 0.18 ms.
_LARGEST = 1 << 24


def pool(
    features: list[Tensor],
    rois: Tensor,
    levels: Tensor,
    output_size: tuple[int, int],
    sampling_ratio: int,
    scales: list[float],
    roi_align: Callable[..., Tensor],
) -> Tensor:
    """features: one map per level; rois: (boxes, 5), the image and the corners; levels: one per box.

    roi_align: torchvision's. Returns (boxes, channels, height, width), zeros where a box has no level.
    """
    outside = torch.finfo(rois.dtype).min / 4  # a difference of two must not overflow
    is_corner = torch.arange(5, device=rois.device) > 0
    shape = (rois.shape[0], features[0].shape[1], *output_size)
    result = torch.zeros(shape, dtype=features[0].dtype, device=rois.device)
    for level, (feature, scale) in enumerate(zip(features, scales, strict=True)):
        is_here = (levels == level)[:, None]
        pooled = roi_align(
            feature,
            torch.where(is_corner & ~is_here, outside, rois),
            output_size=output_size,
            spatial_scale=scale,
            sampling_ratio=sampling_ratio,
        )
        result = torch.where(is_here[..., None, None], pooled.to(result.dtype), result)
    return result


def can_pool(features: list[Tensor], boxes: list[Tensor]) -> bool:
    """Whether features and boxes are on one GPU, of one type, and not quantized."""
    first = features[0]
    return (first.is_cuda and first.is_floating_point()) and all(
        t.device == first.device and t.dtype == first.dtype for t in (*features, *boxes)
    )


def pays(features: list[Tensor], boxes: list[Tensor], output_size: tuple[int, int]) -> bool:
    """Whether this is the faster way on a GPU."""
    elements = sum(len(b) for b in boxes) * features[0].shape[1] * math.prod(output_size)
    return len(features) > 1 and elements <= _LARGEST and not torch.is_grad_enabled()


def sources_of(poolers: types.ModuleType) -> tuple[Callable[..., Any], ...]:
    """The functions of torchvision that are replaced, and those whose behaviour the kernel relies
    on."""
    return (poolers._multiscale_roi_align, poolers.roi_align)


def replace(poolers: types.ModuleType) -> None:
    """poolers: ``torchvision.ops.poolers``."""

    @substitute(poolers._multiscale_roi_align, sources_of(poolers), DIGESTS)
    def multiscale_roi_align(
        x_filtered: list[Tensor],
        boxes: list[Tensor],
        output_size: tuple[int, int],
        sampling_ratio: int,
        scales: list[float] | None,
        mapper: Callable[[list[Tensor]], Tensor] | None,
    ) -> Any:
        if scales is None or mapper is None or len(scales) != len(x_filtered):
            return NotImplemented
        if not can_pool(x_filtered, boxes) or not pays(x_filtered, boxes, output_size):
            return NotImplemented
        rois, levels = poolers._convert_to_roi_format(boxes), mapper(boxes)
        if levels.device != rois.device:
            return NotImplemented
        return pool(x_filtered, rois, levels, output_size, sampling_ratio, scales, poolers.roi_align)
