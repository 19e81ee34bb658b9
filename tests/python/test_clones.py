"""Copies of arguments lie in memory as their originals do, and are read as they are."""

from __future__ import annotations

import pytest
import torch

from pygraph.gpu.clones import clone_shared_storages


def test_clones_keep_what_pytorch_leaves_to_the_reader() -> None:
    base = torch.randn(6, dtype=torch.complex64)
    args = [base.conj(), base.conj().imag]
    clones = clone_shared_storages(args, [0])
    assert clones[0].is_conj() and clones[1].is_neg()
    for clone, original in zip(clones, args, strict=True):
        assert torch.equal(clone, original)
    clones[0].resolve_conj().zero_()
    base.zero_()
    assert clones[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_clones_lie_as_their_originals_do(dtype: torch.dtype) -> None:
    base = torch.arange(15).to(dtype)
    args = [base[1:7], 3, base[2:].as_strided((2, 3), (5, 2), 4), None, torch.ones(3), base[:0]]
    clones = clone_shared_storages(args, [0, 1, 3])
    assert clones[1] == 3
    assert clones[4] is args[4]
    for i in (0, 2, 5):
        assert torch.equal(clones[i], args[i])
        assert clones[i].stride() == args[i].stride()
        assert clones[i].storage_offset() == args[i].storage_offset()
    clones[0].zero_()
    assert base[6] != 0
    assert clones[2].reshape(-1)[0] == 0, "the two still overlap"


def test_clones_may_be_elsewhere() -> None:
    base = torch.arange(15.0)
    args = [base[1:7], base[2:], torch.ones(3)]
    clones = clone_shared_storages(args, [0], torch.device("meta"))
    assert [clone.device.type for clone in clones] == ["meta", "meta", "cpu"]
    assert [clone.storage_offset() for clone in clones] == [1, 2, 0]
    assert clones[2] is args[2]


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_that_are_all_of_their_storages_have_storages_of_their_own(dtype: torch.dtype) -> None:
    args = [torch.arange(6).view(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.ones(1, 5)[:, :]]
    args += [args[0].clone().t().contiguous(), torch.empty(0), torch.ones(4, 4)[:3]]
    args.append(torch.arange(4.0).as_strided((1, 4), (7, 1)))
    args.append(torch.nn.Parameter(torch.ones(3)))
    clones = clone_shared_storages(args, range(len(args)))
    for clone, original in zip(clones, args, strict=True):
        assert torch.equal(clone, original)
        assert _layout(clone) == _layout(original.detach())
        assert type(clone) is torch.Tensor
        before = original.detach().clone()
        clone.zero_()
        assert torch.equal(original, before)


def test_bits_are_copied() -> None:
    bits = torch.tensor([0x7FA00001, -0x5FFFFF, 1, -(1 << 31)], dtype=torch.int32)
    (clone,) = clone_shared_storages([bits.view(torch.float32)], [0])
    assert torch.equal(clone.view(torch.int32), bits)


def test_a_tensor_that_shares_its_storage_is_cloned_with_the_other() -> None:
    base = torch.zeros(4)
    clones = clone_shared_storages([base, base.view(2, 2), base], [0])
    clones[0].fill_(1)
    assert clones[1].sum() == clones[2].sum() == 4
    assert base.sum() == 0
