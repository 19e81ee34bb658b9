"""Mask R-CNN's ``paste_masks_in_image``: all masks at once, without reading a box on the CPU.

For every pixel of every image, the polyfill computes from which four pixels of the mask it comes. The
interpolation is the one of ``F.interpolate(mode="bilinear", align_corners=False)`` in the order of
PyTorch's decomposition, which Inductor compiles:

    source   = max(0, size_of_mask / size_of_box * (pixel - start_of_box + 0.5) - 0.5)
    row      = left + (right - left) * fraction(source_x)        for the rows above and below
    value    = above + (below - above) * fraction(source_y)

A box that lies outside the image, with which torchvision's slices may raise, gives zeros.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pygraph.polyfills import substitute

# Of torchvision 0.26.
DIGESTS = ("bb21d0407260b208",)


class _Axis(NamedTuple):
    """For each object (rows) and each pixel of the image along one axis (columns)."""

    low: Tensor  # index into the mask
    high: Tensor  # the next one, or the last
    fraction: Tensor  # how far between them
    is_inside: Tensor  # of the box


def _axis(start: Tensor, end: Tensor, image_size: int, mask_size: int) -> _Axis:
    """start, end: int64, one per object, the box's first and last pixel."""
    box_size = (end - start + 1).clamp(min=1)
    position = torch.arange(image_size, device=start.device)
    pixel = position - start[:, None]
    # Nothing of an inverted box, nor of one whose end overflows, as with torchvision's slices.
    is_inside = (position >= start[:, None]) & (position < end[:, None] + 1)
    # In double precision the quotient, once rounded, is the one that the CPU computes.
    scale = (mask_size / box_size.double()).float()[:, None]
    source = (scale * (pixel.float() + 0.5) - 0.5).clamp(min=0)
    low = source.long().clamp(max=mask_size - 1)
    return _Axis(low, (low + 1).clamp(max=mask_size - 1), (source - low).clamp(0, 1), is_inside)


def paste_masks(masks: Tensor, boxes: Tensor, image_size: tuple[int, int]) -> Tensor:
    """masks: (objects, 1, size, size); boxes: int64, (objects, 4), x and y of the first and last pixel.

    Returns (objects, 1, height, width), zero outside the boxes.
    """
    height, width = image_size
    y = _axis(boxes[:, 1], boxes[:, 3], height, masks.shape[-2])
    x = _axis(boxes[:, 0], boxes[:, 2], width, masks.shape[-1])
    each = torch.arange(masks.shape[0], device=masks.device)[:, None, None]

    def row(index: Tensor) -> Tensor:
        left = masks[each, 0, index[:, :, None], x.low[:, None, :]]
        right = masks[each, 0, index[:, :, None], x.high[:, None, :]]
        return left + (right - left) * x.fraction[:, None, :]

    above, below = row(y.low), row(y.high)
    value = above + (below - above) * y.fraction[:, :, None]
    is_inside = y.is_inside[:, :, None] & x.is_inside[:, None, :]
    return torch.where(is_inside, value, 0.0)[:, None]


def can_paste(masks: Tensor, boxes: Tensor) -> bool:
    """Whether the arguments have the shapes and types of torchvision's own models."""
    return (
        masks.is_cuda
        and boxes.device == masks.device
        and masks.dtype == torch.float32
        and masks.dim() == 4
        and masks.shape[1] == 1
        and boxes.shape == (masks.shape[0], 4)
    )


def sources_of(roi_heads: types.ModuleType) -> tuple[Callable[..., Tensor], ...]:
    """The functions of torchvision that are replaced. They must compute what is computed here."""
    return (
        roi_heads.paste_masks_in_image,
        roi_heads.paste_mask_in_image,
        roi_heads.expand_boxes,
        roi_heads.expand_masks,
    )


def replace(roi_heads: types.ModuleType) -> None:
    """roi_heads: ``torchvision.models.detection.roi_heads``."""

    @substitute(roi_heads.paste_masks_in_image, sources_of(roi_heads), DIGESTS)
    def paste_masks_in_image(
        masks: Tensor, boxes: Tensor, img_shape: tuple[int, int], padding: int = 1
    ) -> Any:
        if not can_paste(masks, boxes) or not all(isinstance(size, int) for size in img_shape):
            return NotImplemented
        masks, scale = roi_heads.expand_masks(masks, padding=padding)
        boxes = roi_heads.expand_boxes(boxes, scale).to(dtype=torch.int64)
        return paste_masks(masks, boxes, img_shape)
