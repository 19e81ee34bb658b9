"""What the documentation says of files, tests and reasons, and where its links lead."""

from __future__ import annotations

import re
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

import pygraph

from .graphed_programs import reason
from .reason_texts import texts

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), ROOT / "src" / "README.md"]
    + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```", re.DOTALL)
# A file of the repository that a page names in code: `src/link.cc`, `tests/gpu/test_audit.py`.
_PATH = re.compile(r"`((?:python|src|include|bindings|tests|benchmarks|examples|docs)/[\w./-]+\.\w+)`")
# A page that a comment names: docs/footguns.md.
_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text("utf-8")), re.MULTILINE):
        text = unicodedata.normalize("NFC", re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading).lower())
        found.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_rows_of_tables_have_lines_of_their_own(page: Path) -> None:
    for line in _CODE.sub("", page.read_text("utf-8")).splitlines():
        if "|---" in line:
            assert re.fullmatch(r"\s*\|(-+\|)+", line), line


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=_name)
def test_files_that_pages_name_exist(page: Path) -> None:
    for path in _PATH.findall(page.read_text("utf-8")):
        assert (ROOT / path).exists(), path


def test_pages_that_comments_name_exist() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("needs a checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".cc", ".h", ".cu", ".txt", ".toml") or path.name == "Makefile":
            for page in _PAGE.findall(path.read_text("utf-8")) if path.exists() else ():
                assert (ROOT / page).exists(), f"{name}: {page}"


def test_the_map_lists_every_page() -> None:
    text = (DOCS / "README.md").read_text("utf-8")
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(text)}
    decisions = (DOCS / "decisions" / "README.md").read_text("utf-8")
    linked |= {(DOCS / "decisions" / link).resolve() for link in _LINK.findall(decisions)}
    missing = [_name(page) for page in DOCS.rglob("*.md") if page.resolve() not in linked]
    assert missing == ["docs/README.md"]


def test_every_reason_has_an_entry() -> None:
    found = texts()
    assert len(found) > 60
    page = (DOCS / "reference" / "reasons.md").read_text("utf-8")
    missing = {text: file for text, file in found.items() if text.strip(" ,;:") not in page}
    assert missing == {}


def test_every_footgun_names_its_tests_or_says_why_there_is_none() -> None:
    text = (DOCS / "footguns.md").read_text("utf-8")
    entries = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert len(entries) > 20
    for entry in entries:
        title = entry.splitlines()[0]
        pins = re.findall(r"\[([\w/]+\.py): `(test_\w+)`\]", entry)
        assert pins or "[no test:" in entry, title
        for file, name in pins:
            path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "gpu" / file
            assert f"def {name}(" in path.read_text("utf-8"), f"{title}: {file}: {name}"


def _code_of(page: Path) -> str:
    """All its blocks, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert blocks
    return "\n".join(blocks)


def test_the_installation_names_what_its_build_needs() -> None:
    """``--no-build-isolation`` uses what is installed."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (listed,) = re.findall(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    needed = [f'"{name}"' for name in re.findall(r'"([^"]+)"', listed) if not name.startswith("torch")]
    assert needed
    for page in (ROOT / "README.md", DOCS / "tutorial" / "first-model.md"):
        commands = [
            line for line in page.read_text("utf-8").splitlines() if line.startswith("pip install")
        ]
        assert commands[-1] == "pip install --no-build-isolation ."
        assert all(name in " ".join(commands[:-1]) for name in [*needed, "cmake", "ninja"])


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, where the backend is plain Inductor and `explain` estimates."""
    monkeypatch.chdir(tmp_path)
    code = _code_of(DOCS / "tutorial" / "first-model.md")
    exec(compile(code, "first-model.md", "exec"), {})
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    "name", ["how-to/graph-a-training-step", "tutorial/training-loop-in-one-graph"]
)
def test_the_steps_of_a_page_run(name: str) -> None:
    """Without a GPU, where callables run as they are."""
    exec(compile(_code_of(DOCS / f"{name}.md"), name, "exec"), {"__name__": name})


def test_the_steps_of_the_how_to_have_graphs_and_train_alike(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = compile(_code_of(DOCS / "how-to" / "graph-a-training-step.md"), "page", "exec")
    found: list[dict[str, Any]] = []
    for graph in (lambda step: step, pygraph.graph):
        monkeypatch.setattr(pygraph, "graph", graph)
        torch.manual_seed(0)
        found.append({"__name__": "page"})
        exec(code, found[-1])
    plain, graphed = (of["model"].state_dict() for of in found)
    assert all(torch.equal(plain[name], graphed[name]) for name in plain)
    assert reason() == ""
    names = {partition.info.name for partition in gradients.all if partition.replays > 0}
    assert names == {
        *("train_step", "amp_step", "accumulated_step", "accumulate", "update", "averaged_step"),
        *("Sequential", "Sequential backward"),
    }
