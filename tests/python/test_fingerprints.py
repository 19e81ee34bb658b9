"""Fingerprints of many tensors are those of each tensor alone, with fewer operators."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraph.gpu import fingerprint as single
from pygraph.gpu.fingerprint import fingerprint
from pygraph.gpu.fingerprints import Fingerprints, fingerprints

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.uint16),
]
SHAPES = [(), (0,), (0, 3), (1,), (2,), (3,), (5, 7), (64,), (8, 16), (2, 3, 4), (1, 1), (16, 16)]


def _alone(tensors: list[torch.Tensor]) -> list[int]:
    return [int(fingerprint(tensor)) for tensor in tensors]


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN with payloads among them."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (count * size,), dtype=torch.uint8).view(dtype).view(shape)


def _layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """Tensors on the memory of one: dense, with gaps, repeated, and to be read in other ways."""
    found = [x, x.clone(), x.unsqueeze(-1).expand(*x.shape, 3), x.unsqueeze(0)]
    if x.ndim > 1:
        found += [x.transpose(0, 1), x[:, ::2], x[..., 1:]]
    if x.ndim > 0:
        found += [x[1:], x[::2], x[:-1]]
    if x.is_complex():
        found += [x.conj(), x.conj().imag, x.real]
    if x.dtype.is_floating_point and x.dtype is not torch.float8_e4m3fn:
        found += [x.clone().requires_grad_(), torch.nn.Parameter(x)]
    return found


def _tensors(chance: random.Random) -> list[torch.Tensor]:
    tensors = [
        layout
        for dtype in DTYPES
        for shape in SHAPES
        for _ in range(2)
        for layout in _layouts(_random(shape, dtype))
    ]
    chance.shuffle(tensors)
    return tensors


@pytest.mark.parametrize("chunk", [1 << 20, 100, 16, 8])
def test_each_has_the_fingerprint_that_it_has_alone(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(chunk)
    monkeypatch.setattr(single, "_CHUNK", chunk)
    monkeypatch.setattr(single, "_LARGE_CHUNK", 2 * chunk)
    monkeypatch.setattr(single, "_LARGE", 3 * chunk)
    single.forget()
    tensors = _tensors(random.Random(chunk))
    assert fingerprints(tensors) == _alone(tensors)
    single.forget()


@pytest.mark.parametrize("count", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 21) + 5])
def test_at_the_borders_of_chunks(count: int) -> None:
    tensors = [torch.randn(count), torch.randn(3), torch.randn(count).to(torch.bfloat16)]
    tensors += [torch.randn(count // 4), torch.randn(count // 4), torch.randn(3)]
    assert fingerprints(tensors) == _alone(tensors)


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_the_value_is_the_sum_of_weighted_words(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "_CHUNK", chunk)
    words = torch.randint(-(1 << 31), 1 << 31, (53,), dtype=torch.int32)
    weights = []
    for i in range(1, chunk + 1) if chunk == 16 else range(1, 54):
        mixed = (i * single.FACTOR + (1 << 63)) % (1 << 64) - (1 << 63)
        weights.append(mixed ^ (mixed >> 29))
    expected = sum(
        word * weights[i % chunk] * single.FACTOR ** (i // chunk)
        for i, word in enumerate(words.tolist())
    )
    assert (int(fingerprint(words)) - expected) % (1 << 64) == 0
    assert (fingerprints([words, words])[1] - expected) % (1 << 64) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float64])
@pytest.mark.parametrize("count", [64, 63])
def test_where_a_tensor_begins_does_not_matter(dtype: torch.dtype, count: int) -> None:
    x = _random((200,), dtype)
    for start in range(9):
        part = x[start : start + count]
        assert fingerprint(part) == fingerprint(part.clone())
        assert fingerprints([part, part.clone()]) == _alone([part, part.clone()])


def test_the_sign_of_a_number_of_64_bits_counts_in_every_place() -> None:
    zeros = torch.zeros(64, dtype=torch.float64)
    for position in range(64):
        changed = zeros.clone()
        changed[position] = -0.0
        assert fingerprint(changed) != fingerprint(zeros)
    assert fingerprint(torch.full((64,), -0.0, dtype=torch.float64)) != fingerprint(zeros)


def test_a_change_of_any_element_in_any_tensor_shows() -> None:
    tensors = [torch.zeros(5) for _ in range(4)]
    before = fingerprints(tensors)
    for i, tensor in enumerate(tensors):
        for position in range(5):
            tensor[position] = -0.0
            after = fingerprints(tensors)
            assert [j for j in range(4) if after[j] != before[j]] == [i]
            tensor[position] = 0.0


def test_what_is_no_tensor_is_left_out_and_nothing_is_something() -> None:
    x = torch.ones(3)
    assert fingerprints([None, x, 3, x]) == _alone([x, x])
    assert fingerprints([]) == []


def test_after_a_flush_tensors_may_change() -> None:
    x, y = torch.ones(3), torch.ones(3)
    expected = _alone([x, y])
    queued = Fingerprints([x, y])
    queued.flush()
    x.zero_()
    assert queued.values() == expected


class _Calls(TorchDispatchMode):
    """Counts the operators that are called, and the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None:
            self.largest = max(self.largest, result.nbytes)
        return result


def test_small_tensors_take_few_operators_each() -> None:
    """As in the gradients of a model: most are vectors of few lengths."""
    tensors = [torch.randn(768) for _ in range(100)] + [torch.randn(3072) for _ in range(12)]
    fingerprints(tensors)
    with _Calls() as alone:
        expected = _alone(tensors)
    with _Calls() as together:
        assert fingerprints(tensors) == expected
    assert together.count < 30 + len(tensors)
    assert together.count < alone.count / 4


def test_a_batch_takes_no_more_memory_than_one_fingerprint() -> None:
    chunk = single.chunk_words()
    tensors = [torch.zeros(chunk // 8) for _ in range(50)]
    fingerprints(tensors)
    with _Calls() as calls:
        fingerprints(tensors)
    assert calls.largest <= 8 * chunk * 2 // 3


def test_few_tensors_are_kept_for_a_batch() -> None:
    """The others may be copies that nothing else needs any more."""
    chunk = single.chunk_words()
    queued, most = Fingerprints(), 0
    for _ in range(40):
        queued.add(torch.zeros(chunk // 8))
        kept = [tensor for batch in queued._small.values() for _, tensor in batch]
        most = max(most, sum(tensor.numel() for tensor in kept))
    assert 0 < most <= 2 * chunk // 3
