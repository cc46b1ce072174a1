"""Explanation pages in a real browser: what pointing and the keyboard show, both colour schemes, scripts from right to
left, hundreds of tokens; no error and no request.

Needs selenium, and chromium with its driver: `scripts/browser` installs these, and skips nothing.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import io
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

import maxsim
from maxsim.explaining import page

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
THERE = {"selenium": importlib.util.find_spec("selenium"), "chromium": CHROMIUM, "chromedriver": DRIVER}
MISSING = [name for name, there in THERE.items() if not there]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING) and "MAXSIM_BROWSER" not in os.environ,
        reason=f"no {', '.join(MISSING)}: scripts/browser installs it",
    )
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --window-size=1280,900"
)
BAD = "</script><script>hacked = 1</script><img src=/x.png onerror='hacked = 1'><b>&amp;\"'"
TEXT = "Press the reset button. The device restarts & blinks <twice>."
QUERY = "reset my device"


def words(text):
    return [word.span() for word in re.finditer(r"\w+|[^\w\s]", text)]


def vectors(names, seed=0):
    """A unit vector for each name, and near ones for names that begin alike."""
    found = []
    for name in names:
        noise = torch.Generator().manual_seed(hash_of(name) + seed)
        stem = torch.randn(32, generator=torch.Generator().manual_seed(hash_of(name[:4].lower())))
        found.append(torch.nn.functional.normalize(stem + 0.3 * torch.randn(32, generator=noise), dim=0))
    return torch.stack(found)


def hash_of(name):
    return int.from_bytes(name.encode()[:6], "little")


def explained(query, text, cut=words, **options):
    spans = [cut(each) for each in (query, text)]
    q, d = (vectors([t[a:b] for a, b in each]) for t, each in zip((query, text), spans, strict=True))
    return maxsim.explain(
        q, d, query_text=query, query_tokens=spans[0], document_text=text, document_tokens=spans[1], **options
    )  # fmt: skip


def png(width=640, height=800):
    """A page with black lines."""
    import struct
    import zlib

    rows = b"".join(b"\0" + (b"\0" if y % 80 < 6 else b"\xff") * width for y in range(height))
    parts = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    file = io.BytesIO(b"\x89PNG\r\n\x1a\n")
    file.seek(8)
    for kind, body in parts:
        file.write(struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)))
    return file.getvalue()


class Browser:
    """A page at a time, from a server that remembers what was asked of it."""

    def __init__(self, folder: Path):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        self.folder, self.asked = folder, []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, *_):
                asked.append(self.path)

        self.server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
        )
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in [*FLAGS.split(), f"--user-data-dir={folder / 'profile'}"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def close(self):
        self.driver.quit()
        self.server.shutdown()
        self.server.server_close()

    def open(self, html, scheme="light", size=(1280, 900)):
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.name = f"page-{time.monotonic_ns()}.html"  # none is cached
        (self.folder / self.name).write_text(html, encoding="utf-8")
        self.point_away()
        self.asked.clear()
        self.driver.get_log("performance")
        self.driver.get(f"http://127.0.0.1:{self.server.server_port}/{self.name}")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((x) => x.textContent)", selector)

    def status(self, hit=1):
        return self.find(f"#hit-{hit} .status").text

    def point(self, element, x=0, y=0):
        from selenium.webdriver import ActionChains

        element = self.find(element) if isinstance(element, str) else element
        ActionChains(self.driver, duration=0).move_to_element_with_offset(element, x, y).perform()
        self.settle()

    def point_away(self):
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver, duration=0)
        actions.w3c_actions.pointer_action.move_to_location(1, 1)
        actions.perform()

    def click(self, selector):
        self.find(selector).click()
        self.settle()

    def press(self, *keys):
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.driver, duration=0).send_keys(getattr(Keys, key)).perform()
        self.settle()

    def settle(self):
        """Two frames: what was pointed at is drawn in the next one."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"
        )


@pytest.fixture(scope="module")
def _running(tmp_path_factory):
    assert not MISSING
    running = Browser(tmp_path_factory.mktemp("browser"))
    yield running
    running.close()


@pytest.fixture
def browser(_running):
    """After each test: no console message, no request but for the page itself."""
    import json

    yield _running
    assert _running.driver.get_log("browser") == []
    events = (json.loads(entry["message"])["message"] for entry in _running.driver.get_log("performance"))
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in urls if not url.startswith("data:")} <= {_running.driver.current_url}
    assert set(_running.asked) <= {f"/{_running.name}"}


def test_pointing_at_a_query_token_shows_what_it_matched(browser):
    found = explained(QUERY, TEXT, name="manual.txt")
    browser.open(found.html())
    assert browser.driver.title == "reset my device – what matched"
    assert browser.find("#query").text == QUERY
    assert browser.find(".document").text == TEXT
    assert "brings to the score" in browser.status()
    assert set(browser.texts(".document .t.won")) == {match.document for match in found.matches}
    for match in found.matches:
        browser.point(f'#query [data-t="{match.position}"]')
        assert browser.texts("#query .t.on") == [match.query]
        assert browser.texts(".document .t.on") == [match.document]
        assert browser.find(".document .t.on").get_attribute("data-t") == str(match.index)
        row = " ".join(browser.find("tr.on").text.split())
        share = f"{100 * match.share:.1f} %"
        assert row == f"{match.query} {match.document} {match.similarity:.3f} {share}".replace("-", "−")
        assert (
            browser.status()
            == f"{match.query} → {match.document} {match.similarity:.3f}, {share} of the score".replace("-", "−")
        )
        shades = browser.run(
            "return [...document.querySelectorAll('.document .t')].map((x) => Number(x.style.getPropertyValue('--s')))"
        )
        order = found.similarities[match.position]
        assert shades[match.index] == max(shades)
        assert max(shades) > 0
        for a, b in zip(order.argsort()[:-1].tolist(), order.argsort()[1:].tolist(), strict=True):
            assert shades[a] <= shades[b]
    browser.point("tr[data-q='0']")
    assert browser.texts("#query .t.on") == ["reset"]
    browser.point("h2")
    assert browser.texts(".on") == []


def test_pointing_at_a_document_token_shows_what_matched_it(browser):
    found = explained(QUERY, TEXT)
    browser.open(found.html())
    at = found.matches[2].index
    browser.point(f'.document [data-t="{at}"]')
    assert browser.texts("#query .t.on") == [match.query for match in found.matches if match.index == at]
    assert browser.status().startswith(f"{found.matches[2].document} was matched by ")
    lonely = next(j for j in range(len(found.document)) if j not in found.index)
    browser.point(f'.document [data-t="{lonely}"]')
    assert browser.texts("#query .t.on") == []
    near = found.similarities[:, lonely]
    assert "was matched by no query token; the nearest is " + QUERY.split()[int(near.argmax())] in browser.status()
    assert float(browser.status().split("about ")[1].replace("−", "-")) == pytest.approx(float(near.max()), abs=0.01)


def test_keyboard(browser):
    found = explained(QUERY, TEXT, name="manual.txt")
    browser.open(page([found, found]))
    browser.press("TAB")
    assert browser.texts("#query .t.on") == ["reset"]
    assert browser.run("return document.activeElement.dataset.t") == "0"
    assert browser.find("#said").get_attribute("textContent").startswith("1: reset → reset ")
    browser.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert browser.status(2).startswith("device → device ")
    browser.press("ARROW_RIGHT")  # none behind the last
    assert browser.texts("#query .t.on") == ["device"]
    browser.press("HOME", "ENTER", "END")
    assert browser.texts("#query .t.on") == ["device"]
    browser.press("TAB")  # the button: what was kept shows again
    assert browser.run("return document.activeElement.id") == "all"
    assert browser.texts("#query .t.on") == browser.texts("#query [aria-pressed=true]") == ["reset"]
    browser.press("ESCAPE")
    assert browser.texts(".t.on, .t.kept") == []
    browser.press("TAB", "TAB")  # one stop for all tokens of a document
    first = browser.run("return document.activeElement.textContent")
    assert first == "Press"
    assert "Press was matched by" in browser.status(1)
    browser.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert browser.texts("#query .t.on") == ["reset"]
    assert "brings to the score" in browser.status(2)
    browser.click("#query [data-t='1']")
    browser.point("h2")
    assert browser.texts("#query .t.on") == ["my"]
    browser.click("#all")
    assert browser.texts(".t.on") == []


def test_right_to_left(browser):
    query, text = "إعادة تشغيل الجهاز", "لإعادة تشغيل الجهاز اضغط على زر (reset) لمدة عشر ثوان."

    def cut(t):  # longer words in two
        return [piece for a, b in words(t) for piece in ([(a, a + 3), (a + 3, b)] if b - a > 4 else [(a, b)])]

    browser.open(explained(query, text, cut, name="دليل").html())
    for box in ("#query", ".document"):
        assert browser.run("return getComputedStyle(document.querySelector(arguments[0])).direction", box) == "rtl"
        left = browser.run(
            "return [...document.querySelectorAll(arguments[0] + ' .t')].map((x) => x.getBoundingClientRect().left)",
            box,
        )
        assert left[0] == max(left)
        assert left[0] > left[1] > left[2]
    width = browser.run(
        """const box = document.querySelector("#query"), plain = document.createElement("span");
        const cut = document.createRange();
        cut.selectNodeContents(box);
        const before = cut.getBoundingClientRect().width;
        plain.textContent = box.textContent;
        box.append(plain);
        return [before, plain.getBoundingClientRect().width];"""
    )
    assert width[0] == pytest.approx(width[1], abs=1)  # letters stay joined where tokens end
    browser.press("TAB", "ARROW_LEFT")
    assert browser.run("return document.activeElement.dataset.t") == "1"
    browser.press("ARROW_RIGHT")
    assert browser.run("return document.activeElement.dataset.t") == "0"
    assert browser.texts("tr.on th bdi") == ["إعادة"]


def contrast(browser, selector):
    """Of a text on what is behind it, by WCAG 2.2's formula; colours are blended over their parents'."""
    layers = browser.run(
        """const found = [], element = document.querySelector(arguments[0]);
        for (let x = element; x; x = x.parentElement) found.push(getComputedStyle(x).backgroundColor);
        return [getComputedStyle(element).color, ...found].map((c) => c.match(/[\\d.]+/g).map(Number));""",
        selector,
    )

    def over(color, below):
        alpha = color[3] if len(color) > 3 else 1
        return [alpha * a + (1 - alpha) * b for a, b in zip(color[:3], below, strict=True)]

    behind = [255.0] * 3
    for layer in reversed(layers[1:]):
        behind = over(layer, behind)

    def light(color):
        parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    high, low = sorted((light(over(layers[0], behind)), light(behind)), reverse=True)
    return (high + 0.05) / (low + 0.05), light(behind)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(browser, scheme):
    browser.open(explained(QUERY, TEXT, name="a", notes=["A note."]).html(), scheme)
    browser.point('#query [data-t="0"]')
    strongest = browser.find(".document .t.on").get_attribute("data-t")
    for selector in (
        f'.document [data-t="{strongest}"]', "#query .t.on", ".document .t", ".status", ".note", "h2", ".caption",
        ".score span", "tr.on td", "thead th", ".legend", "tr:not(.on) .n",
    ):  # fmt: skip
        ratio, behind = contrast(browser, selector)
        assert ratio >= 4.5, (selector, ratio)
        assert (behind < 0.3) == (scheme == "dark") or selector.startswith(f'.document [data-t="{strongest}"'), selector


def test_html_in_texts_is_text(browser):
    found = explained(BAD, BAD + " " + TEXT, name=BAD, notes=[BAD])
    browser.open(found.html())
    assert browser.find("#query").text == BAD
    assert browser.find("h2").text == browser.find(".note").text == BAD
    assert browser.find(".document").text.startswith(BAD)
    browser.point('#query [data-t="1"]')
    assert browser.status().startswith("/ → /") or " → " in browser.status()
    assert browser.run("return typeof hacked") == "undefined"
    assert browser.all("img, h2 b, .note b, .note script") == []


def test_page_images(browser):
    tokens = torch.nn.functional.normalize(torch.randn(1030, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    names = ["[CLS]", "rev", "##enue", "today"]
    query = tokens[[5, 400, 1023, 1028]]
    options = {"query_tokens": names, "patches": (32, 32), "document_tokens": ["image"] * 1024 + list("abcdef")}
    found = maxsim.explain(query, tokens, image=png(), **options)
    assert found.index.tolist() == [5, 400, 1023, 1028]
    browser.open(page([found, maxsim.explain(query, tokens, **options)]))
    assert browser.texts("#hit-1 .others .t") == list("abcdef")
    alpha = """const canvas = document.querySelector(`#hit-${arguments[0]} canvas`);
        const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height });
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
        return [...data].filter((_, n) => n % 4 === 3);"""
    assert browser.run("const x = document.querySelector('#hit-1 img'); return [x.naturalWidth, x.complete]") == [
        640,
        True,
    ]
    largest = found.similarities.amax(0)[:1024]
    everything = torch.tensor(browser.run(alpha, 1), dtype=torch.float64)
    assert everything.argmax() == largest.argmax()
    assert len(browser.all("#hit-1 .marks i")) == 3
    box = browser.find("#hit-1 canvas").rect
    assert box == browser.find("#hit-1 img").rect
    for i, place in enumerate(("row 1, column 6", "row 13, column 17", "row 32, column 32")):
        browser.point(f'#query [data-t="{i}"]')
        assert f"→ {place} 1.000" in browser.status(1)
        for hit in (1, 2):
            shown = torch.tensor(browser.run(alpha, hit))
            assert shown.argmax() == found.index[i]
            (mark,) = browser.all(f"#hit-{hit} .marks i.on")
            frame, at = browser.find(f"#hit-{hit} canvas").rect, int(found.index[i])
            assert mark.rect["x"] == pytest.approx(frame["x"] + at % 32 * frame["width"] / 32, abs=1.5)
            assert mark.rect["y"] == pytest.approx(frame["y"] + at // 32 * frame["height"] / 32, abs=1.5)
    browser.point('#query [data-t="3"]')
    assert "today → e 1.000" in browser.status()
    assert browser.texts("#hit-1 .others .t.on") == ["e"]
    canvas = browser.find("#hit-1 .frame")
    dx, dy = ((column + 0.5) / 32 - 0.5 for column in (16, 12))
    browser.point(canvas, int(dx * box["width"]), int(dy * box["height"]))
    assert browser.status().startswith("row 13, column 17 was matched by rev 1.000")
    assert browser.texts("#query .t.on") == ["rev"]
    browser.point("h2")
    browser.run("document.querySelector('#own').focus()")
    browser.press("TAB")
    assert browser.run("return document.activeElement.className") == "frame"
    browser.press("ARROW_RIGHT", "ARROW_DOWN", "ARROW_UP")
    assert browser.status().startswith("row 13, column 18 was matched by no query token")
    browser.press("ENTER", "ESCAPE")
    assert "largest similarity" in browser.status()


def test_patches_of_several_sizes(browser):
    patches = [[0, 0, 1, -1], [0, 0, 2, 2]]
    found = maxsim.explain(torch.eye(3), torch.eye(3), patches=patches, image=png(400, 200))
    browser.open(found.html())
    frame = browser.find(".frame canvas").rect
    for i, (x, y, width, height) in enumerate([(0, 0, 0.5, 1), (0.5, 0, 0.25, 0.5), (0.5, 0.5, 0.5, 0.5)]):
        browser.point(f'#query [data-t="{i}"]')
        (mark,) = browser.all(".marks i")
        place = [mark.rect["x"] - frame["x"], mark.rect["y"] - frame["y"], mark.rect["width"], mark.rect["height"]]
        expected = [x * frame["width"], y * frame["height"], width * frame["width"], height * frame["height"]]
        assert place == pytest.approx(expected, abs=1.5)
    browser.run("document.querySelector('#own').focus()")
    browser.press("TAB")
    assert browser.status().startswith("row 1, column 1 was matched by #0 1.000")
    browser.press("ARROW_RIGHT")
    assert browser.status().startswith("row 1, column 3 was matched by #1")
    browser.press("ARROW_DOWN")
    assert browser.status().startswith("row 2, column 3 was matched by #2")


def test_hundreds_of_tokens(browser):
    """300 query tokens and five pages of 1,030 patches or words, some masked."""
    generator = torch.Generator().manual_seed(0)
    query, masked = torch.randn(300, 32, generator=generator), torch.rand(300, generator=generator) < 0.1
    hits = []
    for n in range(5):
        tokens, keep = torch.randn(1030, 32, generator=generator), torch.rand(1030, generator=generator) > 0.1
        more = {"patches": (32, 32)} if n % 2 else {"document_tokens": [f"word{j}" for j in range(1030)]}
        zero = "zero" if n == 2 else "exclude"
        hits.append(
            maxsim.explain(query, tokens, ~masked, keep, zero, query_tokens=[f"q{i}" for i in range(300)], **more)
        )
    browser.open(page(hits))
    elements = browser.run("return document.querySelectorAll('*').length")
    assert elements < 20 * (300 + 5 * (300 + 1030))  # of tokens, never of their pairs
    assert len(browser.all("#query .t.masked")) == int(masked.sum())
    at = int((~masked).nonzero()[-1])
    browser.run("document.querySelector(`#query [data-t='${arguments[0]}']`).scrollIntoView()", at)
    browser.point(f'#query [data-t="{at}"]')
    for n, hit in enumerate(hits, 1):
        match = hit.matches[at]
        assert f"{match.similarity:.3f}" in browser.status(n)
        row, table = browser.find(f"#hit-{n} tr.on").rect, browser.find(f"#hit-{n} .table").rect
        assert table["y"] <= row["y"] + 1 <= row["y"] + row["height"] <= table["y"] + table["height"] + 2
    cell, box = browser.find("#hit-1 .document .t.on").rect, browser.find("#hit-1 .document").rect
    assert box["y"] <= cell["y"] + 1 <= cell["y"] + cell["height"] <= box["y"] + box["height"] + 1
    browser.point(f'#query [data-t="{int(masked.nonzero()[0])}"]')
    assert browser.status(1).endswith("is masked")


def test_odd_documents(browser):
    query, tokens = torch.randn(3, 8), torch.randn(6, 8)
    none = torch.zeros(6, dtype=torch.bool)
    broken = tokens.clone()
    broken[2] = float("nan")
    browser.open(
        page(
            [
                maxsim.explain(query, tokens[:0], name="empty"),
                maxsim.explain(query, tokens, document_mask=none, name="masked"),
                maxsim.explain(query, tokens, document_mask=none, masked="zero", name="zero"),
                maxsim.explain(query, broken, name="nan"),
                maxsim.explain(query, -10 * query.mean(0, keepdim=True), name="negative"),
                maxsim.explain(query, tokens, name=7, normalize=True),
            ]
        )
    )
    browser.point('#query [data-t="1"]')
    shown = [browser.status(n) for n in range(1, 7)]
    assert shown[:4] == ["#1 → nothing −∞", "#1 → nothing −∞", "#1 → a masked token 0.000", "#1 → #2 NaN"]
    assert all(text.startswith("#1 → #") for text in shown[4:])
    assert browser.texts("#hit-6 h2 bdi") == ["7"]
    browser.open(maxsim.explain(query[:0], tokens).html())
    assert "No query token is kept." in browser.texts(".note")


def test_a_narrow_window(browser):
    browser.open(explained(QUERY, TEXT * 5, name="n" * 200).html(), size=(380, 700))
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
