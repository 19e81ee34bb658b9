"""The replay of an audit (audit.py), on clones of the tensors that it overwrites."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from pygraph import runtime
from pygraph.gpu import allocator
from pygraph.gpu.allocator import free_bytes
from pygraph.gpu.clones import clone_shared_storages, sharing_storages
from pygraph.gpu.fingerprint import forget
from pygraph.partition.host import Host
from pygraph.partition.signature import Entry
from pygraph.record.recorder import DEFAULT_GENERATOR, generator_of
from pygraph.verify.bits import LARGE_BYTES, differing, summary
from pygraph.verify.rehearsal import POISON_ONES

_MARGIN = 1 << 28  # bytes that must stay free: fingerprints use half of it, libraries some


class NotPossible(RuntimeError):
    """The reason an audit is not made now."""


def give_back(after: int) -> None:
    """As the one in :mod:`pygraph.gpu.allocator`. Never raises."""
    with contextlib.suppress(Exception):
        allocator.give_back(after)


class AuditReplay:
    """One replay on clones of the tensors that it overwrites, and the expected results."""

    def __init__(self, host: Host, entry: Entry, args: list[Any]) -> None:
        engine = runtime.engine()
        graph = entry.graph
        assert graph is not None
        # To be asked before Python has looked at the storages (gpu/clones.py).
        groups = engine.given_away(args)
        self.given_away = frozenset(i for group in groups for i in group.positions)
        # The same as a thorough check has (verify/rehearsal.py), so that suspects are the same results
        # there.
        self._overwritten = sorted(host.written.union(entry.recording.returned, graph.donated))
        self.visible = sorted(sharing_storages(args, host.written) - self.given_away)
        self._graph = graph
        self._device = host.info.device
        self._in_bits = graph.output_bytes <= LARGE_BYTES
        self._seen: Sequence[Any] = ()
        self._offsets: list[tuple[Any, int]] = []  # generators, and where the call should leave them
        self.waited = 0.0  # seconds, for what was under way before
        tensors = _tensors([args[i] for i in self._overwritten])
        memory = [engine.memory_of(tensor) for tensor in tensors]
        clones = sum({m.data_ptr(): m.nbytes for m in memory}.values())
        self.bytes = clones + graph.output_bytes + graph.block_bytes  # that an execution takes

    def check_room(self) -> None:
        """Raises NotPossible if the device has no room for the clones, the results of both runs, and
        the internal memory of the uncaptured run."""
        graph = self._graph
        wanted = self.bytes + graph.output_bytes + graph.block_bytes + graph.workspace_bytes + _MARGIN
        if free_bytes() >= wanted:
            return
        if free_bytes() + _kept_bytes() >= wanted:
            give_back(wanted)
        if free_bytes() < wanted:
            raise NotPossible(f"it needs {wanted >> 20} MiB of free memory")

    def wait(self) -> None:
        start = time.perf_counter()
        torch.cuda.current_stream().synchronize()
        self.waited = time.perf_counter() - start

    def generators(self, args: list[Any]) -> list[torch.Generator]:
        """Those that a replay advances."""
        return [generator_of(source, args, self._device) for source in self._graph.random_arguments]

    def make(self, args: list[Any]) -> float:
        """Makes the replay. Returns its seconds. Does not change the arguments and generators."""
        clones = clone_shared_storages(args, self._overwritten)
        default = None
        copies = []
        for source, original in zip(self._graph.random_arguments, self.generators(args), strict=True):
            copy = original.clone_state()
            copies.append((original, copy))
            if source == DEFAULT_GENERATOR:
                default = copy
            else:
                clones[source] = copy
        if not self._graph.matches(clones):
            raise NotPossible("clones of its inputs do not fit the graph")
        start = time.perf_counter()
        outputs = self._graph.replay(clones, True, POISON_ONES, default)
        torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - start
        self._offsets = [(original, copy.get_offset()) for original, copy in copies]
        results = _tensors([*outputs, *(clones[i] for i in self.visible)])
        self._seen = summary(results, self._in_bits)
        return seconds

    def differing(self, results: Sequence[Any]) -> list[int]:
        """Positions of results that differ between the call and the replay. Raises NotPossible if
        another thread has drawn from the call's generator meanwhile."""
        if any(generator.get_offset() != offset for generator, offset in self._offsets):
            raise NotPossible("somebody else has drawn random numbers meanwhile")
        return differing(self._seen, _tensors(results), self._in_bits)

    def forget(self) -> None:
        """Frees what the audit has taken."""
        self._seen = ()
        forget()


def _tensors(results: Sequence[Any]) -> list[torch.Tensor]:
    return [result for result in results if isinstance(result, torch.Tensor)]


def _kept_bytes() -> int:
    """Upper limit of the bytes that PyTorch's allocator could release."""
    return allocator.reserved_bytes() - torch.cuda.memory_allocated()
