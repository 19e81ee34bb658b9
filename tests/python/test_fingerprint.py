"""The fingerprint: equal for equal bits, different for any single change."""

from __future__ import annotations

import pytest
import torch

from pygraph.gpu import fingerprint as module
from pygraph.gpu.fingerprint import fingerprint
from pygraph.verify.bits import differing


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_equal_bits_have_equal_fingerprints(dtype: torch.dtype) -> None:
    x = (torch.randn(37, 53) * 5).to(dtype)
    assert fingerprint(x) == fingerprint(x.clone())


def test_what_a_reader_is_to_conjugate_or_negate_has_the_bits_of_its_memory() -> None:
    x = torch.randn(7, 5, dtype=torch.complex64)
    assert x.conj().is_conj() and x.conj().imag.is_neg()
    assert fingerprint(x.conj()) == fingerprint(x)
    assert fingerprint(x.conj().imag) == fingerprint(x.imag)


def test_every_element_counts() -> None:
    x = torch.zeros(5000)
    base = fingerprint(x)
    for position in (0, 1, 4095, 4096, 4999):
        changed = x.clone()
        changed[position] = 1e-30
        assert fingerprint(changed) != base


def test_exchanging_two_elements_counts() -> None:
    x = torch.arange(10000.0)
    y = x.clone()
    y[[3, 9000]] = y[[9000, 3]]
    assert fingerprint(x) != fingerprint(y)


def test_the_sign_of_zero_and_nan_payloads_are_bits_like_others() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert fingerprint(nan) == fingerprint(nan.clone())
    assert differing([nan], [nan.clone()], in_bits=True) == []


@pytest.mark.parametrize("chunk", [7, 64])
def test_every_chunk_counts(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "_LARGE", 100)
    monkeypatch.setattr(module, "_LARGE_CHUNK", chunk)
    x = torch.zeros(200)
    found = {int(fingerprint(x))}
    for position in range(200):
        changed = x.clone()
        changed[position] = 1.0
        found.add(int(fingerprint(changed)))
    assert len(found) == 201


def test_empty_and_scalar_tensors() -> None:
    assert fingerprint(torch.empty(0)) == 0
    assert fingerprint(torch.tensor(3.0)) != fingerprint(torch.tensor(4.0))


def test_dense_layouts_are_read_in_memory_order() -> None:
    x = torch.randn(8, 16)
    assert fingerprint(x.t()) == fingerprint(x)


def test_same_bits_compares_layouts_too() -> None:
    x = torch.randn(4, 4)
    assert differing([x], [x.t()], in_bits=True) == [0]
    assert differing([x], [x.double()], in_bits=True) == [0]
    assert differing([x], [x.clone()], in_bits=True) == []
