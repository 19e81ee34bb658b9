"""When is a signature worth a recording? Programs whose shapes vary could record for ever."""

from __future__ import annotations

# So many signatures are recorded at their second call; for the others a recording must first have
# been worth it. Integer arguments mean that the compiler was told, or has seen, that shapes vary.
_RECORDED_AT_ONCE = 2
_RECORDED_AT_ONCE_IF_DYNAMIC = 0
# Memory that is short may be free later: in a training loop's first steps, say, or beside another
# program. Each try may make PyTorch's allocator empty its caches, so there are few, and ever later.
_RETRIES = 3
_CALLS_UNTIL_RETRY = 1000
_ASSUMED_SECONDS = 0.01  # a recording of a small function, before the first has shown what it takes


class RecordingPolicy:
    """Of one partition. Not thread-safe beyond Python's lock."""

    def __init__(self, max_graphs: int) -> None:
        """max_graphs: how many graphs are kept at a time."""
        self._max_graphs = max_graphs
        self._recordings = 0
        self._seconds = 0.0
        self._dropped = 0
        self._out_of_memory = 0

    def note_recording(self, seconds: float) -> None:
        """A signature was recorded, whatever came of it."""
        self._recordings += 1
        self._seconds += seconds

    def note_dropped(self, graphs: int) -> None:
        """So many graphs made room for others."""
        self._dropped += graphs

    def calls_until_retry(self) -> int:
        """After a recording that ran out of memory; 0: it is not tried again."""
        self._out_of_memory += 1
        if self._out_of_memory > _RETRIES:
            return 0
        return int(_CALLS_UNTIL_RETRY * 4 ** (self._out_of_memory - 1))

    def seconds_to_wait(self, has_numbers: bool) -> float:
        """Host time that calls of a signature take uncaptured before it is worth a recording.

        Nobody knows how often a shape will come back. Recording it once it has cost what the
        recording costs is never more than twice as slow as knowing the future.

        has_numbers: whether there are integers among the arguments.
        """
        at_once = _RECORDED_AT_ONCE_IF_DYNAMIC if has_numbers else _RECORDED_AT_ONCE
        if self._recordings < at_once:
            return 0.0
        price = self._seconds / self._recordings if self._recordings > 0 else _ASSUMED_SECONDS
        # Each time that all kept graphs were pushed out by others, recording has paid less.
        return price * (1 << min(self._dropped // self._max_graphs, 60))
