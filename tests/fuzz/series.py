"""The calls of a program, one after the other or in threads, and what is seen of each."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .calls import FLIPS, Caller, Switches, act_on_process, limited
from .observe import Seen, shared_storages, states
from .program import Call, Program

log = logging.getLogger("pygraph.fuzz")

Run = Callable[[list[Any]], list[Any]]
_THREADS = 2
_FATAL = ("CUDA error", "illegal memory", "launch failure", "device-side assert", "misaligned address")


class FatalError(RuntimeError):
    """The process cannot use the GPU any more."""


def series(program: Program, device: str, run: Run) -> list[Seen]:
    """All calls of the program, from equal states of everything."""
    torch.manual_seed(program.seed)
    mode = program.settings["mode"]
    if mode == "concurrent":
        return _concurrent_series(program, device, run)
    caller = Caller(program, device)
    switches = Switches()
    found = []
    try:
        for number, call in enumerate(program.calls):
            for action in set(call.before) & set(FLIPS):
                switches.flip(action)
            place = functools.partial(_call, program, device, run, caller, number, call)
            found.append(_placed(mode, number, device, place))
            if number == 0 and found[0].error:
                break  # most likely it raises always
    finally:
        switches.restore()
    return found


def _concurrent_series(program: Program, device: str, run: Run) -> list[Seen]:
    """Each thread makes all calls, on a stream of its own."""
    found: list[list[Seen]] = [[] for _ in range(_THREADS)]

    def work(thread: int) -> None:
        caller = Caller(program, device, thread)
        with _stream(device):
            for number, call in enumerate(program.calls):
                found[thread].append(_call(program, device, run, caller, number, call, False))

    _in_threads([functools.partial(work, i) for i in range(_THREADS)])
    synchronize(device)
    return [seen for of_thread in found for seen in of_thread]


def _placed(mode: str, number: int, device: str, call: Callable[[], Seen]) -> Seen:
    """Makes the call where the mode says: on another stream, or in another thread."""
    if mode == "thread" and number % 2:
        found: list[Seen] = []
        _in_threads([lambda: found.append(call())])
        return found[0]
    if mode == "streams" and number % 2 and device.startswith("cuda"):
        main = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            seen = call()
        main.wait_stream(side)
        for t in seen.tensors:
            t.record_stream(main)
        side.synchronize()  # what the caller keeps was allocated on a stream that is dropped
        return seen
    return call()


def _in_threads(works: list[Callable[[], Any]]) -> None:
    errors: list[BaseException] = []

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _stream(device: str) -> Iterator[None]:
    if not device.startswith("cuda"):
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
        torch.cuda.current_stream().synchronize()


def _call(
    program: Program,
    device: str,
    run: Run,
    caller: Caller,
    number: int,
    call: Call,
    is_alone: bool = True,
) -> Seen:
    for action in call.before:
        if is_alone or action == "collect":
            caller.before(action)
            act_on_process(action, device)
    values = caller.arguments(call)
    seen = Seen(number)
    args = list(values.values())
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            log.debug("call %d: %s at %#x", number, name, value.data_ptr())
    value = None
    watched = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    if program.settings["away"] and not any(call.reuse.values()):
        watched = {}
        caller.last = {}
    del values
    try:
        with limited(call if is_alone else Call(), program.level, device):
            outputs = run(args)
    except Exception as error:
        _raise_if_fatal(error)
        seen.error = type(error).__name__
        seen.error_text = str(error)[:200]
        seen.error_trace = traceback.format_tb(error.__traceback__)[-8:]
        caller.outputs = []
        return seen
    for i, output in enumerate(outputs):
        seen.add(f"result {i}", output)
        if isinstance(output, torch.Tensor):
            log.debug("result %d at %#x", i, output.data_ptr())
    for name, value in watched.items():
        seen.add(f"argument {name}", value)
    seen.shared = shared_storages(outputs, watched)
    if is_alone:
        seen.states = states(device, caller.generator)
    caller.after(call, outputs)
    return seen


def _raise_if_fatal(error: Exception) -> None:
    text = str(error)
    if any(sign in text for sign in _FATAL) and "captur" not in text:
        raise FatalError(text.splitlines()[0]) from error


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise FatalError(str(error).splitlines()[0]) from error
