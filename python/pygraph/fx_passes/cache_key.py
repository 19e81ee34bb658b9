"""What keeps code that Inductor generates for PyGraph apart in the compiler's caches.

The keys of Inductor's and AOTAutograd's caches hold the ``uuid`` of each custom pass, so a pass that
changes nothing extends them. ``torch.compiler.config.cache_key_tag`` would extend more than that: it is
also in the key of the results of tuning, and Inductor's worker processes, which compile kernels, do not
get it. Their results would not be found again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass


def uuid_with(user_pass: Any, *key: object) -> Any:
    """The ``uuid`` of a pass of ours that runs a user's pass. None, so that nothing is cached, if the
    user's pass has no ``uuid``."""
    if user_pass is None:
        return ("pygraph", *key)
    user = user_pass.uuid() if hasattr(user_pass, "uuid") else None
    return None if user is None else ("pygraph", *key, user)


def beside(user_pass: Any, ours: Callable[[Any], CustomGraphPass], *, comes_first: bool) -> Any:
    """The value of Inductor's setting for our pass and the user's.

    user_pass: as in the setting. Newer releases of PyTorch take several passes, and passes that take a
        flag for inference.
    ours: makes our pass, which runs the given one first.
    """
    knows_inference = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())
    if isinstance(user_pass, knows_inference) and not takes_several():
        return _in_one(ours(None), user_pass, comes_first)
    if isinstance(user_pass, (list, tuple)):
        users = list(user_pass)
    elif isinstance(user_pass, knows_inference):
        users = [user_pass]
    else:
        return ours(user_pass)
    if not users:
        return ours(None)
    return [ours(None), *users] if comes_first else [*users, ours(None)]


def takes_several() -> bool:
    """Whether Inductor's settings take lists of passes."""
    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def _in_one(ours: CustomGraphPass, user_pass: Any, ours_first: bool) -> Any:
    """One pass for both, for PyTorch 2.12, which takes a pass with a flag for inference, but only one
    pass."""

    class Both(custom_graph_pass.CustomInferenceAwareGraphPass):  # type: ignore[misc]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            if ours_first:
                ours(graph)
            user_pass(graph, is_inference)
            if not ours_first:
                ours(graph)

        def uuid(self) -> Any:
            return uuid_with(user_pass, ours.uuid())

    return Both()


class CacheKeyPass(CustomGraphPass):  # type: ignore[misc]
    """Runs the user's pass, if there is one, and nothing else. ``key``: what it adds to the keys."""

    def __init__(self, user_pass: Any, *key: object) -> None:
        self._user_pass = user_pass
        self._key = key

    def __call__(self, graph: fx.Graph) -> None:
        if self._user_pass is not None:
            self._user_pass(graph)

    def uuid(self) -> Any:
        return uuid_with(self._user_pass, *self._key)
