"""Operators that programs call besides PyTorch's: custom ones, honest and not, and Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without
    triton = None


@custom_op("pygraph_fuzz::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


@custom_op("pygraph_fuzz::add_into", mutates_args=("to",))
def add_into(to: Tensor, x: Tensor) -> None:
    to.add_(x)


@custom_op("pygraph_fuzz::pair", mutates_args=())
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    scratch = torch.empty_like(x)
    scratch.copy_(x)
    return scratch.sin(), scratch.cos().contiguous()


# Cuts programs: compiled ones have another partition after it.
@custom_op("pygraph_fuzz::outside", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def outside(x: Tensor) -> Tensor:
    return x + 1


twice.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
outside.register_fake(lambda x: torch.empty_like(x))
add_into.register_fake(lambda to, x: None)
pair.register_fake(
    lambda x: (torch.empty_like(x), torch.empty_like(x, memory_format=torch.contiguous_format))
)
twice.register_autograd(lambda ctx, grad: grad * 2)
outside.register_autograd(lambda ctx, grad: grad)


def hidden_write(to: Tensor, x: Tensor) -> Tensor:
    """An operator whose schema does not say that it writes to its first argument."""
    return torch.ops.pygraph_fuzz.hidden_write(to, x)


_library = torch.library.Library("pygraph_fuzz", "FRAGMENT")
_library.define("hidden_write(Tensor to, Tensor x) -> Tensor")


def _hidden_write(to: Tensor, x: Tensor) -> Tensor:
    to.mul_(0.5)
    return to + x


_library.impl("hidden_write", _hidden_write, "CompositeExplicitAutograd")


if triton is not None:

    @triton.jit
    def _scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, at < n) * factor, at < n)

    @triton.jit
    def _add_kernel(to, x, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(to + at, at < n) + tl.load(x + at, at < n), at < n)

    @triton.jit
    def _positive_kernel(to, x, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, at < n)
        tl.store(to + at, value, (at < n) & (value > 1e9))


def _need_one_layout(*tensors: Tensor) -> None:
    """On every device: the kernels find an element by its number, whatever the strides are, and would
    read what lies behind a tensor that has fewer elements in memory."""
    first = tensors[0]
    if not all(t.is_contiguous() and t.shape == first.shape for t in tensors):
        raise ValueError("the Triton kernels take contiguous tensors of one shape")


def triton_scale(x: Tensor) -> Tensor:
    """A fresh result, of a contiguous tensor."""
    _need_one_layout(x)
    y = torch.empty_like(x)
    if not x.is_cuda:
        return y.copy_(x * 0.75)
    _scale_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 0.75, BLOCK=256)
    return y


def triton_add(to: Tensor, x: Tensor) -> None:
    """Writes in place; both contiguous and of one shape."""
    _need_one_layout(to, x)
    if not x.is_cuda:
        to.add_(x)
        return
    _add_kernel[(triton.cdiv(x.numel(), 256),)](to, x, x.numel(), BLOCK=256)


def triton_where_large(to: Tensor, x: Tensor) -> None:
    """Writes nothing for most values, although it may. Both contiguous and of one shape."""
    _need_one_layout(to, x)
    if not x.is_cuda:
        to.copy_(torch.where(x > 1e9, x, to))
        return
    _positive_kernel[(triton.cdiv(x.numel(), 256),)](to, x, x.numel(), BLOCK=256)
