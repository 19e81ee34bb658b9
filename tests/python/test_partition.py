"""What a partition believes of the compiler's hints; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from pygraph.options import Options
from pygraph.partition import Partition, PartitionInfo


def _partition(argument_count: int, counts_numbers: bool) -> Partition:
    info = PartitionInfo(
        name="forward",
        device=0,
        argument_count=argument_count,
        counts_numbers=counts_numbers,
        static=frozenset({0}),
        mutated=frozenset({1}),
        saved=(),
        on_host=frozenset(),
    )
    return Partition(lambda args: args, info, Options())


@pytest.mark.parametrize(
    ("argument_count", "counts_numbers", "fits"),
    [(2, False, True), (3, True, True), (3, False, False), (2, True, False)],
)
def test_hints_are_dropped_where_they_do_not_fit(
    argument_count: int, counts_numbers: bool, fits: bool
) -> None:
    args = [torch.zeros(1), torch.zeros(1), 7]
    assert _partition(argument_count, counts_numbers)._hints_fit(args) is fits


def test_reset_forgets_every_signature() -> None:
    partition = _partition(1, True)
    partition.entries[b"key"] = object()  # type: ignore[assignment]
    partition.reset()
    assert partition.entries == {}


def test_a_partition_lives_as_long_as_its_callable() -> None:
    import gc
    import weakref

    partition = _partition(1, True)
    reference = weakref.ref(partition)
    callable_ = partition.callable
    del partition
    gc.collect()
    assert reference() is not None
    del callable_
    gc.collect()
    assert reference() is None
