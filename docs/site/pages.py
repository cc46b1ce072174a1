"""What the site is built of: docs/ with drawings inline, plots of the records, the examples, the navigation."""

from __future__ import annotations

import re
import shutil
from html import escape
from pathlib import Path

import commands
import plots
import tables

IMAGE = re.compile(r"^!\[([^\]]+)\]\(((?:drawings|plots)/[\w-]+\.svg)\)$", re.MULTILINE)
COMMANDS = "<!-- commands -->"
TABLE = re.compile(r"^<!-- table: ([\w-]+) -->$", re.MULTILINE)
ENTRY = re.compile(r"^ +- (?:[^:\n]+: )?([\w/-]+\.md)\n", re.MULTILINE)


def stage(root: Path, built: Path) -> list[str]:
    """Makes `built`/mkdocs.yml and `built`/pages, and says what is wrong, a line each."""
    shutil.rmtree(built, ignore_errors=True)
    copied = built / "pages"
    shutil.copytree(root / "docs", copied, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    records = root / "benchmarks" / "records"
    plots.draw(records, copied / "plots")
    (copied / "examples.md").write_text(_examples(root / "examples"))
    here = {path.relative_to(copied).as_posix(): path for path in sorted(copied.rglob("*.md"))}
    found = []
    for name, path in here.items():
        text = path.read_text()
        missing = [image for _, image in IMAGE.findall(text) if not (path.parent / image).exists()]
        found += [f"{name}: no such drawing: {image}" for image in missing]
        if not missing:
            folder = path.parent
            text = IMAGE.sub(lambda match, folder=folder: _inline(folder / match[2], match[1]), text)
        if COMMANDS in text:
            text = text.replace(COMMANDS, commands.described())
        path.write_text(TABLE.sub(lambda match: tables.table(match[1], records), text))
    config = (root / "mkdocs.yml").read_text()
    listed = ENTRY.findall(config)
    found += [f"{name} is not in the navigation of mkdocs.yml" for name in here if name not in listed]
    config = ENTRY.sub(lambda match: match[0] if match[1] in here else "", config)
    (built / "mkdocs.yml").write_text(config)
    return found


def _examples(folder: Path) -> str:
    """Their README, with the scripts that it links below it."""
    text = (folder / "README.md").read_text()
    names = list(dict.fromkeys(re.findall(r"\]\(([\w-]+)\.py\)", text)))
    text = re.sub(r"\]\(([\w-]+)\.py\)", lambda match: f"](#{match[1]}py)", text)
    return text + "".join(
        f"\n## {name}.py\n\n```python\n{(folder / name).with_suffix('.py').read_text()}```\n" for name in names
    )


def _inline(drawing: Path, text: str) -> str:
    """A drawing as part of its page, whose colours it then has; blank lines would end it."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->", "", drawing.read_text(), flags=re.DOTALL)
    svg = "\n".join(line for line in svg.splitlines() if line.strip())
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(text, quote=True)}"', 1)
    return f"<figure>\n{svg}\n</figure>"
