"""What a callable does to the GPU that is no operator, and that a replay would not do: it records
events, or seeds the GPU's generator."""

from __future__ import annotations

import torch

from pygraph.callables.host.user_code import is_library_file, mentions
from pygraph.callables.host.walk import Reachable

SEEDS_GPU = "it sets the state of a random number generator of the GPU; set it outside"
_RECORDS = ("record", "record_event")


def recorded_event(found: Reachable) -> str:
    """The reason if a callable reaches an event, and the program's own code that it reaches names what
    records one; empty if not. An event that the callable makes and drops is not reached, and orders
    nothing but the callable's own streams."""
    if not found.events:
        return ""
    own = [f.__code__ for f in found.running if not is_library_file(f.__code__.co_filename)]
    for code in own:
        if any(mentions(code, name) for name in _RECORDS):
            return (
                f"it may record the event {found.events[0]}, which a replay would not "
                f"({code.co_name}, {code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}); "
                "record it outside"
            )
    return ""


def gpu_seed(device: torch.device) -> tuple[int, int]:
    """The seed of a device's generator, and how many numbers it has drawn since then."""
    if device.type != "cuda":
        return 0, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    seed, offset = torch.cuda.default_generators[index].get_state().view(torch.int64).tolist()
    return seed, offset


def is_seeded(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether the generator was set between these two: drawing keeps the seed, and goes forward."""
    return before[0] != after[0] or after[1] < before[1]
