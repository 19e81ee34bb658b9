"""What ``pygraph.graph`` (graph.py) returns: a callable that uses graphs where it can.

A call is served by the *variant* (variant.py) for what is passed and for what the callable can read on
the host. A call that no variant fits is observed, as the first one of another variant. If eight calls
in a row fit none, because something that the callable reads is different each time, only one in 100
such calls is observed from then on, and the reason says what differs.

Threads: a call is made with the lock of ``runtime.begin_drawing``, so that none is under way while
memory is exchanged for a recording. One thread at a time observes; others run uncaptured meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph import observations, runtime, signal_exceptions, torch_patches
from pygraph.callables import fused_numbers, optimizer_forms, rates, serving
from pygraph.callables.adapted_optimizers import AdaptedOptimizers
from pygraph.callables.host.host_state import HostState
from pygraph.callables.refused_calls import RefusedCalls
from pygraph.callables.signature import Arguments, Forms, take_apart
from pygraph.callables.variant import Variant
from pygraph.callables.variants import Variants
from pygraph.options import Options
from pygraph.partition.signature import Entry, PartitionInfo

_MOST_UNMATCHED = 8  # calls in a row that no variant fits


class Graphed:
    """A callable that uses graphs where it can. Thread-safe.

    ``entries`` and ``info`` are for ``pygraph.stats()``: of calls that no partition handles.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        chosen: Options,
        adapts: bool = False,
        level: int = logging.WARNING,
    ) -> None:
        """adapts: whether optimizers may be given the form that a graph can hold. level: of the log,
        for reasons."""
        self._function = function
        self._options = chosen
        self._adapts = adapts
        self._level = level
        self._lock = threading.RLock()
        self.__wrapped__ = function
        self.__doc__ = getattr(function, "__doc__", None)
        self.__module__ = getattr(function, "__module__", __name__)
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)
        if isinstance(function, types.FunctionType):
            self.__annotations__ = function.__annotations__
            vars(self).update({k: v for k, v in vars(function).items() if k[0] != "_"})
        self._start()
        torch_patches.install(frozenset())  # what is required
        observations.note_partition(self)

    def _start(self) -> None:
        self._forms = Forms()  # of arguments that variants have served
        self._variants = Variants()
        self._served = serving.served_calls()  # of these variants; after them, for _tell_engine
        self._refused = RefusedCalls(self._note)
        self._unmatched = 0  # calls in a row that no variant fits
        self._optimizers = AdaptedOptimizers(self.__name__, self._adapts)
        self._follows = rates.Follows()
        self._may_follow_numbers = True  # not if its Python has computed with them

    def reset(self) -> None:
        """Drops all graphs; the next calls are observed again."""
        with self._lock:
            dropped = self._variants, self._served
            self._start()
        del dropped  # the graphs' end may run other code

    def anew(self, chosen: Options | None = None) -> Graphed:
        """The same callable, with no graphs yet. chosen: other options."""
        return Graphed(self._function, chosen or self._options, self._adapts, self._level)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo cannot look into the engine
            made = self._served(args, kwargs)
            if made is not None:
                return made[0]
        if serving.is_calling():
            return self._function(*args, **kwargs)
        if not serving.may_be_served():
            serving.look_at_memory()
            return self._function(*args, **kwargs)
        lock = runtime.drawing_lock()  # the thread is part of no capture
        try:  # what is called here is called so that no interrupt comes in between (undoing.py)
            serving.inside.is_calling = True
            lock.acquire(timeout=runtime.LONGEST_CAPTURE)
            return self._call(args, kwargs)
        finally:
            serving.inside.is_calling = False
            try:  # noqa: SIM105
                lock.release()
            except RuntimeError:  # it was not acquired in that time
                pass

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._forms.take_apart(args, kwargs)
        arguments = take_apart(args, kwargs) if known is None else known
        if arguments is None:
            self._refused.refuse_incomparable()
            return self._uncaptured(args, kwargs)
        if self._refused.has(arguments.key):
            return self._uncaptured(args, kwargs)
        for variant in self._variants.of(arguments.key):
            if variant.host is not None and variant.fits() and variant.host.holds():
                if known is None:
                    self._forms.add(arguments, args, kwargs)
                return self._serve(variant, arguments, args, kwargs)
        try:
            if self._lock.acquire(blocking=False):
                return self._unknown_call(arguments, args, kwargs)
        finally:
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # another thread has it, which observes a call
                pass
        return self._uncaptured(args, kwargs)

    def _serve(
        self, variant: Variant, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._unmatched = 0
        if variant.is_shared_by(arguments):
            return self._uncaptured(args, kwargs)
        runtime.engine().forget_known_calls(self._served, variant)
        result = variant.call(arguments, lambda: self._uncaptured(args, kwargs))
        with runtime.harmless("telling the engine of a call"):
            self._tell_engine(variant, arguments)
        return result

    def _tell_engine(self, variant: Variant, arguments: Arguments) -> None:
        """So that it can make the next calls of this kind by itself."""
        served, kind = self._served, variant.known_call(arguments)
        # Not if it was dropped meanwhile, with what was told.
        if kind is not None and variant in self._variants.of(arguments.key):
            runtime.engine().add_known_call(served, kind)

    def _uncaptured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function, whose graph gives the same bits."""
        runtime.engine().drop_blocks_if_short()
        return self._optimizers.call(lambda: self._function(*args, **kwargs))

    def _unknown_call(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not known to be served by any variant. It may change what the others serve."""
        runtime.engine().forget_known_calls(self._served, None)
        if torch.autograd.profiler._is_profiler_enabled:  # an observation would replace the profiler
            return self._uncaptured(args, kwargs)
        if not self._refused.is_to_be_observed():
            return self._uncaptured(args, kwargs)
        try:
            roots = {self.__name__: self._function, **arguments.objects, **arguments.kinds}
            now = self._optimizers.look_at(roots, self._follows)
        except (MemoryError, torch.OutOfMemoryError):  # a later call may be looked at
            return self._uncaptured(args, kwargs)
        except Exception as error:  # of what the walk has met
            signal_exceptions.pass_on(error)
            self._refused.refuse(arguments.key, runtime.brief(error), None)
            return self._uncaptured(args, kwargs)
        if self._follows.numbers and self._reads_numbers(now):
            self._may_follow_numbers = False
            return self._start_over(arguments, args, kwargs, numbers=False)
        if self._follows.rates and any(v.keeps_rates for v in self._variants.all()):
            return self._start_over(arguments, args, kwargs, rates=False)
        changed: list[str] = []
        for variant in [*self._variants.of(arguments.key)]:
            if variant.host is None:
                continue
            changed = variant.host.changes(now)
            if changed:
                may_follow = self._may_follow_numbers and not self._follows.numbers
                if may_follow and fused_numbers.explain(
                    changed, now.found.optimizers, now.found.functions
                ):
                    return self._start_over(arguments, args, kwargs, numbers=True)
                continue
            if variant.partition is None:
                return self._observe(variant, now, arguments, args, kwargs)
            if variant.fits() and variant.accept(now):
                return self._serve(variant, arguments, args, kwargs)
            changed = ["the memory or the gradients that it uses"]
        new = self._new_variant(now, changed, arguments)
        if new is None:
            return self._uncaptured(args, kwargs)
        return self._observe(new, now, arguments, args, kwargs)

    def _start_over(
        self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], **follows: bool
    ) -> Any:
        """follows: what graphs follow, or not, from this call on. A number that moves and is not
        followed is like any other that the callable reads."""
        self._follows = dataclasses.replace(self._follows, **follows)
        self._variants.clear()  # they were observed with others
        return self._unknown_call(arguments, args, kwargs)

    def _reads_numbers(self, now: HostState) -> bool:
        is_read = any(variant.reads_numbers for variant in self._variants.all())
        return is_read or fused_numbers.are_named(now.found.functions)

    def prepared(self) -> Callable[..., Any]:
        """Gives the function's optimizers their form. Returns the function as it is called without a
        graph."""
        if self._adapts and serving.may_be_served():
            self._optimizers.look_at({self.__name__: self._function}, self._follows)
        return lambda *args, **kwargs: self._uncaptured(args, kwargs)

    def _new_variant(self, now: HostState, changed: list[str], arguments: Arguments) -> Variant | None:
        """For a call that no variant fits; changed: how the last one differs. None if that was so too
        often in a row."""
        if runtime.engine().take_served_count(self._served):
            self._unmatched = 0
        if not self._variants.is_one_of_many(arguments):
            self._unmatched += 1
        if self._refused.why_not_observed or self._unmatched > _MOST_UNMATCHED:
            if not self._refused.why_not_observed:
                what = changed[0] if changed else "what is passed to it"
                advice = optimizer_forms.advice(what, now.found.optimizers)
                self.give_up(f"{what} differs from call to call" + (f"; {advice}" if advice else ""))
            self._variants.let_go_of_objects(0)
            return None
        self._variants.let_go_of_objects(_MOST_UNMATCHED - 1)
        variant = Variant(self.__name__, self._function, self._options, self._adapts, self._follows)
        self._variants.add(arguments.key, variant, now)
        return variant

    def _observe(
        self,
        variant: Variant,
        now: HostState,
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            make = lambda: self._uncaptured(args, kwargs)  # noqa: E731
            result = variant.observe(now, arguments, args, kwargs, make)
        except BaseException:  # the program's
            self._unmatched = max(0, self._unmatched - 1)
            if variant.observed == 0:  # others for such arguments keep their graphs
                self._variants.drop(arguments.key, variant)
            raise
        if variant.refusal:
            self._variants.drop_all_of(arguments.key)
            holds_objects = bool(arguments.objects)
            self._refused.refuse(arguments.key, variant.refusal, variant.host, holds_objects)
            runtime.engine().forget_known_calls(self._served, None)
        return result

    def _note(self, reason: str) -> None:
        runtime.note(self._level, "%s stays uncaptured: %s", self.__name__, reason)

    @property
    def has_given_up(self) -> bool:
        """Whether calls have been refused, or are not observed any more."""
        return bool(self._refused.why_not_observed or self._refused)

    def give_up(self, reason: str) -> None:
        """Calls are not observed any more. Graphs that there are stay in use."""
        with self._lock:
            self._refused.stop_observing(reason)

    def graphed_attributes(self) -> tuple[str, ...]:
        """Names of what the program has stored in attributes, as a function that counts its calls
        does."""
        return tuple(name for name in vars(self) if name[0] != "_")

    def __reduce__(self) -> Any:
        """As functions are: by its name, if it has one in its module. Others without their graphs."""
        found: Any = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__
        kept = {name: vars(self)[name] for name in self.graphed_attributes()}
        return Graphed, (self._function, self._options, self._adapts), kept or None

    @property
    def info(self) -> PartitionInfo:
        return PartitionInfo(
            self.__name__, "inference", device=0, argument_count=0, counts_numbers=True
        )

    @property
    def entries(self) -> dict[Any, Entry]:
        reasons = self._refused.reasons()
        unavailable = runtime.unavailable_reason()
        if unavailable:
            reasons[unavailable] = unavailable
        with self._lock:
            variants = self._variants.all()
        for variant in variants:
            if variant.reason or variant.partition is None:
                reasons[id(variant)] = variant.reason
        found = {key: Entry() for key in reasons}
        for key, reason in reasons.items():
            if reason:
                found[key].refuse(reason, 0)
        return found
