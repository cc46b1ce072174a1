"""`python docs/site`: builds the documentation site in .site/html, without network, and strictly.

Zensical, the successor of Material for MkDocs by the same people, makes pages of a copy of docs/ in .site/pages, where
plots of the benchmarks' records are added and drawings stand inline, so that they follow the page's colours. Errors:
public names without a docstring or without a place in the reference, docstrings that do not parse, links, anchors and
references that lead nowhere, pages that the navigation does not have, and whatever a page would load from elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import docstrings
import links
import pages

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    built = ROOT / ".site"
    wrong = docstrings.problems(ROOT / "src", ROOT / "docs" / "api")
    wrong += pages.stage(ROOT, built)
    report(wrong)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "mkdocs.yml"]
    if subprocess.run(command, cwd=built, env=environment).returncode:
        return 1
    report(links.problems(built / "html"))
    print(f"docs: {built / 'html' / 'index.html'}; to read and search them: python -m http.server -d .site/html")
    return 0


def report(problems: list[str]) -> None:
    if problems:
        sys.exit("\n".join(f"docs: {problem}" for problem in problems))


if __name__ == "__main__":
    sys.exit(main())
