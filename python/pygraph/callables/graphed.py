"""``pygraph.graph``: a graph of any callable.

A call is served by the *variant* (variant.py) for what is passed and for what the callable can read on
the host. A call that no variant fits is observed, as the first one of another variant. If that happens
again and again, because something that the callable reads is different each time, calls are no more
observed, and the reason tells what it is.

Threads: a call is made with the lock of ``runtime.begin_drawing``, so that none is under way while
memory is exchanged for a recording. One thread at a time observes; others run uncaptured meanwhile.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph import observations, options, runtime
from pygraph.callables import optimizer_forms, rates, serving
from pygraph.callables.host_state import HostState
from pygraph.callables.signature import Arguments, Forms, take_apart
from pygraph.callables.variant import Variant, device_of, host_state
from pygraph.options import Options
from pygraph.partition.signature import Entry, PartitionInfo

_MOST_STRANGERS = 8  # calls in a row that no variant fits
_MOST_VARIANTS = 64
_MOST_REFUSED = 256  # kinds of calls that are remembered
_CALLS_PER_LOOK = 100  # while calls are no more observed, one in so many is looked at


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
        runtime.partitions.add(self)
        observation = observations.current()
        if observation is not None:
            observation.partitions.append(self)

    def _start(self) -> None:
        self._forms = Forms()  # of arguments that variants have served
        self._variants: dict[Any, list[Variant]] = {}
        self._refused: dict[Any, tuple[str, Any]] = {}
        self._strangers = 0
        self._resting = ""  # why calls are no more observed
        self._rested = 0  # calls since
        self._incomparable = ""  # why some calls cannot have a graph, whatever the variant
        # Groups of optimizers that need a tensor as learning rate in uncaptured calls, too.
        self._rated: list[rates.Rated] = []
        self._device: torch.device | None = None

    def reset(self) -> None:
        """Drops all graphs; the next calls are observed again."""
        with self._lock:
            dropped = self._variants
            self._start()
        del dropped  # the graphs' end may run other code

    def anew(self) -> Graphed:
        """The same callable with the same options, and no graphs yet."""
        return Graphed(self._function, self._options, self._adapts, self._level)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is its first argument."""
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if serving.is_calling() or not serving.may_be_served():
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
            self._note_incomparable()
            return self._function(*args, **kwargs)
        if self._is_refused(arguments):
            return self._function(*args, **kwargs)
        variants = self._variants.get(arguments.key, [])
        for variant in variants:
            if variant.host is not None and variant.fits(arguments) and variant.host.holds():
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
        self._strangers = 0
        if variant.is_shared_by(arguments):
            return self._uncaptured(args, kwargs)
        return variant.call(arguments, lambda: self._uncaptured(args, kwargs))

    def _uncaptured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function, whose graph gives the same bits."""
        if not self._rated:
            return self._function(*args, **kwargs)
        return rates.with_tensors(self._rated, self._device, lambda: self._function(*args, **kwargs))

    def _unknown_call(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that is not known to be served by any variant."""
        if torch.autograd.profiler._is_profiler_enabled:  # an observation would replace the profiler
            return self._function(*args, **kwargs)
        roots = {self.__name__: self._function, **arguments.objects}
        if self._resting:
            self._rested += 1
            if self._rested % _CALLS_PER_LOOK != 0:
                return self._function(*args, **kwargs)
        try:
            now = self._look_at(roots)
        except (MemoryError, torch.OutOfMemoryError):  # a later call may be looked at
            return self._function(*args, **kwargs)
        except Exception as error:  # of what the walk has met
            self._refuse(arguments, runtime.first_line(error) or type(error).__name__)
            return self._function(*args, **kwargs)
        variants = self._variants.get(arguments.key, [])
        changed: list[str] = []
        for variant in variants.copy():
            if variant.host is None:
                continue
            changed = variant.host.changes(now)
            if changed:
                continue
            if variant.partition is None:
                return self._observe(variant, now, arguments, args, kwargs)
            if variant.fits(arguments) and variant.accept(now):
                return self._serve(variant, arguments, args, kwargs)
            changed = ["the memory or the gradients that it uses"]
        return self._stranger(now, changed, arguments, args, kwargs)

    def like(self, function: Callable[..., Any], chosen: Options) -> Graphed:
        """Another one, which treats optimizers in the same way."""
        return Graphed(function, chosen, self._adapts)

    def prepared(self) -> Callable[..., Any]:
        """Gives the function's optimizers their form. Returns the function as it is called without a
        graph."""
        if self._adapts and serving.may_be_served():
            self._look_at({self.__name__: self._function})
        return lambda *args, **kwargs: self._uncaptured(args, kwargs)

    def _look_at(self, roots: dict[str, Any]) -> HostState:
        now = host_state(roots, self._adapts)
        if not self._adapts:
            return now
        names = optimizer_forms.adapt(now.found.optimizers.values())
        if names:
            runtime.notice_once(
                f"{self.__name__}: {', '.join(sorted(set(names)))} counts steps on the GPU from now on "
                "(capturable=True), which rounds differently"
            )
            now = host_state(roots, self._adapts)
        groups = rates.followed(now.found.optimizers.values(), adapted=True)
        self._rated = [rated for rated in groups if not rated.is_exact]
        self._device = device_of(list(now.found.tensors.values()))
        return now

    def _stranger(
        self,
        now: HostState,
        changed: list[str],
        arguments: Arguments,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The first call of another variant."""
        self._strangers += 1
        if self._resting or self._strangers > _MOST_STRANGERS:
            if not self._resting:
                what = changed[0] if changed else "what is passed to it"
                advice = optimizer_forms.advice(what, now.found.optimizers)
                self.give_up(f"{what} differs from call to call" + (f"; {advice}" if advice else ""))
            return self._function(*args, **kwargs)
        # One whose tensors are gone never fits again, and must not keep them.
        kept = [
            v
            for v in self._variants.pop(arguments.key, [])
            if v.host is not None and v.is_alive() and now.reaches_tensors_of(v.host)
        ]
        variant = Variant(self.__name__, self._function, self._options, self._adapts)
        self._variants[arguments.key] = [*kept, variant][-_MOST_VARIANTS:]
        while sum(map(len, self._variants.values())) > _MOST_VARIANTS:
            del self._variants[next(iter(self._variants))]
        return self._observe(variant, now, arguments, args, kwargs)

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
            self._strangers = max(0, self._strangers - 1)
            if variant.observed == 0:
                self._drop(variant, arguments)
            raise
        if variant.refusal:
            self._variants.pop(arguments.key, None)
            self._refuse(arguments, variant.refusal, variant.host)
        return result

    def _drop(self, variant: Variant, arguments: Arguments) -> None:
        """Others for such arguments keep their graphs."""
        others = [v for v in self._variants.get(arguments.key, []) if v is not variant]
        self._variants[arguments.key] = others

    def _refuse(self, arguments: Arguments, reason: str, host: HostState | None = None) -> None:
        """Such calls run uncaptured from now on, until a switch on the host is another one: a module's
        mode, say."""
        if arguments.key not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused[arguments.key] = (reason, None if host is None else host.switches())
            self._note(reason)

    def _is_refused(self, arguments: Arguments) -> bool:
        reason_and_switches = self._refused.get(arguments.key)
        if reason_and_switches is None:
            return False
        switches = reason_and_switches[1]
        if switches is None or switches.holds():
            return True
        self._refused.pop(arguments.key, None)
        return False

    def _note_incomparable(self) -> None:
        if not self._incomparable:
            reason = (
                "an argument is a tensor with attributes, or has a structure that cannot be compared"
            )
            self._incomparable = reason
            self._note(reason)

    def _note(self, reason: str) -> None:
        runtime.note(self._level, "%s stays uncaptured: %s", self.__name__, reason)

    @property
    def has_given_up(self) -> bool:
        """Whether calls have been refused, or are no more observed."""
        return bool(self._resting or self._refused)

    def give_up(self, reason: str) -> None:
        """Calls are no more observed. Graphs that there are stay in use."""
        with self._lock:
            if not self._resting:
                self._resting = reason
                self._note(reason)

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
        nothing: frozenset[int] = frozenset()
        return PartitionInfo(self.__name__, "inference", 0, 0, True, nothing, nothing, (), nothing)

    @property
    def entries(self) -> dict[Any, Entry]:
        reasons: dict[Any, str] = {key: reason for key, (reason, _) in self._refused.items()}
        unavailable = runtime.unavailable_reason()
        for reason in (unavailable, self._resting, self._incomparable):
            if reason:
                reasons[reason] = reason
        found: dict[Any, Entry] = {}
        for key, reason in reasons.items():
            found[key] = Entry()
            found[key].refuse(reason, 0)
        with self._lock:
            variants = [v for of in self._variants.values() for v in of]
        for variant in variants:
            if variant.reason:
                found[id(variant)] = Entry()
                found[id(variant)].refuse(variant.reason, 0)
            elif variant.partition is None:
                found[id(variant)] = Entry()
        return found


def graph(function: Callable[..., Any] | None = None, /, **chosen: Any) -> Any:
    """Makes a callable that uses CUDA graphs of all that it does: a training step, or inference.

    ``function``: any callable, or none, as in ``@pygraph.graph(audit=100)``. It may take any arguments;
    tensors may lie anywhere at each call, and for other values there are graphs of their own. What it
    returns is fresh at each call. Its first calls run uncaptured and are observed; a graph is used when
    replays have given the same bits as uncaptured calls three times in a row.

    A replay does not run the function's Python. So a function has no graph if its calls change anything
    on the host that can be seen (``pygraph.stats()`` tells what), and a call has none if what the
    function reads on the host has changed. What cannot be seen: files, sockets, what extensions keep.

    Gradients flow through it: where results require gradients, the backward gets graphs, too. Results
    whose backward is run in the call come detached.

    Options are those of the backend without the prefix: ``select``, ``audit``, ``max_graphs``,
    ``lanes`` (1 unless given), ``record_capacity_gib``; and ``adapt_optimizers``: with True, PyTorch's
    optimizers that count steps on the CPU are made capturable at the first call, and learning rates
    are tensors during calls, which rounds differently. Raises ValueError for others.
    Without a GPU, and in every case that is not understood, the function is called as it is.

    The result may be called from several threads. While it records, no other thread may use the same
    tensors elsewhere. docs/explanation/whole-steps.md tells how it works.
    """
    allowed = ("select", "audit", "max_graphs", "lanes", "record_capacity_gib", "adapt_optimizers")
    unknown = [name for name in chosen if name not in allowed]
    if unknown:
        raise ValueError(
            f"unknown option {unknown[0]!r} of pygraph.graph; it has: {', '.join(allowed)}"
        )
    adapts = chosen.pop("adapt_optimizers", False)
    if not isinstance(adapts, bool):
        raise ValueError(f"option 'adapt_optimizers' of pygraph.graph takes a bool, got {adapts!r}")
    parsed = options.own({"lanes": 1} | chosen)
    if function is None:
        return lambda given: Graphed(given, parsed, adapts)
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(Graphed(function.__func__, parsed, adapts))
    if not callable(function):
        raise TypeError(f"pygraph.graph takes a callable, not {type(function).__name__}")
    return Graphed(function, parsed, adapts)
