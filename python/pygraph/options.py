"""The options of the backend: PyGraph's own, and those passed on to Inductor."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from pygraph.torch_patches import selection

LIBRARY_FUNCTIONS = "library_functions"  # before there is a graph: pygraph.polyfills
TRANSFORMS = ("cpu_scalars", "cpu_tensors", "constants", "cpu_outputs", LIBRARY_FUNCTIONS)

_PREFIX = "pygraph."

SELECTIONS = ("auto", "always", "never")
OPTIMIZERS = ("auto", "off")


def _one_of(values: tuple[str, ...], source: str, value: Any) -> str:
    if value not in values:
        raise ValueError(f"{source} takes {', '.join(values)}; got {value!r}")
    return str(value)


@dataclasses.dataclass(frozen=True)
class Options:
    """PyGraph's own options, each given as ``options={"pygraph.<name>": value}``. Their meaning is in
    docs/reference/options.md."""

    select: str = dataclasses.field(
        default_factory=lambda: _one_of(
            SELECTIONS, "PYGRAPH_SELECT", os.environ.get("PYGRAPH_SELECT", "auto")
        )
    )
    verify: bool = True
    audit: int | None = None  # calls between audits; None: the schedule of verify/audit_schedule.py
    max_graphs: int = 256
    lanes: int = 8
    transforms: tuple[str, ...] = TRANSFORMS
    patches: frozenset[str] = dataclasses.field(default_factory=selection.default)
    optimizers: str = "off"
    warm_start: bool = False
    reuse_gradients: bool = True
    record_capacity_gib: int = 1024


@dataclasses.dataclass(frozen=True)
class BackendConfig:
    """The options of one ``torch.compile`` call."""

    own: Options
    inductor: dict[str, Any]  # patches of torch._inductor.config
    graphs: bool  # False for modes that end in "-no-cudagraphs"


def _names() -> str:
    return ", ".join(f"{_PREFIX}{field.name}" for field in dataclasses.fields(Options))


def _own_option(key: str, value: Any) -> tuple[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(Options)}
    name = key.removeprefix(_PREFIX)
    if name not in fields:
        raise ValueError(f"unknown option {key!r} for backend 'pygraph'; PyGraph has: {_names()}")
    if name in _PARSERS:
        return name, _PARSERS[name](f"option {key!r}", value)
    expected = type(fields[name].default)
    if type(value) is not expected:
        raise ValueError(f"option {key!r} takes {expected.__name__}, got {value!r}")
    if isinstance(value, int) and not isinstance(value, bool) and value < 1:
        raise ValueError(f"option {key!r} must be at least 1, got {value!r}")
    return name, value


def _audit(source: str, value: Any) -> int | None:
    if value is True:
        return None
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{source} takes a number of calls, or False; got {value!r}")
    return int(value)


def _transforms(source: str, value: Any) -> tuple[str, ...]:
    if value in ("all", "none"):
        return TRANSFORMS if value == "all" else ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or not set(names) <= set(TRANSFORMS):
        raise ValueError(
            f'{source} takes "all", "none" or names out of {", ".join(TRANSFORMS)}; got {value!r}'
        )
    return tuple(name for name in TRANSFORMS if name in names)


# Called with what the value is of, for the text of a ValueError, and the value.
_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "select": functools.partial(_one_of, SELECTIONS),
    "optimizers": functools.partial(_one_of, OPTIMIZERS),
    "patches": selection.parse,
    "transforms": _transforms,
    "audit": _audit,
}


def _check_inductor_option(key: str) -> None:
    known = torch._inductor.config.get_config_copy()
    if key.replace("-", "_") not in known:
        raise ValueError(
            f"unknown option {key!r} for backend 'pygraph'; valid are the options of Inductor "
            f"(torch._inductor.list_options()) and: {_names()}"
        )


def own(options: dict[str, Any]) -> Options:
    """PyGraph's options from their names without the prefix. Raises ValueError as ``parse`` does."""
    return Options(**dict(_own_option(_PREFIX + name, value) for name, value in options.items()))


def parse(mode: str | None, options: dict[str, Any] | None) -> BackendConfig:
    """Splits what ``torch.compile`` passes into our options and Inductor's.

    Raises ValueError for an unknown option, mode or a value of the wrong type.
    """
    import torch._inductor

    inductor: dict[str, Any] = {}
    if mode is not None and mode != "default":
        modes = torch._inductor.list_mode_options()
        if mode not in modes:
            raise ValueError(f"unknown mode {mode!r}; valid are: {', '.join(modes)}")
        inductor.update(modes[mode])
    if not isinstance(options or {}, dict) or not all(isinstance(key, str) for key in options or ()):
        raise ValueError(f"options of torch.compile are a dict with names as keys, got {options!r}")
    own: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if key.startswith(_PREFIX):
            own.update([_own_option(key, value)])
        else:
            _check_inductor_option(key)
            inductor[key.replace("-", "_")] = value
    for unsupported in ("cpp_wrapper", "fx_wrapper"):
        if inductor.get(unsupported):
            raise ValueError(f"backend 'pygraph' does not support the Inductor option {unsupported}")
    graphs = not (mode or "").endswith("-no-cudagraphs")
    return BackendConfig(Options(**own), inductor, graphs)
