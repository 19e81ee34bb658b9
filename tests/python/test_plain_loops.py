"""``pygraph explain train.py`` shows the step function of a plain training loop."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph
from pygraph import cli
from pygraph.report.loop_calls import noting_calls

from .graphed_programs import Training, adamw, batches, replays

_HEAD = """
import torch
import torch.nn.functional as F

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = [(torch.randn(2, 4), torch.tensor([0, 1]))] * 3
"""


def _explained(folder: Path, capsys: pytest.CaptureFixture[str], body: str) -> tuple[Path, list[dict]]:
    script = folder / "train.py"
    script.write_text(_HEAD + textwrap.dedent(body))
    assert cli.main(["explain", "--json", str(script)]) == 0
    return script, json.loads(capsys.readouterr().out)["loops"]


def test_the_step_of_a_loop_becomes_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, (loop,) = _explained(
        tmp_path,
        capsys,
        """
        losses = []
        for epoch in range(2):
            for images, labels in loader:
                images, labels = images.to("cpu"), labels.to("cpu")
                # The mean over the batch.
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        """,
    )
    assert loop["where"] == f"{script}:15"
    assert loop["calls"] == [
        *("backward in line 15", "clipping in line 16", "optimizer.step in line 17"),
        "zero_grad in line 18",
    ]
    expected = """
        @pygraph.graph
        def step(images, labels):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()


        for images, labels in loader:
            images, labels = images.to("cpu"), labels.to("cpu")
            loss = step(images, labels)
            losses.append(loss.item())
    """
    assert loop["code"] == textwrap.dedent(expected).strip("\n")


def test_what_is_shown_trains_as_the_script_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        for batch in loader:
            optimizer.zero_grad()
            x, y = batch
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        """
    _, (loop,) = _explained(tmp_path, capsys, body)
    found = []
    for code in (textwrap.dedent(body), loop["code"].replace("@pygraph.graph\n", "")):
        torch.manual_seed(0)
        names: dict[str, object] = {}
        exec(_HEAD + code, names)
        found.append(names["model"].weight)  # type: ignore[attr-defined]
    assert "def step(batch):" in loop["code"] and torch.equal(*found)


_SETUP = "losses, total, rate, step = [], 0.0, 0.5, 0\n"
_ODD_LOOPS = {
    "a name that is read and then changed": """
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            total += loss.item()
            loss.backward()
            optimizer.step()
        losses.append(total)
        """,
    "a result that is read after the loop": """
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
        """,
    "a carried tensor": """
        h = torch.zeros(2, 3)
        for x, y in loader:
            h = model(x) + h.detach()
            F.cross_entropy(h, y).backward()
            optimizer.step()
        """,
    "a number that is returned": """
        for x, y in loader:
            k = 2
            (F.cross_entropy(model(x), y) * k).backward()
            optimizer.step()
            losses.append(k)
        """,
    "the name step is taken": """
        for x, y in loader:
            (F.cross_entropy(model(x), y) * (step + 1)).backward()
            optimizer.step()
            step += 1
        """,
    "text of several lines": """
        for x, y in loader:
            text = '''
              a
            '''
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            losses.append(text)
        """,
    "all in one line": """
        for x, y in loader: F.cross_entropy(model(x), y).backward(); optimizer.step()
        """,
    "a form feed": """
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            \x0c
            optimizer.step()
        """,
    "next in a while": """
        batches = iter(loader)
        while step < 3:
            x, y = next(batches)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
        """,
    "a name that is deleted": """
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            del loss
        """,
}


@pytest.mark.parametrize("name", _ODD_LOOPS)
def test_what_is_shown_of_odd_loops_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    body = _SETUP + textwrap.dedent(_ODD_LOOPS[name])
    _, (loop,) = _explained(tmp_path, capsys, body)
    line = next(i for i, text in enumerate(body.split("\n")) if text.startswith(("for", "while")))
    after = "losses.append(" + body.rpartition("\nlosses.append(")[2] if "\nlosses" in body else ""
    shown = "\n".join([*body.split("\n")[:line], loop["code"], after])
    found = []
    for code in (body, shown.replace("@pygraph.graph\n", "")):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(_HEAD + code, names)
        found.append((names["losses"], names["total"], names["model"].weight.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("word", ["break", "continue", "yield loss", "return loss"])
def test_what_leaves_a_loop_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    body = f"""
        def train():
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                if loss > 100:
                    {word}
                loss.backward()
                optimizer.step()

        list(train() or ())
        """
    _, (loop,) = _explained(tmp_path, capsys, body)
    assert f"the `{word.split()[0]}` of line 13" in loop["code"] and "def " not in loop["code"]


def test_what_trains_beside_a_loop_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        for _ in []:
            pass
        else:
            x, y = loader[0]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        """
    _, (loop,) = _explained(tmp_path, capsys, body)
    assert "for x, y in loader:" in loop["code"]


def test_a_function_over_several_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        def train_step(
            x,
            y,
        ):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        for x, y in loader:
            train_step(x, y)
        """
    _, (loop,) = _explained(tmp_path, capsys, body)
    assert loop["code"] == "@pygraph.graph\ndef train_step(x, y):\n    ..."


def test_a_step_that_is_a_function_already_is_to_be_decorated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (loop,) = _explained(
        tmp_path,
        capsys,
        """
        def train_step(x, y):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        for x, y in loader:
            train_step(x, y)
        """,
    )
    assert loop["code"] == "@pygraph.graph\ndef train_step(x, y):\n    ..."


def test_a_graphed_step_is_no_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, loops = _explained(
        tmp_path,
        capsys,
        """
        import pygraph

        @pygraph.graph
        def train_step(x, y):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        for x, y in loader:
            train_step(x, y)
        """,
    )
    assert loops == []


def test_the_terminal_shows_it_and_pytorch_is_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.Tensor.backward, torch.optim.Optimizer.zero_grad, torch.nn.utils.clip_grad_norm_
    script = tmp_path / "train.py"
    script.write_text(
        _HEAD
        + "for x, y in loader:\n    F.cross_entropy(model(x), y).backward()\n    optimizer.step()\n"
    )
    assert cli.main(["explain", str(script)]) == 0
    text = capsys.readouterr().out
    assert f"{script}:9: a training loop without a graph" in text
    assert "    @pygraph.graph\n    def step(x, y):\n" in text
    after = torch.Tensor.backward, torch.optim.Optimizer.zero_grad, torch.nn.utils.clip_grad_norm_
    assert after == before


def test_steps_have_graphs_while_calls_are_noted(partitions: Any) -> None:
    with noting_calls() as calls:
        at = Training(adamw)
        step = pygraph.graph(at.step)
        for x, y in batches(6):
            step(x, y)
        assert calls == {} and replays(partitions) == 2
        other = Training(adamw)
        for x, y in batches(6):
            other.step(x, y)
    assert {kind for kind, _, _ in calls} == {"backward", "clipping", "optimizer.step", "zero_grad"}
    assert all(torch.equal(a, b) for a, b in zip(at.state(), other.state(), strict=True))
    assert "loop_calls" not in torch.optim.AdamW.step.__code__.co_filename
