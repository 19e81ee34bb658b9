"""Options: what is ours, what is Inductor's, and what is refused with a useful message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pygraph import options
from pygraph.torch_patches.table import PATCHES


def test_defaults_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/options.md."""
    monkeypatch.delenv("PYGRAPH_SELECT", raising=False)
    monkeypatch.delenv("PYGRAPH_PATCHES", raising=False)
    config = options.parse(None, None)
    assert dataclasses.asdict(config.own) == {
        "select": "auto",
        "verify": True,
        "audit": None,
        "max_graphs": 256,
        "lanes": 8,
        "transforms": options.TRANSFORMS,
        "patches": frozenset(patch.name for patch in PATCHES if patch.exact),
        "optimizers": "off",
        "warm_start": False,
        "reuse_gradients": True,
        "record_capacity_gib": 1024,
    }
    assert config.inductor == {}
    assert config.graphs


def test_own_options_are_split_from_inductors() -> None:
    config = options.parse(None, {"pygraph.max_graphs": 3, "max_autotune": True})
    assert config.own.max_graphs == 3
    assert config.inductor == {"max_autotune": True}


@pytest.mark.parametrize("given", [[1], {5: 1}, "pygraph.lanes"])
def test_options_that_are_no_dict_of_names(given: Any) -> None:
    with pytest.raises(
        ValueError, match=r"options of torch\.compile are a dict with names as keys, got"
    ):
        options.parse(None, given)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_with_graphs(mode: str) -> None:
    assert options.parse(mode, None).graphs


def test_a_mode_without_graphs() -> None:
    config = options.parse("max-autotune-no-cudagraphs", None)
    assert not config.graphs
    assert config.inductor["max_autotune"] is True


def test_an_unknown_own_option_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"pygraph\.verify, pygraph\.audit, pygraph\.max_graphs"):
        options.parse(None, {"pygraph.verfy": True})


def test_an_unknown_option_of_inductor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown option 'max_autotun'.*list_options"):
        options.parse(None, {"max_autotun": True})


def test_an_unknown_mode_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"valid are: default, .*reduce-overhead"):
        options.parse("fastest", None)


@pytest.mark.parametrize(("key", "value"), [("verify", 1), ("max_graphs", "2"), ("max_graphs", 0)])
def test_values_are_checked(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"pygraph.{key}"):
        options.parse(None, {f"pygraph.{key}": value})


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="cpp_wrapper"):
        options.parse(None, {"cpp_wrapper": True})
