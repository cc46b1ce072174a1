"""Whether built pages hold together: links and anchors lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
    "use": "href",
    "image": "href",
}
ELSEWHERE = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"](?:https?:)?//")


class _Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := given.get(name)))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if given.get(LOADS.get(tag, "")):
            self.loads.append(given[LOADS[tag]] or "")
        self._code += tag in ("code", "pre", "script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


def problems(site: Path) -> list[str]:
    """What is wrong with the pages in a folder, a line each."""
    site = site.resolve()
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        if name.name == "404.html":  # its links are absolute: it is shown for any address
            continue
        for link in dict.fromkeys([*page.links, *page.loads]):
            found += [f"{name}: {why}: {link}" for why in _wrong(link, path, site, pages, link in page.loads)]
        found += [f"{name}: a reference that leads nowhere: {each}" for each in _unresolved(page)]
    for path in sorted(site.rglob("*.css")):
        if ELSEWHERE.search(path.read_text()):
            found.append(f"{path.relative_to(site)}: loads something from elsewhere")
    return found


def _wrong(link: str, page: Path, site: Path, pages: dict[Path, _Page], loaded: bool) -> list[str]:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return []
    if parts.scheme or parts.netloc:
        return ["loaded from elsewhere"] if loaded else []
    target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.exists():
        return ["a link that leads nowhere"]
    fragment = unquote(parts.fragment)
    if fragment and target in pages and fragment not in pages[target].anchors and not fragment.startswith("__"):
        return ["an anchor that is not there"]
    return []


def _unresolved(page: _Page) -> list[str]:
    return re.findall(r"\[[^\[\]\n]+\]\[[\w.]*\]", "".join(page.text))
