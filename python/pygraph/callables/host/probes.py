"""What is compared of objects whose contents have no places of their own: where an iterator stands, the
values of an array, the elements of a set.
"""

from __future__ import annotations

import array
import concurrent.futures
import contextvars
import ctypes
import decimal
import functools
import gc
import io
import itertools
import logging
import queue
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

_LARGEST_ARRAY = 1 << 16  # bytes that are compared at each call
_OF_CTYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a graph would have the tensor's values frozen."""
    return tensor.is_cpu and tensor.layout == torch.strided


def values_of(tensor: torch.Tensor) -> Any:
    """Of a large one, how often operators have written to it."""
    if tensor.nbytes <= _LARGEST_ARRAY and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return None if tensor.is_inference() else tensor._version


def key(value: Any) -> Any:
    """What is compared of an element: itself if that is a value, or else which object it is. (Zeros
    that are equal may differ in their signs.)"""
    if type(value) is complex or (type(value) is float and value == 0):
        return (type(value), repr(value))
    return (type(value), value) if type(value) in ATOMS and value == value else id(value)


def text_of(get: Callable[[], Any]) -> str:
    """What is compared of values that are made anew each time: numbers, texts, and lists of them."""
    return repr(get())


def probe_of(value: Any) -> Callable[[], Any] | None:
    """A function that tells where an object stands; None for what needs none, or cannot be asked."""
    if isinstance(value, types.GeneratorType):
        return functools.partial(_place_of_generator, value)
    if isinstance(value, itertools.count):
        return lambda: repr(value)
    if isinstance(value, random.Random):
        return lambda: hash(value.getstate())
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        return lambda: value.get_state().numpy().tobytes()
    if isinstance(value, (bytearray, array.array)) and len(value) <= _LARGEST_ARRAY:
        return lambda: bytes(value)
    if isinstance(value, contextvars.ContextVar):
        return lambda: key(value.get(None))
    if isinstance(value, (io.BytesIO, io.StringIO)):
        return lambda: None if value.closed else (value.tell(), value.getvalue())
    if isinstance(value, io.IOBase):
        return lambda: value.tell() if not value.closed and value.seekable() else None
    if isinstance(value, threading.local):
        return lambda: tuple((name, key(item)) for name, item in vars(value).items())
    if isinstance(value, (float, int, str, bytes)):  # of a class of its own
        plain = next(of for of in (float, int, str, bytes) if isinstance(value, of))
        return lambda: plain.__repr__(value)
    if isinstance(value, BaseException):
        return lambda: tuple(map(key, _parts_of_exception(value)))
    if isinstance(value, decimal.Decimal):
        return _decimal_context
    if isinstance(value, queue.SimpleQueue):
        return value.qsize
    if isinstance(value, functools._lru_cache_wrapper):
        return lambda: value.cache_info()[1:]  # without hits
    if isinstance(value, memoryview):
        return lambda: value.tobytes() if value.nbytes <= _LARGEST_ARRAY else None
    if isinstance(value, _OF_CTYPES):
        return lambda: bytes(value) if ctypes.sizeof(value) <= _LARGEST_ARRAY else None
    if type(value).__module__.split(".")[0] == "numpy":
        return _probe_of_numpys(value)
    if type(value).__module__ == "builtins" and hasattr(type(value), "__length_hint__"):
        return lambda: value.__length_hint__()
    return None


def contents_of(value: Any) -> list[Any]:
    """What an object keeps in C, and gives away as a whole."""
    if isinstance(value, contextvars.ContextVar):
        return [value.get(None)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, BaseException):
        return _parts_of_exception(value)
    if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "hasobject", False):
        return list(value.ravel().tolist())
    return []


def _parts_of_exception(error: BaseException) -> list[Any]:
    return [error.__cause__, error.__context__, *error.args]


def flag_of(value: Any) -> Callable[[], Any] | None:
    """Of objects that threads share, and of loggers: what programs ask them for."""
    if hasattr(type(value), "is_set"):  # an event of threads or processes
        return lambda: value.is_set()
    if isinstance(value, threading.Semaphore):
        return lambda: value._value
    if isinstance(value, concurrent.futures.Future):
        return lambda: (value._state, key(value._result))
    if isinstance(value, logging.Logger):
        return lambda: (value.getEffectiveLevel(), value.disabled, value.manager.disable)
    return _flag_of_processes(value, type(value).__module__)


def _flag_of_processes(value: Any, module: str) -> Callable[[], Any] | None:
    """Of objects that processes share."""
    if module == "multiprocessing.sharedctypes" and hasattr(value, "get_obj"):
        return probe_of(value.get_obj())
    if module == "multiprocessing.shared_memory":
        memory = getattr(value, "shm", value)  # of a list
        return lambda: bytes(memory.buf) if memory.size <= _LARGEST_ARRAY else None
    if module == "multiprocessing.queues" and hasattr(value, "_sem"):  # what is put, and what is taken
        return lambda: value._sem.get_value()
    if module == "multiprocessing.synchronize" and hasattr(value, "get_value"):
        return lambda: value.get_value()
    return None


def _decimal_context() -> Any:
    """What the results of decimal numbers depend on."""
    now = decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


def _place_of_generator(generator: Any) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return None
    variables = tuple((name, key(item)) for name, item in frame.f_locals.items())
    return frame.f_lasti, variables, tuple(map(id, iterators_of(generator)))


def iterators_of(generator: types.GeneratorType[Any, Any, Any]) -> list[Any]:
    """Those that its loops go through, and what it yields from, which no variable may have."""
    return [of for of in gc.get_referents(generator) if hasattr(type(of), "__next__")]


def _probe_of_numpys(value: Any) -> Callable[[], Any] | None:
    if hasattr(value, "bit_generator"):
        return lambda: repr(value.bit_generator.state)
    if hasattr(value, "tobytes") and value.dtype.hasobject:
        return lambda: tuple(map(key, value.ravel().tolist()))
    if hasattr(value, "tobytes") and value.nbytes <= _LARGEST_ARRAY:
        return lambda: (value.dtype, value.shape, value.tobytes())
    return None
