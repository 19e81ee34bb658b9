"""A callable for one kind of call and one state of the host: observed first, then served by a graph.

observed calls    uncaptured; until one of them changes nothing on the host that can be seen
then              the calls of a partition (partition/partition.py) whose function is a
                  StepFunction: recorded, verified, compared twice more, on trial, replayed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph import runtime
from pygraph.callables import fused_numbers
from pygraph.callables.backward_function import Backwards
from pygraph.callables.forward_function import ForwardFunction
from pygraph.callables.fused_numbers import FusedNumber, FusedNumbers, names_of
from pygraph.callables.host.host_state import HostState
from pygraph.callables.known_call import KnownCall
from pygraph.callables.observation import Observation, version_of, watched_tensors
from pygraph.callables.observed_call import observed_call
from pygraph.callables.optimizer_forms import HostCounts
from pygraph.callables.rates import Follows, Rated, followed, fused_groups, names_of_rates
from pygraph.callables.refusals import unfit_argument
from pygraph.callables.saved_tensors import address_of
from pygraph.callables.signature import Arguments, is_same_structure
from pygraph.callables.step_function import StepFunction
from pygraph.callables.surroundings import Surroundings
from pygraph.callables.used_gradients import OldGradients, UsedGradients
from pygraph.options import Options
from pygraph.partition.partition import Partition
from pygraph.partition.signature import PartitionInfo

# Observed calls that change something on the host, after which the callable is taken to do so always.
_MOST_OBSERVED = 8
_COMPARED_CALLS = 2  # after the verification: with it, three in a row


class Variant:
    """Not thread-safe: its callable's lock is held while it is observed."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Options,
        adapts: bool,
        follows: Follows,
    ) -> None:
        """adapts: whether rates are tensors in uncaptured calls, too, where that makes a difference."""
        self.name = name
        self.refusal = ""
        self.partition: Partition | None = None
        self.observed = 0  # calls
        self.has_served = False
        self.holds_objects = False  # that were passed, besides tensors and modules, which stay
        self.host: HostState | None = None  # that it serves; of one that is observed, the last one seen
        self._function = function
        self._options = options
        self._adapts = adapts
        self._follows = follows
        self._around: Surroundings | None = None
        self._step: StepFunction | None = None
        # Of which the observed call has counted the versions. (Kernels that are not known count as
        # writing to all that they are given; autograd would not.)
        self._written_state: list[int] = []
        self._written_arguments: list[int] = []
        self._gradients = UsedGradients()  # from before
        self._pattern = b""  # which tensors have gradients before a call

    def observe(
        self,
        before: HostState,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        make: Callable[[], Any],
    ) -> Any:
        """Makes a call, uncaptured. Raises what it raises. before: the host's state now. make: makes
        the call with ``args`` and ``kwargs``."""
        device = device_of([*arguments.tensors, *before.found.tensors.values()])
        if device is None:
            self.refusal = "it has no tensors on a GPU"
            return make()
        self.refusal = unfit_argument(arguments)
        if self.refusal:
            return make()
        groups = self._followed(before)
        rates = [rated.group["lr"] for rated in groups]
        numbers = self._numbers(before, groups)
        values = [number.values() for number in numbers]
        counts = HostCounts(before.found.optimizers)
        watched = watched_tensors(before)
        pattern = runtime.engine().gradient_pattern(watched)
        reachable = list(before.found.tensors.values())
        gradients = OldGradients(watched, reachable)
        known = [*arguments.tensors, *reachable]
        versions = [version_of(tensor) for tensor in known]
        self.holds_objects = bool(arguments.objects) and not arguments.passes_modules_only
        self.host = before  # equal to the one from before, which must not keep what the call lets go of
        is_changed = lambda: not is_same_structure(arguments, args, kwargs)  # noqa: E731
        seen = observed_call(make, is_changed, arguments, before, watched, device, (args, kwargs))
        if not seen.is_complete:
            return seen.result
        self.observed += 1
        self.host = seen.host
        if [rated.group["lr"] for rated in groups] != rates:
            seen.effects.append("the learning rate of an optimizer")
        if [number.values() for number in numbers] != values:
            seen.effects.append("a number of an optimizer")
        self.refusal = counts.refusal()
        if self.refusal:
            return seen.result
        if seen.effects:
            if self.observed >= _MOST_OBSERVED:
                self.refusal = describe_effects(seen.effects)
        elif self.observed > 1 or not seen.refusal:
            pairs = zip(known, versions, strict=True)
            written = [tensor for tensor, version in pairs if version_of(tensor) != version]
            self._conclude(seen, arguments, pattern, device, written)
            if self._around is not None:
                self._gradients = gradients.used(seen.gradients, written)
        return seen.result

    def _conclude(
        self,
        seen: Observation,
        arguments: Arguments,
        pattern: bytes,
        device: torch.device,
        written: list[torch.Tensor],
    ) -> None:
        """The last call changed nothing on the host: it can be recorded, or it never can. written:
        tensors to which it wrote, as far as autograd was told."""
        self.refusal = seen.refusal
        if seen.refusal:
            return
        optimizers = seen.host.found.optimizers.values()
        rated = self._followed(seen.host)
        numbers = self._numbers(seen.host, rated)
        around = Surroundings(
            seen.host,
            seen.state,
            seen.gradients,
            rated,
            fused_groups(optimizers),
            FusedNumbers(numbers, may_be_used=not seen.form.is_differentiable),
            device,
        )
        seen.state.count(written)
        addresses = {address_of(tensor) for tensor in written}
        state = enumerate(map(address_of, seen.state.tensors()))
        self._written_state = [i for i, address in state if address in addresses]
        self._written_arguments = [
            i for i, t in enumerate(arguments.tensors) if any(t is tensor for tensor in written)
        ]
        step: StepFunction
        if seen.form.is_differentiable:
            backwards = Backwards(self.name, around, self._options)
            step = ForwardFunction(self._function, arguments, around, seen.form, backwards)
            step.written |= frozenset(self._written_state)
        else:
            step = StepFunction(self._function, arguments, around, seen.form)
        info = PartitionInfo(
            name=self.name,
            kind="forward" if seen.form.is_differentiable else "inference",
            device=device.index or 0,
            argument_count=len(step.inputs(arguments)),
            counts_numbers=True,
            static=frozenset(step.state_positions),
            own=(step.state_tensors, step.state_positions.start),
            saved=(),  # a gradient in a block with others could not be accumulated into alone
            saved_from=len(seen.form.kinds) if seen.form.is_differentiable else None,
            compared_calls=_COMPARED_CALLS,
            runs_program=True,
            followed=(*names_of_rates(optimizers, rated), *names_of(optimizers, numbers)),
            gradients=(
                (around.made, len(seen.form.kinds))
                if around.made and self._options.reuse_gradients
                else None
            ),
        )
        partition = Partition(step, info, self._options)
        # At once: no interrupt comes in between.
        self._around, self._step, self._pattern, self.partition = around, step, pattern, partition

    def is_alive(self) -> bool:
        """Whether the memory that it uses, if that is known, is still that of the program's tensors."""
        return self._around is None or bool(self._around.state.is_valid)

    def fits(self) -> bool:
        """Whether a graph of this variant would compute what the callable computes now, as far as
        memory, rates and gradients are concerned."""
        around = self._around
        if around is None or not around.state.is_valid or not around.rates.can_be_followed():
            return False
        if around.numbers.are_read or not around.numbers.can_be_followed():
            return False
        return self._gradients.hold() and runtime.engine().has_gradient_pattern(
            around.tensors, self._pattern
        )

    @property
    def reads_numbers(self) -> bool:
        """Whether its Python has computed with numbers that a graph was to follow."""
        return self._around is not None and self._around.numbers.are_read

    @property
    def keeps_rates(self) -> bool:
        """Whether its Python keeps learning rates that a graph was to follow."""
        return self._around is not None and self._around.rates.are_kept

    def is_shared_by(self, arguments: Arguments) -> bool:
        """Whether arguments overlap each other, or share memory with what the variant uses: a
        recording's stand-ins would not. Also of gradients that have no memory of their own: sparse
        ones."""
        assert self._around is not None
        gradients = self._around.used_gradients()
        if any(g.layout != torch.strided or g.is_neg() or g.is_conj() for g in gradients):
            return True
        tensors = [*arguments.tensors, *gradients]
        if isinstance(self._step, ForwardFunction) and len(tensors) > 1:
            addresses = [address_of(tensor) for tensor in tensors]  # parts of one storage, too
            if len(set(addresses)) < len(addresses):
                return True
        return bool(self._around.state.is_shared_by(tensors))

    def accept(self, now: HostState) -> bool:
        """Another state of the host that the callable cannot tell from the variant's own. False if the
        variant can: the groups of optimizers whose rates and numbers it follows are others."""
        assert self._around is not None
        ours, theirs = self._around.followed, self._followed(now)
        if len(ours) != len(theirs) or not all(map(Rated.is_same, ours, theirs)):
            return False
        if not self._around.numbers.are_same(self._numbers(now, theirs)):
            return False
        fused = fused_groups(now.found.optimizers.values())
        if list(map(id, fused)) != list(map(id, self._around.fused)):
            return False
        self.host = self._around.host = now
        return True

    def call(self, arguments: Arguments, make: Callable[[], Any]) -> Any:
        """Makes a call that the variant fits. make: makes it uncaptured."""
        assert self._step is not None and self.partition is not None
        step, self.has_served = self._step, True
        if isinstance(step, ForwardFunction) and (step.refusal or _hooks_are_active()):
            return make()
        return step.call(self.partition.callable, arguments, make, self._tell_autograd)

    def known_call(self, arguments: Arguments) -> KnownCall | None:
        """Of the call that this thread has made last. None if no replay has made it, or if only Python
        can make the next ones."""
        step, around, partition, form = self._step, self._around, self.partition, arguments.form
        host = self.host  # which another thread may replace
        if form is None or type(step) is not StepFunction or not step.was_replayed:
            return None
        assert around is not None and host is not None and partition is not None
        if around.numbers.count or around.rates.are_set:
            return None
        return {
            **step.known_call(),
            "owner": self,
            "form": form.engine,
            "watch": host.watch,
            "held": (form, host.held),
            "probes_hold": host.probes_hold if host.found.probes else None,
            "pattern": self._pattern,
            "layouts": self._gradients.layouts,
            "beside": self._gradients.beside,
            "neighbours": self._gradients.neighbours,
            "sharing": self._gradients.sharing,
            "shared_with": self._gradients.shared_with,
            "written_state": self._written_state,
            "written_arguments": self._written_arguments,
            "counted": self._gradients.counted,
            "written_neighbours": self._gradients.written,
            "replay": partition.replay,
        }

    @property
    def reason(self) -> str:
        """Why calls that it fits run as they are, if that was found after they were observed."""
        return self._step.refusal if isinstance(self._step, ForwardFunction) else ""

    def _tell_autograd(self, arguments: Arguments) -> None:
        """Python would have counted the versions of what is written."""
        assert self._around is not None
        self._around.state.bump_versions(self._written_state)
        runtime.engine().bump_versions(arguments.tensors, self._written_arguments)
        self._gradients.bump_versions()

    def _followed(self, host: HostState) -> list[Rated]:
        return rates_of(host, self._adapts, self._follows)

    def _numbers(self, host: HostState, rated: list[Rated]) -> list[FusedNumber]:
        return numbers_of(host, rated) if self._follows.numbers else []


def _hooks_are_active() -> bool:
    """Hooks for saved tensors around the call, such as checkpointing's: they see what is saved."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def host_state(roots: dict[str, Any], adapts: bool, follows: Follows) -> HostState:
    """The host's state, without the learning rates and the other numbers that graphs follow."""
    state = HostState(roots)
    rated = rates_of(state, adapts, follows)
    numbers = numbers_of(state, rated) if follows.numbers else []
    unwatched = [(id(of.group), "lr") for of in rated] + [(id(of.group), of.key) for of in numbers]
    return HostState(roots, unwatched) if unwatched else state


def rates_of(host: HostState, adapts: bool, follows: Follows) -> list[Rated]:
    """The groups of optimizers whose learning rates graphs follow."""
    return followed(host.found.optimizers.values(), adapts) if follows.rates else []


def numbers_of(host: HostState, rated: list[Rated]) -> list[FusedNumber]:
    """The numbers of fused optimizers that graphs can follow, beside these rates. Not those of a group
    that the program reaches otherwise, too: what reads them there may not show (told_number.py)."""
    numbers = fused_numbers.followed(host.found.optimizers.values(), [id(of.group) for of in rated])
    return [number for number in numbers if id(number.group) not in host.found.free_dicts]


def device_of(tensors: list[torch.Tensor]) -> torch.device | None:
    """The first GPU among those of the tensors."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)


def describe_effects(effects: list[str]) -> str:
    """Why a callable whose calls change the host cannot have a graph."""
    shown = ", ".join(effects[:3]) + (f" and {len(effects) - 3} more" if len(effects) > 3 else "")
    return f"each call changes {shown}, which a replay would not; move that out of the callable"
