"""The current device and the current stream of a thread, changed for a while.

PyTorch's own contexts, `torch.cuda.device` and `torch.cuda.stream`, do not undo their change if an
interrupt comes while they are entered or left.
"""

from __future__ import annotations

import functools

import torch

from pygraph.undoing import Undo


def use_device(index: int, undo: Undo) -> None:
    """Makes a device the current one until the steps of ``undo`` are made."""
    before = torch.cuda.current_device()
    # As PyTorch does it: no context is made on a device that the program does not use.
    undo.append(functools.partial(torch.cuda._maybe_exchange_device, before))
    torch.cuda._exchange_device(index)


def lasts(stream: torch.cuda.Stream) -> bool:
    """Whether PyTorch keeps the stream for good. Others may be destroyed while memory waits for it."""
    # PyTorch's numbers of streams: 0 is the default stream, odd ones are those that it keeps for good,
    # others are handles of streams that it has not made (c10/cuda/CUDAStream.cpp).
    number = stream.stream_id
    return number == 0 or number % 2 != 0


def stream_lasts(device: int | None = None) -> bool:
    """The same of the current stream."""
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not is_initialized or lasts(torch.cuda.current_stream(device))


def use_stream(stream: torch.cuda.Stream, undo: Undo) -> None:
    """The same for a stream of the current device."""
    undo.append(functools.partial(torch.cuda.set_stream, torch.cuda.current_stream()))
    torch.cuda.set_stream(stream)
