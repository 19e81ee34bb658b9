"""Which exceptions come from the handler of a signal, also if others have replaced or raised them
again, and not those that the program was handling before (pygraph/signal_exceptions.py)."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from pygraph import runtime, signal_exceptions
from pygraph.gpu import allocator
from pygraph.partition import attempt
from pygraph.partition.attempt import record_and_link
from pygraph.record import stream_capture

_Handler = Callable[[int, Any], Any]


def _function(number: int, frame: Any) -> NoReturn:
    raise TimeoutError


class _Object:
    def __call__(self, number: int, frame: Any) -> NoReturn:
        raise TimeoutError

    def method(self, number: int, frame: Any) -> NoReturn:
        raise TimeoutError


def _with_more(more: str, number: int, frame: Any) -> NoReturn:
    raise TimeoutError(more)


@pytest.fixture
def installed() -> Iterator[Callable[[_Handler], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "handler", [_function, _Object(), _Object().method, functools.partial(_with_more, "late")]
)
def test_what_a_handler_raises_is_passed_on(installed: Any, handler: _Handler) -> None:
    installed(handler)
    with pytest.raises(TimeoutError):
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception as error:
            signal_exceptions.pass_on(error)


def test_its_cause_is_passed_on(installed: Any) -> None:
    installed(_function)
    with pytest.raises(TimeoutError):
        try:
            try:
                signal.raise_signal(signal.SIGUSR1)
            except Exception as error:
                raise RuntimeError("it cannot be recorded") from error
        except Exception as error:
            signal_exceptions.pass_on(error)


def test_other_errors_are_not() -> None:
    for error in (ValueError(), TimeoutError()):
        signal_exceptions.pass_on(error)


def test_a_function_that_is_called_elsewhere_is_no_handler(installed: Any) -> None:
    installed(signal.SIG_DFL)
    try:
        _function(0, None)
    except TimeoutError as error:
        signal_exceptions.pass_on(error)


def test_handlers_run_in_the_main_thread_alone(installed: Any) -> None:
    installed(_function)
    found: list[BaseException] = []

    def call() -> None:
        try:
            _function(0, None)
        except TimeoutError as error:
            signal_exceptions.pass_on(error)
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(found) == 1


class _Late(Exception):
    pass


def _late(number: int, frame: Any) -> NoReturn:
    raise _Late


def _late_once(number: int, frame: Any) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise _Late


class _LateObject:
    def __call__(self, more: str, number: int, frame: Any) -> NoReturn:
        raise _Late(more)


def _signal() -> None:
    signal.raise_signal(signal.SIGUSR1)


def _fail() -> NoReturn:
    raise RuntimeError("of PyGraph's own")


def _dropping(do: Callable[[], Any]) -> None:
    """As PyGraph calls what may fail."""
    try:
        do()
    except Exception as error:
        signal_exceptions.pass_on(error)


def _dropping_harmless(do: Callable[[], Any]) -> None:
    with runtime.harmless("testing"):
        do()


@pytest.mark.parametrize("handler", [_late_once, functools.partial(_LateObject(), "late")])
def test_other_lates(installed: Any, handler: Any) -> None:
    installed(handler)
    with pytest.raises(_Late):
        _dropping(_signal)


def test_one_that_is_replaced_is_passed_on(installed: Any) -> None:
    def end() -> None:
        try:
            _signal()
        finally:
            _fail()

    installed(_late)
    with pytest.raises(_Late):
        _dropping(end)
    with pytest.raises(_Late):
        _dropping_harmless(end)


def test_one_that_the_program_handles_is_not_raised_again(installed: Any) -> None:
    installed(_late)
    try:
        _signal()
    except _Late:
        _dropping(_fail)
        _dropping_harmless(_fail)


@pytest.mark.parametrize("has_failed", [False, True])  # the recording, before
@pytest.mark.parametrize("runs_program", [False, True])
def test_one_that_came_while_it_recorded_is_known_to_callers(
    installed: Any, monkeypatch: pytest.MonkeyPatch, runs_program: bool, has_failed: bool
) -> None:
    installed(_late)
    memory: list[weakref.ref[_LateObject]] = []

    def record(request: Any) -> None:
        own = _LateObject()
        memory.append(weakref.ref(own))
        try:
            if has_failed:
                _fail()
        finally:
            _signal()

    def check_abandoned() -> None:  # it keeps for good what is in use
        assert memory[-1]() is None

    monkeypatch.setattr(stream_capture, "check_abandoned", check_abandoned)
    monkeypatch.setattr(allocator, "give_back_all", lambda: None)
    monkeypatch.setattr(attempt.recorder, "record", record)
    monkeypatch.setattr(attempt.recorder, "Request", lambda **values: None)
    monkeypatch.setattr(runtime, "engine", lambda: SimpleNamespace(NotRelocatable=ValueError))
    call: Any = SimpleNamespace(
        info=SimpleNamespace(
            is_backward=False,
            kind="inference",
            saved=(),
            saved_from=None,
            device=0,
            name="f",
            runs_program=runs_program,
        ),
        effects=SimpleNamespace(draws=[]),
        options=SimpleNamespace(record_capacity_gib=1, lanes=1, verify=True),
        function=None,
        args=[],
        kept=None,
        may_donate=False,
    )
    with pytest.raises(_Late):
        _dropping(lambda: record_and_link(call, set()))
    with contextlib.suppress(_Late):
        record_and_link(call, set())
    handled = ValueError("of the program's own")
    with pytest.raises(_Late) as raised:
        try:
            raise handled
        except ValueError:
            record_and_link(call, set())
    assert raised.value.__context__ is handled
