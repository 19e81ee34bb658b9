"""Which exceptions come from the handler of a signal (pygraph/signal_exceptions.py)."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

from pygraph import signal_exceptions

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


def test_an_error_in_a_program_that_handles_such_an_exception_is_not(installed: Any) -> None:
    """Its context is the exception that the program has caught."""
    installed(_function)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except TimeoutError:
        try:
            raise RuntimeError("it cannot be recorded")
        except RuntimeError as error:
            assert isinstance(error.__context__, TimeoutError)
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
