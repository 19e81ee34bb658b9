"""NumPy numbers are made tensors by the engine, with the same result."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from pygraph import runtime
from pygraph.torch_patches import numbers
from tests.python.compiled_programs import ReducingBackend

NUMBERS = (
    *(np.float64(2.5), np.float32(-2.5), np.float16(1.5), np.float64("nan"), np.float64("inf")),
    *(np.int64(-(2**63)), np.int32(3), np.int16(-3), np.int8(-3), np.uint8(255), np.bool_(True)),
    *(np.longlong(5), np.uint16(9), np.complex64(1j), np.array(3.0), np.array([1, 2])),
    *(2.5, -7, 2**62, True, float("-inf")),
)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__}:{n}")
def test_as_tensor_is_pytorchs(number: Any) -> None:
    ours, theirs = runtime.engine().as_tensor(number), torch._as_tensor_fullprec(number)
    assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
    assert torch._C._dispatch_keys(ours) == torch._C._dispatch_keys(theirs)
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    with torch.inference_mode():
        assert runtime.engine().as_tensor(number).is_inference()


@pytest.mark.parametrize("wrong", ["a string", 2**70, None, object()])
def test_what_is_no_number_raises_as_in_pytorch(wrong: Any) -> None:
    with pytest.raises(Exception) as theirs:
        torch._as_tensor_fullprec(wrong)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        runtime.engine().as_tensor(wrong)


def test_arrays_share_their_memory() -> None:
    array = np.zeros(())
    runtime.engine().as_tensor(array).fill_(3)
    assert array == 3


def test_a_default_device_is_that_of_numpys_numbers() -> None:
    with torch.device("meta"):
        assert runtime.engine().as_tensor(np.float64(1)).device.type == "meta"
        assert runtime.engine().as_tensor(1.0).device.type == "cpu"  # as _as_tensor_fullprec


class Scaled(torch.nn.Module):
    def __init__(self, temperature: Any) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.temperature


def _uses_the_engine(entry: Any) -> bool:
    return any(name.startswith("__import_pygraph_dot__engine") for name in entry.code.co_names)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.array])
def test_numbers_of_a_model_may_change(kind: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    model, backend = Scaled(kind(4)), ReducingBackend(reduces=True)
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(3)
    for value in (4, 8, 16):
        model.temperature = kind(value)
        assert torch.equal(compiled(x), x / value)
    assert backend.graphs == 1
    (entry,) = _debug_get_cache_entry_list(Scaled.forward.__code__)
    assert _uses_the_engine(entry)
    model.temperature = np.complex64(2)  # another dtype, another program
    assert torch.equal(compiled(x), x / 2)
    model.temperature = kind(2)
    assert torch.equal(compiled(x), x / 2)
    assert backend.graphs == 2


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: f"{type(n).__name__}:{n}")
@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_numbers_in_guards_are_dynamos(number: Any, device: str | None) -> None:
    with torch.device(device) if device else contextlib.nullcontext():
        ours, theirs = numbers.from_numpy(number), numbers.dynamos_from_numpy(number)
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
        assert ours.is_meta or torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    else:
        assert ours is theirs


def test_numbers_of_other_backends_are_loaded_as_always() -> None:
    for reduces in (True, False):
        torch._dynamo.reset()
        torch.compile(Scaled(np.float64(4)), backend=ReducingBackend(reduces))(torch.ones(3))
        (entry,) = _debug_get_cache_entry_list(Scaled.forward.__code__)
        assert _uses_the_engine(entry) == reduces


def test_numbers_of_python_that_vary() -> None:
    torch._dynamo.reset()
    backend = ReducingBackend(reduces=True)
    compiled = torch.compile(lambda x, scale: x * scale, backend=backend, dynamic=True)
    x = torch.ones(3)
    for scale in (0.5, 1 / 3, 2.0, float("inf")):
        assert torch.equal(compiled(x, scale), x * scale)
    assert backend.graphs <= 3
