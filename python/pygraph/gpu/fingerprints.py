"""Fingerprints of many tensors, with few operators: the time of a small one is that of its calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from pygraph.gpu import fingerprint as single
from pygraph.gpu.queued import read

# Of which tensors that are put together have the same bits afterwards.
_COPIED = frozenset(
    {
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
_Like = tuple[torch.device, torch.dtype, torch.Size]


class Fingerprints:
    """The values of ``fingerprint`` for the tensors that are added, in their order.

    Dense tensors of one shape and type are put together, and their words multiplied by the weights at
    once. A batch takes no more memory than one fingerprint does: 2/3 of a chunk are copied and
    multiplied. As many words of tensors are kept for batches at the most.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._count = 0
        self._found: list[tuple[list[int], torch.Tensor]] = []  # the positions, and a value for each
        self._small: dict[_Like, list[tuple[int, torch.Tensor]]] = {}
        self._kept_words = 0
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Nothing waits for the device. A small tensor may be kept, and is read later."""
        position = self._count
        self._count += 1
        if tensor.numel() == 0:  # its fingerprint is zero
            return
        most = 2 * single.chunk_words() // 3
        words = single.word_count(tensor)
        if 2 * words > most or not _can_be_copied(tensor):
            self._found.append(([position], single.of_words(single.words_of(tensor))))
            return
        if self._kept_words + words > most:
            self.flush()
        self._kept_words += words
        like = (tensor.device, tensor.dtype, tensor.shape)
        self._small.setdefault(like, []).append((position, tensor))

    def flush(self) -> None:
        """Queues what is still to be done. The tensors may change from here on."""
        for (device, _, _), batch in self._small.items():
            positions = [position for position, _ in batch]
            words = _together([t.detach() if t.requires_grad else t for _, t in batch])
            found = (words * single.weights(device, words.shape[1])).sum(1)
            self._found.append((positions, found))
        self._small.clear()
        self._kept_words = 0

    def values(self) -> list[int]:
        """Waits for each device once."""
        self.flush()
        values = [0] * self._count
        numbers = read([found for _, found in self._found])
        for (positions, _), found in zip(self._found, numbers, strict=True):
            for i, value in zip(positions, found, strict=True):
                values[i] = value
        return values


def fingerprints(results: Iterable[Any]) -> list[int]:
    """One fingerprint for each tensor among ``results``, on any device. Waits for each device once."""
    return Fingerprints(t for t in results if isinstance(t, torch.Tensor)).values()


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether the words of a copy, in the order of its elements, are those of the tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in _COPIED
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _together(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The words of tensors of one shape and type, in a row for each."""
    count = len(tensors)
    if count == 1:
        return single.words_of(tensors[0]).unsqueeze(0)
    copies = torch.stack(tensors) if tensors[0].ndim == 0 else torch.cat(tensors)
    return copies.view(count, -1).view(single.word_type(tensors[0]))
