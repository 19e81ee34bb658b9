"""Callables that lie in installed packages: what their own package's globals hold is read."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph.callables.host import user_code

from .attacked import assert_replays_follow

_STEP = "from .settings import CONFIG\n\n\ndef step(x):\n    return helper(x)\n"
_HELPER = "\n\ndef helper(x):\n    return x * CONFIG['scale']\n"
_CLASS = "\n\nclass Trainer:\n    def __call__(self, x):\n        return helper(x)\n"


def test_a_function_of_a_single_file(partitions: Any, install: Any) -> None:
    module = install("installed_step.py", "CONFIG = {'scale': 2.0}" + _HELPER)("installed_step")
    assert_replays_follow(partitions, module.helper, lambda: module.CONFIG.update(scale=3.0))


@pytest.mark.parametrize("root", ["function", "object", "method"])
def test_a_setting_in_another_file_of_the_package(partitions: Any, install: Any, root: str) -> None:
    install("installed_trainer/__init__.py", "")
    install("installed_trainer/settings.py", "CONFIG = {'scale': 2.0}\n")
    step = install("installed_trainer/steps.py", _STEP + _HELPER + _CLASS)("installed_trainer.steps")
    roots = {
        "function": lambda: step.step,
        "object": step.Trainer,
        "method": lambda: step.Trainer().__call__,
    }
    assert_replays_follow(partitions, roots[root](), lambda: step.CONFIG.update(scale=3.0))


def test_a_large_package_counts_by_its_file(
    partitions: Any, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose globals lead everywhere leaves the callable a graph."""
    install("installed_library/__init__.py", "")
    install(
        "installed_library/large.py", "TABLE = [[i] for i in range(20_000)]\n\n\ndef f():\n    TABLE\n"
    )
    source = "from .large import f\nCONFIG = {'scale': 2.0}\n\n\ndef step(x):\n    f()\n"
    step = install("installed_library/steps.py", source + "    return x * CONFIG['scale']\n")
    module = step("installed_library.steps")
    assert_replays_follow(partitions, module.step, lambda: module.CONFIG.update(scale=3.0))
    assert not any(path.endswith("installed_library/") for path in user_code._counted)
