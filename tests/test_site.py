"""What the build of the documentation site refuses."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SITE = Path(__file__).resolve().parents[1] / "docs" / "site"


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    for package in ("griffe", "matplotlib"):
        pytest.importorskip(package, reason="needs what builds the documentation: pip install .[docs]")
    monkeypatch.syspath_prepend(str(SITE))
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return importlib.import_module(request.param)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("room", ["links"], indirect=True)
@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ('<a href="b/">there</a> <a href="b/#here">and there</a> <a href="https://arxiv.org/abs/1">out</a>', None),
        ('<a href="c/">nowhere</a>', "a link that leads nowhere: c/"),
        ('<a href="b/#gone">no anchor</a>', "an anchor that is not there: b/#gone"),
        ('<script src="https://x.org/a.js"></script>', "loaded from elsewhere: https://x.org/a.js"),
        ('<img src="gone.svg">', "a link that leads nowhere: gone.svg"),
        ("see [maxsim.nothing][]", "a reference that leads nowhere: [maxsim.nothing][]"),
        ("<code>[maxsim.nothing][]</code>", None),
    ],
)
def test_links(room: ModuleType, tmp_path: Path, body: str, wrong: str | None) -> None:
    write(tmp_path, {"index.html": f"<p>{body}</p>", "b/index.html": '<h2 id="here">b</h2>'})
    assert room.problems(tmp_path) == ([f"index.html: {wrong}"] if wrong else [])


@pytest.mark.parametrize("room", ["links"], indirect=True)
def test_fonts_from_elsewhere(room: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, {"a.css": "@font-face { src: url(https://fonts.org/x.woff2) }", "b.css": "a { color: red }"})
    assert room.problems(tmp_path) == ["a.css: loads something from elsewhere"]


PACKAGE = {
    "maxsim/__init__.py": '__all__ = ["known", "hidden"]\n\n\ndef known():\n    """Known."""\n\n\ndef hidden(): ...\n',
    "maxsim/distributed/__init__.py": "__all__ = []\n",
    "maxsim/integrations/__init__.py": "__all__ = []\n",
}


@pytest.mark.parametrize("room", ["docstrings"], indirect=True)
def test_docstrings(room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", ())
    write(tmp_path / "src", PACKAGE)
    write(tmp_path / "api", {"a.md": "::: maxsim.known\n"})
    assert room.problems(tmp_path / "src", tmp_path / "api") == ["maxsim.hidden is on no page of the reference"]
    write(tmp_path / "api", {"a.md": "::: maxsim.known\n::: maxsim.hidden\n"})
    assert room.problems(tmp_path / "src", tmp_path / "api") == ["maxsim.hidden has no docstring"]
    write(tmp_path / "api", {"a.md": "::: maxsim.known\n::: maxsim.hidden\n::: maxsim.gone\n"})
    assert room.problems(tmp_path / "src", tmp_path / "api")[1:] == [
        "maxsim.gone, on a page of the reference, is not there"
    ]


@pytest.mark.parametrize("room", ["docstrings"], indirect=True)
def test_a_docstring_that_does_not_parse(room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", ())
    docstring = '"""Known.\n\n    Raises:\n        as others.\n    """'
    unclear = PACKAGE["maxsim/__init__.py"].replace('"""Known."""', docstring)
    write(tmp_path / "src", PACKAGE | {"maxsim/__init__.py": unclear.replace(', "hidden"', "")})
    write(tmp_path / "api", {"a.md": "::: maxsim.known\n"})
    (said,) = room.problems(tmp_path / "src", tmp_path / "api")
    assert "Failed to get 'exception: description' pair from 'as others.'" in said


@pytest.mark.parametrize("room", ["docstrings"], indirect=True)
def test_a_parameter_without_a_word(room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "WHOLE", ())
    package = PACKAGE["maxsim/__init__.py"].replace("known():", "known(a, b, c, d, e):").replace(', "hidden"', "")
    package = package.replace("Known.", "Known, of `b`.\n\n    Args:\n        a, e: numbers.\n    ")
    write(tmp_path / "src", PACKAGE | {"maxsim/__init__.py": package})
    write(tmp_path / "api", {"a.md": "::: maxsim.known\n"})
    assert room.problems(tmp_path / "src", tmp_path / "api") == ["maxsim.known does not say what is c, d"]


@pytest.mark.parametrize("room", ["tables"], indirect=True)
def test_tables_say_what_the_records_say(room: ModuleType) -> None:
    records = SITE.parents[1] / "benchmarks" / "records"
    made = {name: room.table(name, records).splitlines() for name in room.TABLES}
    assert all(len({line.count("|") for line in lines if line.startswith("|")}) == 1 for lines in made.values())
    (memory,) = [line for line in made["step"] if line.startswith("| 2,048 ×")]
    assert memory.count("out of memory") == 2
    assert any("wrong scores" in line for line in made["cpu"])


@pytest.mark.parametrize("room", ["commands"], indirect=True)
def test_every_command_and_option_is_described(room: ModuleType) -> None:
    text = room.described()
    for expected in ("## search", "$ maxsim search CORPUS [QUERY...] [options]", "| `--filter` | Only", "--contenders"):
        assert expected in text
    assert not [line for line in text.splitlines() if line.startswith("| ") and line.endswith("|  |")]


@pytest.mark.parametrize("room", ["pages"], indirect=True)
def test_pages(room: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.plots, "draw", lambda records, folder: folder.mkdir())
    write(
        tmp_path,
        {
            "docs/index.md": "# Home\n\n![A square](drawings/a.svg)\n",
            "docs/lost.md": "# Lost\n\n![Nothing](drawings/b.svg)\n",
            "docs/drawings/a.svg": '<?xml version="1.0"?>\n<svg>\n\n<rect/>\n</svg>\n',
            "examples/README.md": "# Examples\n\n[one.py](one.py)\n",
            "examples/one.py": "print(1)\n",
            "mkdocs.yml": "nav:\n  - index.md\n  - examples.md\n  - Later: later.md\n",
        },
    )
    found = room.stage(tmp_path, tmp_path / "built")
    assert found == ["lost.md: no such drawing: drawings/b.svg", "lost.md is not in the navigation of mkdocs.yml"]
    assert (tmp_path / "built" / "mkdocs.yml").read_text() == "nav:\n  - index.md\n  - examples.md\n"
    shown = (tmp_path / "built" / "pages" / "examples.md").read_text()
    assert shown == "# Examples\n\n[one.py](#onepy)\n\n## one.py\n\n```python\nprint(1)\n```\n"
    page = (tmp_path / "built" / "pages" / "index.md").read_text()
    assert '<figure>\n<svg role="img" aria-label="A square">\n<rect/>\n</svg>\n</figure>' in page
