"""``pygraph explain train.py`` shows the step function of a plain training loop."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch

from pygraph import cli

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
