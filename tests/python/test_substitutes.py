"""Library functions that Dynamo traces written another way: equal, pinned, and for PyGraph only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._decomp.decompositions import _upsample_linear

from pygraph import substitutes
from pygraph.backend import backend
from pygraph.explanation.estimate import estimate
from pygraph.substitutes import digest_of, substitute, torchvision_masks
from pygraph.transforms.names import LIBRARY_FUNCTIONS, TRANSFORMS

roi_heads = pytest.importorskip("torchvision.models.detection.roi_heads")


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


@substitute(_library_function, (_library_function,), digest_of((_library_function,)))
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
    sources = torchvision_masks.sources_of(roi_heads)
    assert digest_of(sources) == torchvision_masks.DIGEST, "a new torchvision: compare, then add"


def test_a_library_without_the_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, roi_heads.__name__, ModuleType("another version"))
    monkeypatch.setattr(substitutes, "_seen", set())
    substitutes.register()
    assert substitutes._seen == {roi_heads.__name__}


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


def test_no_objects() -> None:
    assert _all_at_once(*_objects(0, 8, 9), (8, 9)).shape == (0, 1, 8, 9)


def test_pasting_on_a_gpu_is_one_graph_and_reported() -> None:
    def paste(masks: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return roi_heads.paste_masks_in_image(masks, boxes, (48, 64))

    report = estimate("paste", paste, _objects(3, 48, 64), {}, TRANSFORMS)
    assert [graph.name for graph in report.graphs] == ["inference"]
    assert not report.cuts
    (applied,) = [a for a in report.transformations if a.transform == LIBRARY_FUNCTIONS]
    assert "paste_masks_in_image" in applied.what
    assert "test_substitutes.py" in applied.where
