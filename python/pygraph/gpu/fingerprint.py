"""A 64-bit hash of a tensor's bits, computed on the tensor's device with little memory."""

from __future__ import annotations

import functools

import torch

FACTOR = -7046029254386353131  # 2**64 / golden ratio, as a signed integer: odd
_CHUNK = 1 << 20  # words taken at a time
_LARGE_CHUNK = 1 << 23
_LARGE = 1 << 28  # tensors of more words are worth the memory of large chunks
_WORD_BYTES = 4
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all words of a tensor's bits, each weighted by its place in memory, modulo 2**64.

    Returns a 0-d int64 tensor on the tensor's device; nothing waits for the device. Equal for equal
    bits whatever the order of the additions, in tensors of the same layout. Takes 16 MiB (128 for
    tensors of over 2**28 words), half of it until :func:`forget`; reads tensors with gaps between
    their elements, and those that do not begin at a word, through a copy.

    A word has 32 bits, where the elements fill words: as an integer of 64 bits, times an even weight,
    its highest bit would not count. Many tensors: fingerprints.py.

    Made of PyTorch's own operators: a kernel for it would take longer to compile than it saves.
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return of_words(words_of(tensor)).view(())


def of_words(words: torch.Tensor) -> torch.Tensor:
    """The fingerprint of a flat tensor of :func:`words_of` with elements, as a tensor of one."""
    count = words.numel()
    if count <= _CHUNK:
        return (words * weights(words.device, count)).sum(0, keepdim=True)
    # The chunks are added up, each times a power of the factor, before the weights are applied.
    *full, last = torch.split(words, _LARGE_CHUNK if count > _LARGE else _CHUNK)
    weight = weights(words.device, full[0].numel())  # takes as much memory again while it is made
    total = torch.zeros(full[0].numel(), dtype=torch.int64, device=words.device)
    total[: last.numel()].copy_(last)
    for chunk in reversed(full):
        torch.add(chunk, total, alpha=FACTOR, out=total)
    return total.mul_(weight).sum(0, keepdim=True)


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as a flat tensor of integers: 32 bits each if the elements fill such words, else
    an integer for each element. Not for empty tensors."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_contiguous() and not (tensor.is_complex() or tensor.is_neg()):
        flat = tensor if tensor.ndim == 1 else tensor.view(-1)
    else:
        flat = distinct(as_integers(tensor)).reshape(-1).contiguous()
    if flat.stride(0) != 1:  # it has one element
        flat = flat.as_strided((1,), (1,))
    offset = flat.storage_offset() * flat.element_size()
    if offset % _WORD_BYTES != 0 or flat.data_ptr() % _WORD_BYTES != 0:
        flat = flat.clone()
    return flat.view(word_type(flat))


def word_type(dense: torch.Tensor) -> torch.dtype:
    """The integers that a dense tensor is read as."""
    fills_words = dense.nbytes % _WORD_BYTES == 0
    return torch.int32 if fills_words else _INTEGER_OF_SIZE[dense.element_size()]


def word_count(tensor: torch.Tensor) -> int:
    """The number of words of a dense tensor."""
    fills_words = tensor.nbytes % _WORD_BYTES == 0
    return tensor.nbytes // _WORD_BYTES if fills_words else tensor.numel()


def chunk_words() -> int:
    """The number of words that are taken at a time, of any but very large tensors."""
    return _CHUNK


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor's bits as integers of the same size; complex gains a dimension of two.

    The bits in memory, that is, before a conjugation or a negation that PyTorch leaves to the reader.
    """
    tensor = marked_as(tensor, tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF_SIZE[tensor.element_size()])


def marked_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view that is conjugated and negated, by its reader, if ``like`` is. Of the tensor itself: the
    bits in memory."""
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


def forget() -> None:
    """Frees the memory that fingerprints share between each other until the next one."""
    weights.cache_clear()
    _all_weights.cache_clear()


@functools.cache
def weights(device: torch.device, count: int) -> torch.Tensor:
    """The weights of the first ``count`` words."""
    return _all_weights(device, _CHUNK if count <= _CHUNK else _LARGE_CHUNK)[:count]


@functools.cache
def _all_weights(device: torch.device, count: int) -> torch.Tensor:
    mixed = torch.arange(1, count + 1, device=device).mul_(FACTOR)
    return mixed.bitwise_xor_(mixed >> 29)


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the same elements of memory, without repetitions: of a tensor that was expanded, or
    consists of windows that overlap. Few come twice.

    Tensors of one layout have views of one layout. A dense tensor's has one dimension, in the order of
    memory. Not for tensors that are still to be conjugated or negated.
    """
    if tensor.numel() == 0:
        return tensor
    if tensor.is_contiguous():
        return tensor.view(-1)
    sizes, strides = [1], [1]
    pairs = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(pair for pair in pairs if pair[0] > 0 and pair[1] > 1):
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = size, stride
        elif stride % strides[-1] == 0 and stride <= strides[-1] * sizes[-1]:
            # It goes on where the last one ends, or before.
            sizes[-1] += stride // strides[-1] * (size - 1)
        else:
            sizes.append(size)
            strides.append(stride)
    return tensor.as_strided(sizes[::-1], strides[::-1], tensor.storage_offset())
