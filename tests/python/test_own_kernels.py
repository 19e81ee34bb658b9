"""Operators of PyTorch's whose kernels a library has replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pygraph import runtime

_LISTED = [("_foreach_norm", "Scalar"), ("_foreach_max", ""), ("_foreach_powsum", "Scalar")]


def _has_own(name: str, overload: str) -> bool:
    return runtime.engine().has_own_kernels(f"aten::{name}", overload)


def _replacement(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("nobody calls it")


@pytest.mark.parametrize("key", ["CUDA", "AutogradCUDA", "AutocastCUDA", "ADInplaceOrView"])
@pytest.mark.parametrize(("name", "overload"), _LISTED)
def test_a_replaced_kernel_is_noticed_as_long_as_it_is_there(
    name: str, overload: str, key: str
) -> None:
    if not hasattr(torch.ops.aten, name):
        pytest.skip("this PyTorch has no such operator")
    assert _has_own(name, overload)
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(f"{name}.{overload}" if overload else name, _replacement, key)
        assert not _has_own(name, overload)
        assert all(_has_own(*other) for other in _LISTED if other[0] != name)
    finally:
        library._destroy()
    assert _has_own(name, overload)


def test_kernels_for_other_devices_do_not_matter() -> None:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_foreach_norm.Scalar", _replacement, "PrivateUse1")
        assert _has_own("_foreach_norm", "Scalar")
    finally:
        library._destroy()


def test_an_operator_that_is_not_known_is_nobodys() -> None:
    assert not _has_own("no_such_operator", "")
