"""What is compared of objects whose contents have no places of their own: where an iterator stands, the
values of an array, the elements of a set.
"""

from __future__ import annotations

import array
import asyncio
import concurrent.futures
import contextvars
import ctypes
import datetime
import decimal
import functools
import gc
import io
import itertools
import operator
import queue
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from pygraph import signal_exceptions
from pygraph.callables.host.generators import GENERATORS, code_of, frame_of, iterators_of
from pygraph.callables.host.kinds import is_of

LARGEST_ARRAY = 1 << 16  # bytes that are compared at each call
_LARGEST_CACHE = 128  # entries
_KEY: Any = functools.cmp_to_key(min)
_CALLS_OTHERS = (operator.methodcaller, operator.attrgetter, operator.itemgetter, type(_KEY))
_OF_SUPER: Any = [vars(super)[name] for name in ("__self__", "__thisclass__")]  # descriptors
_UNSET = object()  # in place of a variable's value
_PLAIN: tuple[Any, ...] = (
    *(float, int, complex, str, bytes),
    *(datetime.timedelta, datetime.datetime, datetime.date, datetime.time),
)
_OF_CTYPES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)

ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a graph would have the tensor's values frozen."""
    return tensor.is_cpu and tensor.layout == torch.strided


def values_of(tensor: torch.Tensor) -> Any:
    """Of a large one, how often operators have written to it."""
    if tensor.nbytes <= LARGEST_ARRAY and not tensor.is_conj() and not tensor.is_neg():
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
    if is_of(value, GENERATORS):
        return functools.partial(_place_of_generator, value)
    if is_of(value, itertools.count):
        return lambda: repr(value)
    if is_of(value, random.Random):
        return lambda: hash(value.getstate())
    if is_of(value, torch.Generator) and value.device.type == "cpu":
        return lambda: value.get_state().numpy().tobytes()
    if is_of(value, range):  # those with the same numbers are equal
        return lambda: repr(value)
    if is_of(value, (bytearray, array.array)) and len(value) <= LARGEST_ARRAY:
        return lambda: (getattr(value, "typecode", ""), bytes(value))
    if is_of(value, contextvars.ContextVar):
        return lambda: key(value.get(_UNSET))
    if is_of(value, io.IOBase):
        return functools.partial(_place_in_file, value)
    if is_of(value, threading.local):
        return lambda: tuple((name, key(item)) for name, item in vars(value).items())
    plain: Any = next((of for of in _PLAIN if is_of(value, of)), None)
    if plain is not None:  # of a class of its own
        return lambda: plain.__repr__(value)
    if is_of(value, BaseException):
        return lambda: tuple(map(key, _parts_of_exception(value)))
    if is_of(value, decimal.Decimal):
        return lambda: (decimal.Decimal.__repr__(value), decimal_context())
    if is_of(value, queue.SimpleQueue):
        return lambda: tuple(map(key, _queued_in(value)))
    if is_of(value, threading.Thread):
        return functools.partial(state_of_thread, value)
    if is_of(value, (torch._C.Future, asyncio.Future)):
        return lambda: (value.done(), *map(key, _result_of(value)))
    if is_of(value, functools._lru_cache_wrapper):
        return functools.partial(_state_of_cache, value)
    if is_of(value, memoryview):
        return functools.partial(_content_of_view, value)
    if is_of(value, _OF_CTYPES):
        return lambda: bytes(value) if ctypes.sizeof(value) <= LARGEST_ARRAY else None
    if is_of(value, decimal.Context):
        return functools.partial(decimal_context, value)
    if any(str(of.__module__).split(".")[0] == "numpy" for of in type(value).__mro__):
        return _probe_of_numpys(value)
    if type(value).__module__ == "builtins" and hasattr(type(value), "__length_hint__"):
        return lambda: value.__length_hint__()
    return None


def contents_of(value: Any) -> list[Any]:
    """What an object keeps in C, and gives away as a whole."""
    if is_of(value, contextvars.ContextVar):
        return [value.get(None), *gc.get_referents(value)]  # which have its default
    if is_of(value, functools._lru_cache_wrapper):
        return [part for pair in _cached_by(value) for part in pair]
    if type(value).__module__ == "builtins" and hasattr(type(value), "__length_hint__"):
        return gc.get_referents(value)
    if is_of(value, concurrent.futures.Future):
        return [value._result]
    if is_of(value, queue.SimpleQueue):
        return _queued_in(value)
    if is_of(value, (torch._C.Future, asyncio.Future)):
        return _result_of(value)
    if is_of(value, super):
        return [of.__get__(value) for of in _OF_SUPER]
    if is_of(value, _CALLS_OTHERS):
        return gc.get_referents(value)
    if is_of(value, slice):
        return [value.start, value.stop, value.step]
    if is_of(value, BaseException):
        return _parts_of_exception(value)
    if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "hasobject", False):
        return list(value.ravel().tolist())
    return []


def _queued_in(value: Any) -> list[Any]:
    """Before Python 3.13 they are the end of a list."""
    referents = [of for of in gc.get_referents(value) if of is not type(value)]
    if sys.version_info < (3, 13):
        referents = list(referents[0]) if referents else []
    return referents[len(referents) - value.qsize() :]


def state_of_thread(thread: threading.Thread) -> Any:
    is_made: Any = thread._initialized  # type: ignore[attr-defined]
    names = ("_name", "_daemonic", "interval")  # the last one of a timer
    return is_made and (threading.Thread.is_alive(thread), *(vars(thread).get(name) for name in names))


def _result_of(future: Any) -> list[Any]:
    """Empty if there is none yet, or an error."""
    if not future.done():
        return []
    if is_of(future, asyncio.Future):
        return [future._result]
    try:
        return [future.value()]
    except Exception as error:
        signal_exceptions.pass_on(error)
        return []


def _state_of_cache(function: Any) -> Any:
    counters = function.cache_info()[1:]  # without hits
    pairs = _cached_by(function)
    return counters, frozenset((_key_of_arguments(of), key(result)) for of, result in pairs)


def _key_of_arguments(of: Any) -> Any:
    """Several are in a tuple that is made anew each time."""
    return tuple(map(key, of)) if type(of) is tuple else key(of)


def _cached_by(function: Any) -> list[tuple[Any, Any]]:
    """What stands for the arguments in a cache of ``functools``, each with its result. Of a large cache
    only the counters are compared."""
    if function.cache_info().currsize > _LARGEST_CACHE:
        return []
    parts = gc.get_referents(function)
    inside = [of for of in parts if type(of) is dict and of is not vars(function)]
    if function.cache_info().maxsize is None:
        return [pair for of in inside for pair in list(of.items())]
    # With a limit, each result follows its key; the dictionary has entries that tell nothing.
    keys = {id(of) for entries in inside if _has_entries(entries) for of in list(entries)}
    pairs, left = [], iter(parts)
    for part in left:
        if id(part) in keys:
            pairs.append((part, next(left, None)))
    return pairs


def _has_entries(of: dict[Any, Any]) -> bool:
    return all(type(entry).__name__ == "_lru_list_elem" for entry in list(of.values()))


def _state_of_bits(state: Any) -> Any:
    """Where one of NumPy's generators stands. (The text of 624 words takes long.)"""
    words: Any = state["state"].get("key") if type(state["state"]) is dict else None
    if not hasattr(words, "tobytes"):
        return repr(state)
    place = (state["state"].get("pos"), state.get("has_gauss"), state.get("gauss"))
    return words.tobytes(), repr(place)


def _place_in_file(file: Any) -> Any:
    if file.closed:
        return None
    if is_of(file, (io.BytesIO, io.StringIO)):
        return file.tell(), file.getvalue()
    return file.tell() if file.seekable() else None


def _content_of_view(view: memoryview) -> Any:
    content = view.tobytes() if view.nbytes <= LARGEST_ARRAY else None
    return view.format, view.shape, view.strides, content


def _parts_of_exception(error: BaseException) -> list[Any]:
    return [error.__cause__, error.__context__, *error.args]


def decimal_context(context: decimal.Context | None = None) -> Any:
    """What the results of decimal numbers depend on."""
    now = context or decimal.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp


def _place_of_generator(generator: Any) -> Any:
    frame = frame_of(generator)
    if frame is None:
        return None
    variables = tuple((name, key(item)) for name, item in frame.f_locals.items())
    return id(code_of(generator)), frame.f_lasti, variables, tuple(map(id, iterators_of(generator)))


def _probe_of_numpys(value: Any) -> Callable[[], Any] | None:
    if hasattr(value, "bit_generator"):
        return lambda: _state_of_bits(value.bit_generator.state)
    if hasattr(value, "random_raw"):  # such a generator by itself
        return lambda: _state_of_bits(value.state)
    if hasattr(value, "_bit_generator"):  # a RandomState
        return lambda: _state_of_bits(value.get_state(legacy=False))
    if hasattr(value, "tobytes") and value.dtype.hasobject:
        return lambda: tuple(map(key, value.ravel().tolist()))
    if hasattr(value, "tobytes") and value.nbytes <= LARGEST_ARRAY:
        return lambda: (value.dtype, value.shape, value.strides, value.tobytes())
    return None
