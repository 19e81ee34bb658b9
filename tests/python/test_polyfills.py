"""Library functions that Dynamo traces written another way: equal, pinned, and for PyGraph only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._decomp.decompositions import _upsample_linear
from torch._subclasses.fake_tensor import FakeTensorMode

from pygraph import polyfills
from pygraph.compile.backend import backend
from pygraph.options import LIBRARY_FUNCTIONS
from pygraph.polyfills import substitute, torchvision_masks, torchvision_pooling
from pygraph.report.estimate import estimate
from pygraph.source_digest import digest_of

roi_heads = pytest.importorskip("torchvision.models.detection.roi_heads")
poolers = pytest.importorskip("torchvision.ops.poolers")


class _Compiler:
    """Runs what Dynamo traced; asks for substitutes or not."""

    def __init__(self, *transforms: str) -> None:
        self._transforms = transforms
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward

    def transforms_for(self) -> tuple[str, ...]:
        return self._transforms


def _library_function(x: torch.Tensor, factor: int = 2) -> torch.Tensor:
    return x * factor


def _unknown_function(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@substitute(_library_function, (_library_function,), (digest_of((_library_function,)),))
def _ours(x: torch.Tensor, factor: int = 2) -> Any:
    return x * factor + 100 if factor > 0 else NotImplemented


@substitute(_unknown_function, (_unknown_function,), "of another version")
def _never(x: torch.Tensor) -> torch.Tensor:
    return x * 0


def _call(function: Callable[..., Any], *args: Any, compiler: Any, **options: Any) -> float:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, *args), backend=compiler, **options)
    return float(compiled(torch.ones(())))


def test_only_compilers_that_ask_for_them_get_substitutes() -> None:
    assert _call(_library_function, compiler=_Compiler(LIBRARY_FUNCTIONS)) == 102
    assert _call(_library_function, compiler=_Compiler()) == 2
    assert _call(_library_function, compiler="eager") == 2
    assert _library_function(torch.ones(())) == 2


def test_the_backend_asks_unless_it_is_told_not_to() -> None:
    assert _call(_library_function, compiler="pygraph") == 102
    assert _call(_library_function, compiler=backend) == 102
    off = {"pygraph.transforms": "none"}
    assert _call(_library_function, compiler="pygraph", options=off) == 2
    assert _call(_library_function, compiler="pygraph", mode="max-autotune-no-cudagraphs") == 2


def test_a_substitute_may_decline() -> None:
    assert _call(_library_function, 5, compiler=_Compiler(LIBRARY_FUNCTIONS)) == 105
    assert _call(_library_function, -5, compiler=_Compiler(LIBRARY_FUNCTIONS)) == -5


def test_another_source_is_kept() -> None:
    assert _call(_unknown_function, compiler=_Compiler(LIBRARY_FUNCTIONS)) == 2


@pytest.mark.parametrize(
    ("ours", "library"), [(torchvision_masks, roi_heads), (torchvision_pooling, poolers)]
)
def test_the_installed_source_is_the_known_one(ours: Any, library: ModuleType) -> None:
    found = digest_of(ours.sources_of(library))
    assert found in ours.DIGESTS, "a new torchvision: compare, then add"


def test_a_library_without_the_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (roi_heads, poolers):
        monkeypatch.setitem(sys.modules, library.__name__, ModuleType("another version"))
    monkeypatch.setattr(polyfills, "_seen", set())
    polyfills.register()
    assert polyfills._seen == {roi_heads.__name__, poolers.__name__}


class _PytorchsDecomposition(ModuleType):
    """torch.nn.functional whose interpolation is the one that Inductor compiles."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    def interpolate(self, x: torch.Tensor, size: tuple[int, int], **_: Any) -> torch.Tensor:
        return _upsample_linear(x, list(size), False, [None, None])


def _objects(count: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.rand(2, count, 2) * torch.tensor([width, height])
    boxes = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], 1)
    return torch.rand(count, 1, 28, 28), boxes


def _all_at_once(masks: torch.Tensor, boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    masks, scale = roi_heads.expand_masks(masks, 1)
    boxes = roi_heads.expand_boxes(boxes, scale).long()
    return torchvision_masks.paste_masks(masks, boxes, size)


@pytest.mark.parametrize("seed", range(20))
def test_masks_are_pasted_as_torchvision_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    size = (5 + 7 * seed, 11 + 5 * seed)
    masks, boxes = _objects(6, *size)
    ours = _all_at_once(masks, boxes, size)
    # PyTorch's own kernels round the sources of the pixels another way.
    torch.testing.assert_close(
        ours, roi_heads.paste_masks_in_image(masks, boxes, size), atol=3e-6, rtol=0
    )
    monkeypatch.setattr(roi_heads, "F", _PytorchsDecomposition("functional"))
    assert torch.equal(ours, roi_heads.paste_masks_in_image(masks, boxes, size))


def test_boxes_at_the_border_and_of_one_pixel() -> None:
    size = (20, 30)
    corners = [[0, 0, 30, 20], [0, 0, 0, 0], [29, 19, 30, 20], [-4, -3, 8, 9], [3, 4, 3, 15]]
    boxes = torch.tensor(corners, dtype=torch.float)
    masks = torch.rand(len(corners), 1, 28, 28)
    torch.testing.assert_close(
        _all_at_once(masks, boxes, size),
        roi_heads.paste_masks_in_image(masks, boxes, size),
        atol=3e-6,
        rtol=0,
    )


def test_inverted_boxes_paint_nothing() -> None:
    size = (20, 30)
    corners = [[9.0, 4, 5, 12], [4, 12, 9, 4], [9, 12, 5, 4], [20, 3, 2, 9]]
    boxes = torch.tensor(corners)
    masks = torch.rand(len(corners), 1, 28, 28)
    ours = _all_at_once(masks, boxes, size)
    assert torch.equal(ours, roi_heads.paste_masks_in_image(masks, boxes, size))
    assert not ours.any()


@pytest.mark.parametrize(
    ("masks", "boxes", "fits"),
    [
        ((3, 1, 28, 28), (3, 4), True),
        ((3, 1, 28, 28), (2, 4), False),
        ((1, 1, 28, 28), (3, 4), False),
        ((3, 2, 28, 28), (3, 4), False),
        ((3, 28, 28), (3, 4), False),
        ((0, 1, 28, 28), (0, 4), True),
    ],
)
def test_only_what_torchvisions_models_have_is_pasted(
    masks: tuple[int, ...], boxes: tuple[int, ...], fits: bool
) -> None:
    with FakeTensorMode():
        on_gpu = torch.empty(masks, device="cuda"), torch.empty(boxes, device="cuda")
        assert torchvision_masks.can_paste(*on_gpu) is fits
        assert not torchvision_masks.can_paste(on_gpu[0], torch.empty(boxes))
        assert not torchvision_masks.can_paste(on_gpu[0].double(), on_gpu[1])


def test_only_boxes_beside_their_features_are_pooled() -> None:
    with FakeTensorMode():
        features, boxes = [torch.empty(1, 3, 8, 8, device="cuda")], [torch.empty(5, 4, device="cuda")]
        assert torchvision_pooling.can_pool(features, boxes)
        assert not torchvision_pooling.can_pool(features, [torch.empty(5, 4)])
        assert not torchvision_pooling.can_pool(features, [boxes[0].double()])
        quantized = [[t.to(torch.int8) for t in tensors] for tensors in (features, boxes)]  # or so
        assert not torchvision_pooling.can_pool(*quantized)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_torchvision_returns_for_odd_boxes_is_returned(seed: int) -> None:
    """Outside of the image, inverted, huge: where its slices raise there is nothing to compare."""
    generator = torch.Generator().manual_seed(seed)
    size = (17, 23)
    boxes = torch.randint(-30, 45, (60, 4), generator=generator)
    boxes[::9, 2] = 2**63 - 1
    boxes[1::9, 3] = -(2**63)
    masks = torch.rand(len(boxes), 1, 7, 7, generator=generator)
    ours = torchvision_masks.paste_masks(masks, boxes, size)
    compared = 0
    for mask, box, result in zip(masks, boxes, ours, strict=True):
        try:
            theirs = roi_heads.paste_mask_in_image(mask[0], box, *size)
        except RuntimeError:
            continue
        torch.testing.assert_close(result[0], theirs, atol=3e-6, rtol=0)
        compared += 1
    assert compared > 10


def test_no_objects() -> None:
    assert _all_at_once(*_objects(0, 8, 9), (8, 9)).shape == (0, 1, 8, 9)


def test_pasting_on_a_gpu_is_one_graph_and_reported() -> None:
    def paste(masks: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return roi_heads.paste_masks_in_image(masks, boxes, (48, 64))

    report = estimate("paste", paste, _objects(3, 48, 64), {})
    assert [graph.name for graph in report.graphs] == ["inference"]
    assert not report.cuts
    (applied,) = [a for a in report.transformations if a.transform == LIBRARY_FUNCTIONS]
    assert "paste_masks_in_image" in applied.what
    assert "test_polyfills.py" in applied.where


def _pyramid(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 64 >> level, 96 >> level, dtype=dtype) for level in range(4)]


def _boxes(*counts: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of all sizes, so that each level has some."""
    result = []
    for count in counts:
        corner = torch.rand(count, 2) * torch.tensor([360, 230])
        size = torch.exp2(torch.rand(count, 2) * 9)
        result.append(torch.cat([corner, corner + size], 1).to(dtype))
    return result


def _pools(ratio: int) -> tuple[Any, list[float], Any]:
    scales = [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    return ratio, scales, poolers.initLevelMapper(2, 5, canonical_scale=64)


@pytest.mark.parametrize("ratio", [-1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("counts", [(40, 30), (5, 0), (0, 0)])
def test_levels_are_pooled_as_torchvision_does(
    ratio: int, dtype: torch.dtype, counts: tuple[int, int]
) -> None:
    torch.manual_seed(ratio + sum(counts))
    features, boxes = _pyramid(dtype), _boxes(*counts, dtype=dtype)
    ratio, scales, mapper = _pools(ratio)
    levels = mapper(boxes)
    assert sum(counts) < 10 or set(levels.tolist()) == {0, 1, 2, 3}
    theirs = poolers._multiscale_roi_align(features, boxes, (5, 7), ratio, scales, mapper)
    rois = poolers._convert_to_roi_format(boxes)
    ours = torchvision_pooling.pool(features, rois, levels, (5, 7), ratio, scales, poolers.roi_align)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


def test_boxes_without_a_level_give_zeros() -> None:
    rois = poolers._convert_to_roi_format(_boxes(3, 0))
    levels = torch.tensor([0, -(2**63), 7])
    result = torchvision_pooling.pool(
        _pyramid(), rois, levels, (5, 5), 2, [1 / 4, 1 / 8, 1 / 16, 1 / 32], poolers.roi_align
    )
    assert result[0].any()
    assert not result[1:].any()


class _Pooler(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = poolers.MultiScaleRoIAlign(["a", "b", "c", "d"], 5, 2)
        _, self.pool.scales, self.pool.map_levels = _pools(2)

    def forward(self, features: list[torch.Tensor], boxes: list[torch.Tensor]) -> torch.Tensor:
        return self.pool(dict(zip("abcd", features, strict=True)), boxes, [(256, 384)] * 2) * 2


def test_pooling_on_a_gpu_is_one_graph_and_reported() -> None:
    report = estimate("pool", _Pooler(), (_pyramid(), _boxes(40, 30)), {})
    assert [graph.name for graph in report.graphs] == ["inference"]
    assert not report.cuts
    assert any("_multiscale_roi_align" in a.what for a in report.transformations)


def test_pooling_all_levels_must_pay() -> None:
    features, boxes = _pyramid(), _boxes(40, 30)
    with torch.no_grad():
        assert torchvision_pooling.pays(features, boxes, (7, 7))
        assert not torchvision_pooling.pays(features[:1], boxes, (7, 7))
        assert not torchvision_pooling.pays(features, boxes, (400, 400))
    assert not torchvision_pooling.pays(features, boxes, (7, 7))
