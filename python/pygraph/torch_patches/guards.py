"""Makes one guard of Dynamo's cheaper, for programs that PyGraph compiles; more, if the user asks.

Every program has a guard, in Python, that looks for default hooks on saved tensors. Where there are
none, the engine says so. That it fails when a program is to be compiled anew is how PyGraph has one
compiled anew (:mod:`pygraph.uncapturable`).

A guard holds the method of Dynamo's that will make it from the time it is noted, which is before the
backend is called. So what changes is that attribute, of the guards of the one program that is being
compiled. All other kinds of guards stay as they are, unless the user asks for "all" patches
(:mod:`pygraph.torch_patches.module_guards`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._dynamo import guards
from torch._dynamo.output_graph import OutputGraph
from torch._functorch._aot_autograd import utils as aot_utils
from torch._guards import Guard

from pygraph import runtime
from pygraph.source_digest import digest_of
from pygraph.torch_patches import module_guards
from pygraph.torch_patches.patches import Changes
from pygraph.uncapturable import Compilation

_dynamos_create = Guard.create
_dynamos_guard_hooks = getattr(guards.GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", None)

# Of the source of what is replaced, and of what calls it.
_DIGEST_OF_HOOKS = "4cd8c804ac8105b6"
_DIGEST_OF_CREATE = "e6b2f0a0f5c226e3"

# Makes a guard in its own way; False if Dynamo is to make it.
Make = Callable[[guards.GuardBuilder, Guard], bool]


def make_cheaper(output: OutputGraph, changes: Changes, compilation: Compilation | None = None) -> None:
    """The guards of the program that is being compiled, noted so far.

    compilation: what one of them is to fail for, when that is to be made anew.
    """
    if digest_of((_dynamos_create,)) != _DIGEST_OF_CREATE or _are_stored(output):
        return
    makes: dict[Any, Make] = {}
    if _dynamos_guard_hooks and digest_of((_dynamos_guard_hooks,)) == _DIGEST_OF_HOOKS:
        makes[_dynamos_guard_hooks] = _HooksGuard(compilation)
    if changes.misses_some:
        makes.update(module_guards.makes_for(output))
    for guard in output.guards:
        make = makes.get(guard.create_fn)
        if make is not None:
            guard.create_fn = _Creation(guard.create_fn, make, changes)


def _are_stored(output: OutputGraph) -> bool:
    """Whether guards are written to a file, for other processes."""
    return output.package is not None or output.export or dynamo_config.caching_precompile


class _Creation:
    """Stands for a method of Dynamo's that makes a guard."""

    def __init__(self, dynamos: Any, make: Make, changes: Changes) -> None:
        self._dynamos, self._make, self._changes = dynamos, make, changes
        self.__name__ = dynamos.__name__  # by which Dynamo reports guards
        self.__code__ = dynamos.__code__  # and sorts them

    def __call__(self, builder: guards.GuardBuilder, guard: Guard) -> None:
        is_made = False
        if self._changes.goes_on and not builder.save_guards:
            with self._changes.trying("a guard"):
                is_made = self._make(builder, guard)
        if not is_made:
            self._dynamos(builder, guard)

    def __reduce__(self) -> Any:
        return getattr, (guards.GuardBuilder, self.__name__)


class _HooksGuard:
    """As Dynamo's, for what is compiled without such hooks that could be inlined."""

    def __init__(self, compilation: Compilation | None) -> None:
        self._compilation = compilation

    def __call__(self, builder: guards.GuardBuilder, guard: Guard) -> bool:
        if _has_inlineable_hooks():
            return False
        compilation = self._compilation
        code = ["torch._functorch.aot_autograd.utils.top_saved_tensors_hooks ids == None"]
        parts = guards.get_verbose_code_parts([f"{code[0]}, and PyGraph has learned of no cut"], guard)

        def holds(_: object) -> bool:
            return not _has_inlineable_hooks() and (compilation is None or compilation.holds())

        check = runtime.engine().saved_hooks_guard(compilation.expired if compilation else [], holds)
        builder._set_guard_export_info(guard, code, provided_func_name=guard.create_fn_name())
        builder.guard_manager.root.add_lambda_guard(check, parts, guard.user_stack)
        if compilation is not None:
            compilation.has_guard = True
        return True


def _has_inlineable_hooks() -> bool:
    hooks = aot_utils.top_saved_tensors_hooks()
    return bool(aot_utils.saved_tensors_hooks_are_inlineable(hooks))
