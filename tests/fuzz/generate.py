"""Makes the random program of a seed. The same seed gives the same program on every machine."""

from __future__ import annotations

import random
from typing import Any

import torch

from . import operators, operators_library
from .calls import ACTIONS_AFTER, ACTIONS_BEFORE, FLIPS, VALUES
from .program import Call, Input, Program, Statement, meta_inputs, namespace
from .scope import MAKERS, WEIGHTS, Scope

_MODULES = (operators, operators_library)  # they register their makers
# One of so many programs is compiled; the others are made of partitions at once.
COMPILED_EVERY = 10
_DTYPES = ["float32"] * 12 + ["float64", "float16", "bfloat16", "int64", "int32", "bool"]
_LAYOUTS = ["plain"] * 6 + ["transposed", "strided", "offset", "expanded", "misaligned"]
_SHAPES: list[list[Any]] = [[0, 1], [1, 2], [1], [0, 1, 2], [0], [2], [1, 1], [0, 1], []]


def generate(seed: int, level: str = "", mode: str = "") -> Program:
    """level: "partition", "compiled"; mode: where calls come from. "": what the seed says."""
    rng = random.Random(seed)
    level = level or ("compiled" if seed % COMPILED_EVERY == 0 else "partition")
    is_small = level == "compiled"
    sizes = [rng.choice([2, 3, 8])] if rng.random() < 0.85 else rng.sample([1, 2, 4, 7, 16], 2)
    inputs = _inputs(rng, is_small, varies=len(sizes) > 1)
    scope = Scope(rng, inputs, sizes, is_small)
    statements = _statements(scope, rng.randint(1, 6) if is_small else rng.randint(1, 18))
    program = Program(seed, level, "inference", inputs, statements, [], [], sizes)
    _choose_returns(program, scope)
    program.settings = _settings(program, rng, mode)
    if level == "partition":
        program.kind = rng.choice(["inference", "inference", "forward", "backward"])
        many = len(statements) > 3 and rng.random() < 0.3
        program.cuts = sorted(rng.sample(range(1, len(statements)), rng.randint(1, 2))) if many else []
    program.calls = _calls(program, rng)
    return program


def _inputs(rng: random.Random, is_small: bool, varies: bool) -> list[Input]:
    choices = [1, 2, 3, 5, 8, 16, 33, 64]
    dims: list[Any] = [rng.choice(choices), rng.choice(choices), rng.choice(choices[:5])]
    if rng.random() < 0.08 and not is_small:
        dims = [512, 768, 2]  # memory that is worth taking over
    if rng.random() < 0.03:
        dims[rng.randrange(3)] = 0
    found = []
    for number in range(rng.randint(1, 5)):
        shape = [dims[d] for d in rng.choice(_SHAPES)]
        if varies and shape and (number == 0 or rng.random() < 0.5):
            shape[0] = "s"
        dtype = "float32" if number == 0 else rng.choice(_DTYPES)
        layout = rng.choice(_LAYOUTS) if rng.random() < 0.5 else "plain"
        values = rng.choice(VALUES) if rng.random() < 0.35 else "normal"
        found.append(Input(f"a{number}", shape, dtype, layout, rng.random() < 0.25, values))
    if varies and not any("s" in i.shape for i in found):
        found.append(Input(f"a{len(found)}", ["s", 3]))
    return found


def _statements(scope: Scope, count: int) -> list[Statement]:
    found: list[Statement] = []
    for _ in range(count * 8):
        maker = scope.rng.choices(MAKERS, WEIGHTS)[0]
        statement = maker(scope)
        if statement is not None and scope.add(statement):
            found.append(statement)
        if len(found) == count:
            break
    return found


def _choose_returns(program: Program, scope: Scope) -> None:
    rng = scope.rng
    made = [name for s in program.statements for name in s.outputs]
    used = {name for s in program.statements for name in s.args}
    leaves = [name for name in made if name not in used]
    program.returns = leaves[-4:] + [
        name for name in made if rng.random() < 0.15 and name not in leaves
    ]
    if rng.random() < 0.15 or not program.returns:
        program.returns.append(rng.choice(sorted(scope.inputs)))
    if rng.random() < 0.05:
        program.returns.append(program.returns[0])


def _settings(program: Program, rng: random.Random, mode: str) -> dict[str, Any]:
    """hints: what the partition is told of written inputs. shipped: measured as users' programs are.
    mode: where calls come from. lanes: kernels at a time. training: how a compiled program's gradients
    are computed. away: whether callers keep nothing of their arguments."""
    settings: dict[str, Any] = {
        "frees": rng.random() < 0.9,
        "hints": rng.choice(["exact", "exact", "none"]),
        "shipped": rng.random() < 0.03,
        "mode": rng.choices(["plain", "streams", "thread", "concurrent"], [9, 2, 2, 2])[0],
        "lanes": rng.choice([8, 8, 1]),
        "away": rng.random() < 0.3,
    }
    if program.level == "compiled":
        settings["dynamic"] = rng.choice([None, None, True, False])
        settings["grad"] = rng.choice(["no_grad", "no_grad", "inference_mode", "training", "training"])
        ways = ("backward", "retain_graph", "grad", "two losses", "nested", "accumulate", "checkpoint")
        settings["training"] = rng.choice(ways)
        if settings["grad"] == "training" and not has_gradients(program):
            settings["grad"] = "no_grad"
    settings["mode"] = mode or settings["mode"]
    if settings["mode"] == "concurrent" and (program.draws or program.uses_generator):
        settings["mode"] = "thread"  # which thread draws first is left to chance
    return settings


def _calls(program: Program, rng: random.Random) -> list[Call]:
    is_shipped = program.settings["shipped"]
    count = rng.randint(26, 30) if is_shipped else rng.choice([4, 5, 5, 6, 6, 7, 8, 9, 12])
    writes = {s.args[i] for s in program.statements for i in s.writes}
    may_alias = not any(s.fragile for s in program.statements)
    calls = []
    for number in range(count):
        call = Call(size=rng.randrange(len(program.sizes)) if number % 3 == 2 else 0)
        if rng.random() < 0.15:
            call.values = rng.choice(VALUES)
        for i, spec in enumerate(program.inputs):
            is_varying = "s" in spec.shape
            if spec.is_parameter and rng.random() < 0.9 and not is_varying:
                call.reuse[spec.name] = "same"
            elif rng.random() < 0.15 and number:
                call.reuse[spec.name] = rng.choice(["same", f"output:{rng.randrange(3)}"])
            elif rng.random() < 0.1 and i and may_alias:
                call.reuse[spec.name] = f"alias:a{rng.randrange(i)}"
            elif rng.random() < 0.1 and i and may_alias and not writes:
                call.reuse[spec.name] = f"overlap:a{rng.randrange(i)}"
        if rng.random() < 0.12 and number:
            call.before.append(rng.choice(ACTIONS_BEFORE))
        if rng.random() < 0.06 and program.settings["mode"] != "concurrent":
            # Two ways to set one thing, which PyTorch does not let a program mix.
            other = "precision" if program.seed % 2 else "tf32"
            call.before.append(rng.choice([name for name in FLIPS if name != other]))
        if rng.random() < 0.3:
            call.after.append(rng.choice(ACTIONS_AFTER))
        calls.append(call)
    return calls


def has_gradients(program: Program) -> bool:
    """Whether autograd takes the program."""
    values = {**namespace("meta"), **meta_inputs(program, program.sizes[0])}
    for name, value in list(values.items()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            values[name] = value.detach().requires_grad_() * 1
    try:
        for statement in program.statements:
            exec(statement.source(on_meta=True), values)
        results = [values[name] for name in program.returns]
        loss = [r.float().sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if not loss:
            return False
        torch.stack(loss).sum().backward()
    except Exception:
        return False
    return True
