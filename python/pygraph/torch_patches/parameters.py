"""Loads a model's parameters and buffers all at once, for programs that PyGraph compiles.

One call of the engine looks up all consecutive arguments of a graph that belong to one model
(bindings/torch_patches/parameter_loader.h). Guards are not changed: each knows its parameter by its own
source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch._dynamo.bytecode_transformation import create_call_function, create_instruction
from torch._dynamo.source import AttrSource, ChainedSource, DictGetItemSource, NNModuleSource
from torch._guards import Source

from pygraph import runtime
from pygraph.torch_patches.state import Attempt

_FEWEST = 4  # arguments that are worth a call

# The way from a model to one of its tensors: dictionaries, and keys in them.
_Steps = tuple[tuple[str, str], ...]


def apply(gm: torch.fx.GraphModule, output: Any, attempt: Attempt) -> None:
    """Changes how the code that Dynamo will write loads the graph's arguments."""
    if dynamo_config.caching_precompile:  # the code is stored, and the engine's function cannot be
        return
    # By their sources, Dynamo finds the arguments that a specialization is for.
    if output.shape_env.specializations or writes_python():
        return
    arguments = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    for run in _runs(arguments, attempt):
        for argument in run.arguments:
            argument.source = _LoadedAtOnce(argument.source, run)


def writes_python() -> bool:
    """Whether Dynamo writes Python source in addition to bytecode, which needs other sources. From
    PyTorch 2.13 on."""
    return getattr(dynamo_config, "generate_pycode", False)


@dataclasses.dataclass(eq=False)
class _Run:
    """Arguments that follow each other, and the model that all of them belong to."""

    model: Source
    attempt: Attempt
    arguments: list[Any] = dataclasses.field(default_factory=list)
    steps: list[_Steps] = dataclasses.field(default_factory=list)
    is_loaded: bool = False

    def load(self, codegen: Any) -> None:
        """Writes the code that puts all of them on the stack, the first one lowest, if they still
        follow each other. Without it, each is loaded by itself."""
        self.is_loaded = False
        before = list(codegen._output), dict(codegen.tempvars), codegen.top_of_stack
        with self.attempt.trying():
            self._write(codegen)
        if not self.is_loaded:
            codegen._output[:], codegen.tempvars, codegen.top_of_stack = before

    def _write(self, codegen: Any) -> None:
        ids = [id(argument) for argument in codegen.tx.output.graphargs]
        first = ids.index(id(self.arguments[0]))
        if ids[first : first + len(self.arguments)] != [id(argument) for argument in self.arguments]:
            return
        name = codegen.tx.output.install_global_by_id("__pygraph_parameters", self._loader())
        codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_global(name, add=True)))
        codegen(self.model)
        codegen.extend_output(create_call_function(1, False))
        codegen.append_output(create_instruction("UNPACK_SEQUENCE", arg=len(self.arguments)))
        codegen.clear_tos()
        self.is_loaded = True

    def _loader(self) -> Any:
        objects: dict[_Steps, int] = {(): 0}
        containers: dict[tuple[_Steps, str], int] = {}
        items: list[tuple[int, str]] = []
        for steps in self.steps:
            for i, (attribute, key) in enumerate(steps):
                before, item = steps[:i], steps[: i + 1]
                if item in objects:
                    continue
                container = containers.setdefault((before, attribute), len(containers))
                items.append((container, key))
                objects[item] = len(items)
        return runtime.engine().parameter_loader(
            [(objects[owner], attribute) for owner, attribute in containers],
            items,
            [objects[steps] for steps in reversed(self.steps)],  # as UNPACK_SEQUENCE wants them
        )


@dataclasses.dataclass(frozen=True)
class _LoadedAtOnce(ChainedSource):  # type: ignore[misc]
    """One of a run: the first one's code loads all of them."""

    run: _Run

    @property
    def _name_template(self) -> str:
        return "{0}"

    def reconstruct(self, codegen: Any) -> None:
        if self.run.arguments[0].source is self:
            self.run.load(codegen)
        if not self.run.is_loaded:
            codegen(self.base)


def _runs(arguments: Sequence[Any], attempt: Attempt) -> Iterator[_Run]:
    run: _Run | None = None
    for argument in (*arguments, None):
        model, steps = _way_to(argument)
        if run is not None and (model is None or model != run.model):
            if len(run.arguments) >= _FEWEST:
                yield run
            run = None
        if model is not None:
            run = run or _Run(model, attempt)
            run.arguments.append(argument)
            run.steps.append(steps)


def _way_to(argument: Any) -> tuple[Source | None, _Steps]:
    """The model that a graph's argument belongs to, if it does, and the way from there."""
    source: Any = None if argument is None or argument.pass_arg_as_tensor else argument.source
    steps: list[tuple[str, str]] = []
    attributes: tuple[str, ...] = ("_parameters", "_buffers")
    while (
        _loads_as(source, DictGetItemSource)
        and isinstance(source.index, str)
        and _loads_as(source.base, AttrSource)
        and source.base.member in attributes
    ):
        steps.insert(0, (source.base.member, source.index))
        source = source.base.base
        while _loads_as(source, NNModuleSource):
            source = source.base
        attributes = ("_modules",)
    return (source, tuple(steps)) if steps else (None, ())


def _loads_as(source: Any, kind: type[Source]) -> bool:
    """Whether the code for a source is that of this kind, or of one derived from it."""
    return getattr(type(source), "reconstruct", None) is kind.reconstruct
