"""Results of a replay that are to be tensors of inference mode, or not (test_results.py of the attacks
has whole callables)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pygraph.callables.inference_results import as_observed, inference_among

_LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(6.0),
    "a part, transposed": lambda: torch.arange(24.0).view(2, 3, 4)[:, 1:].transpose(0, 2),
    "conjugated": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj(),
    "negated": lambda: torch.complex(torch.ones(3), torch.arange(3.0)).conj().imag,
    "empty": lambda: torch.empty(0, 3),
    "expanded": lambda: torch.arange(3).expand(4, 3),
}


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("is_under_it", [False, True])
def test_a_result_is_made_once_more_on_the_same_memory(layout: str, is_under_it: bool) -> None:
    with torch.inference_mode(is_under_it):
        given = _LAYOUTS[layout]()
        wanted = frozenset[int]() if is_under_it else frozenset({0})
        (made,) = as_observed([given], wanted, [])
    assert given.is_inference() == is_under_it != made.is_inference()
    assert torch.equal(made, given) and made.stride() == given.stride() and made.dtype == given.dtype
    assert made.data_ptr() == given.data_ptr()
    assert (made.is_conj(), made.is_neg()) == (given.is_conj(), given.is_neg())
    assert inference_among([given, 1, made]) == (frozenset({0}) if is_under_it else frozenset({2}))


def test_what_is_right_and_what_is_an_argument_stays() -> None:
    x = torch.ones(2)
    with torch.inference_mode():
        y = torch.ones(2)
    assert all(
        a is b for a, b in zip(as_observed([x, y, 3], frozenset({1}), []), [x, y, 3], strict=True)
    )
    assert as_observed([x], frozenset({0}), [x])[0] is x
    first, second = as_observed([x, x], frozenset({0, 1}), [])
    assert first is second is not x
