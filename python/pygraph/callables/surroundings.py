"""What a callable reads besides its arguments, as observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pygraph import runtime, signal_exceptions
from pygraph.callables.fused_numbers import FusedNumbers
from pygraph.callables.host.host_state import HostState
from pygraph.callables.host.random_states import may_seed, move
from pygraph.callables.observation import Gradient
from pygraph.callables.rates import Rated, Rates
from pygraph.undoing import Undo

if TYPE_CHECKING:
    from pygraph import _engine


@dataclasses.dataclass(eq=False)
class Surroundings:
    """host: the host's state. state: memory that the callable uses and that is not passed. gradients:
    of all tensors that may have them. followed: groups of optimizers whose learning rates are
    inputs. fused: groups of fused optimizers. numbers: of such groups, which are inputs, too.

    tensors: those that may have gradients. made, cleared: those whose gradients the
    callable makes, or sets to None. used: those whose gradients from before the callable uses.
    """

    host: HostState
    state: _engine.State
    gradients: list[Gradient]
    followed: list[Rated]
    fused: list[dict[str, Any]]
    numbers: FusedNumbers
    device: torch.device

    def __post_init__(self) -> None:
        self.rates = Rates(self.followed, self.device)
        self._may_seed = may_seed(self.host.found)
        self.tensors = [gradient.tensor for gradient in self.gradients]
        self.made = [gradient.tensor for gradient in self.gradients if gradient.after == "made"]
        self.cleared = [gradient.tensor for gradient in self.gradients if gradient.after == "none"]
        self.used = [gradient.tensor for gradient in self.gradients if gradient.is_used]

    def used_gradients(self) -> list[torch.Tensor]:
        """Gradients from before that the callable uses, as they are now."""
        return runtime.engine().gradients_of(self.used) if self.used else []

    def put_back(
        self, gradients: list[tuple[torch.Tensor, torch.Tensor | None]], kept: list[str]
    ) -> None:
        """Undoes what a rehearsal did on the host. gradients: of tensors, before it. kept: gets the
        paths of places where it has left inputs of its own, or what it computed from them."""
        for tensor, gradient in gradients:
            tensor.grad = gradient
        if self.host.holds():
            return
        try:
            kept += self.host.new_numbers(self.host.now())
        except Exception as error:  # of what the walk has met
            signal_exceptions.pass_on(error)
            kept.append(runtime.brief(error))
        finally:
            self.host.restore()

    def begin_to_look_for_seeds(self, undo: Undo) -> Callable[[], bool]:
        """Before a rehearsal. Returns a function that tells afterwards whether it has seeded. In the
        recording that does not run: what the other one reads of the generators is what it was."""
        if not self._may_seed or not runtime.is_first_recording():
            return lambda: False
        return move(undo)

    def note_kept(self) -> None:
        """That a recording has left rates or numbers of its own somewhere."""
        self.rates.are_kept |= bool(self.followed)
        if not self.followed and self.numbers.count:
            self.numbers.note_read()

    def owners(self) -> dict[int, list[torch.Tensor]]:
        """By storage of the state: the program's tensors that have it."""
        found = [t for t in self.host.found.tensors.values() if t.layout == torch.strided]
        by_address: dict[int, list[torch.Tensor]] = {}
        for tensor in found:
            by_address.setdefault(runtime.engine().flat_tensor(tensor).data_ptr(), []).append(tensor)
        numbered = enumerate(tensor.data_ptr() for tensor in self.state.tensors())
        return {i: by_address[address] for i, address in numbered if address in by_address}
