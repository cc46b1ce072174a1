"""The code of README.md and docs/ runs, and prints what the pages show.

The ```python blocks of a page run one after another in one namespace, in an empty folder. A ```text block right after
one is what it prints; "..." in it stands for anything. A comment before a block makes an exception:
    <!-- needs: gpu -->             runs where there is a CUDA GPU
    <!-- needs: pylate>=1.5.1 -->   runs where the package is installed
    <!-- not run: why -->           does not run, but must parse
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.requirements import Requirement

import maxsim

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# their pages run in environments of their own too, which `scripts/hosts` makes and where it runs what is slow
FRAMEWORKS = ("colpali", "mteb", "pylate", "sentence-transformers")
BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>needs|not run): (?P<what>[^\n]+) -->\n)?"
    r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```$\n"
    r"(?:\n*^(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    line: int
    code: str
    output: str | None
    kind: str | None
    what: str

    @property
    def runs(self) -> bool:
        if self.kind == "needs":
            return torch.cuda.is_available() if self.what == "gpu" else installed(Requirement(self.what))
        return self.kind is None


def installed(wanted: Requirement) -> bool:
    try:
        return metadata.version(wanted.name) in wanted.specifier
    except metadata.PackageNotFoundError:
        return False


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        code, output = (
            None if part is None else re.sub(f"^{match['indent']}", "", part, flags=re.MULTILINE)
            for part in (match["code"], match["output"])
        )
        assert code is not None
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(line, code, output, match["kind"], match["what"] or ""))
    return found


def parameters() -> list[object]:
    # what frameworks warn of is not ours
    marks = dict.fromkeys(FRAMEWORKS, (pytest.mark.slow, pytest.mark.filterwarnings("default")))
    with_code = [page for page in PAGES if blocks(page.read_text())]
    return [pytest.param(page, id=page.stem, marks=marks.get(page.stem, ())) for page in with_code]


@pytest.fixture
def _switched_back() -> Iterator[None]:
    yield
    for name in maxsim.integrations.FRAMEWORKS:
        getattr(maxsim.integrations, name).disable()


@pytest.mark.usefixtures("_switched_back")
@pytest.mark.parametrize("page", parameters())
def test_code_of_a_page_runs_and_prints_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page.read_text()):
        # as many empty lines as come before it, so that a traceback says the page's own line
        compiled = compile("\n" * block.line + block.code, str(page), "exec")
        if not block.runs:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compiled, names)
        if block.output is not None:
            same = doctest.OutputChecker().check_output(block.output, printed.getvalue(), doctest.ELLIPSIS)
            assert same, f"{page.name}:{block.line} prints\n{printed.getvalue()}\nand shows\n{block.output}"


def test_every_text_block_belongs_to_code() -> None:
    for page in PAGES:
        text = page.read_text()
        shown = [block.output for block in blocks(text) if block.output is not None]
        assert len(re.findall(r"^ *```text$", text, re.MULTILINE)) == len(shown), page


def test_wrong_output_is_seen(tmp_path: Path) -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n"
    (block,) = blocks(page)
    assert (block.code, block.output, block.line) == ("print(1 + 1)\n", "2\n", 1)
    marked = "<!-- not run: no model here -->\n" + page
    assert [(each.kind, each.what, each.runs) for each in blocks(marked)] == [("not run", "no model here", False)]


FIGURE = re.compile(r"^<!-- figure: (\S+) = (\S+) (\S+) (\S+) (\S+)(?: / (\S+))? -->$", re.MULTILINE)


def test_figures_of_the_reproduction_are_those_of_the_records() -> None:
    """`<!-- figure: 4.72 = RECORD CASE KEY CONTENDER / CONTENDER -->`: what the page says is what the record has."""
    page = (ROOT / "docs" / "reproduction.md").read_text()
    figures = FIGURE.findall(page)
    assert len(figures) == page.count("<!-- figure:")
    said = FIGURE.sub("", page)
    for shown, record, case, key, *contenders in figures:
        lines = (ROOT / "benchmarks" / "records" / f"{record}.jsonl").read_text().splitlines()
        rows = {
            row["contender"]: row[key]
            for row in map(json.loads, lines)
            if case in (row.get("case"), row.get("collection"))
        }
        value = rows[contenders[0]] / (rows[contenders[1]] if contenders[1] else 1)
        decimals = len(shown.partition(".")[2])
        assert f"{value:,.{decimals}f}" == shown, (shown, record, case, key, value)
        assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d])", said), f"{shown} is not on the page"
