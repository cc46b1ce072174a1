"""Page images: PDF pages are rendered, cut into patches and searched by typed words; a heat map shows what matched.

Needs: pip install '.[pages]', and --no-deps rapidocr-onnxruntime==1.4.4, for its model. And a PDF with bookmarks:
`make pages` takes the Debian Developer's Reference where there is apt; any other is named by `--pdf`.
Takes: half a minute on two cores for 16 pages.

Patches are columns of text lines, embedded by a text recogniser (PP-OCRv4) before it decides on characters: 120 numbers
for every few points of a line, a stand-in for a model of page images such as ColPali. No text is read, neither from the
PDF nor by the recogniser: a typed query is drawn, embedded in the same way and compared with all patches of all pages.
Bookmarks are the queries, the pages that they lead to the judgements. The promise: late interaction ranks pages better
than one mean vector a page does. The best page's heat map is .demo/heat-map.html, to be opened in a browser.

    python examples/pages.py --pdf manual.pdf --pages 40
    python examples/pages.py --pdf manual.pdf --ask "how to orphan a package"
"""

from __future__ import annotations

import argparse
import math
import sys
from bisect import bisect
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pypdfium2
import torch
from judged_texts import package, quality
from PIL import Image, ImageDraw, ImageFont

import maxsim
from maxsim.progress import track

FOLDER = Path(__file__).resolve().parent.parent / ".demo"
SCALE = 2.5  # pixels a point
HEIGHT = 48  # of a line as the recogniser takes it, pixels
NARROW = 0.35  # of a line's natural width: fewer patches, and faster
STRIDE = 8  # pixels of a line a patch
CELL = 5  # pixels: in such squares the heat map is told where patches are

Box = tuple[int, int, int, int]  # left, upper, right, lower


class Page(NamedTuple):
    """Patches of an image: float32 `[T, 120]` of unit length, and the box of each."""

    image: Image.Image
    patches: torch.Tensor
    boxes: list[Box]


class Query(NamedTuple):
    """Patches of drawn words, and the characters behind each."""

    text: str
    patches: torch.Tensor
    spans: list[tuple[int, int]]


class Recogniser:
    """The text recogniser up to its last layer but one."""

    def __init__(self) -> None:
        path = package("rapidocr_onnxruntime", "1.4.4") / "models" / "ch_PP-OCRv4_rec_infer.onnx"
        model = onnx.load(path)
        last = [node for node in model.graph.node if node.op_type == "MatMul"][-1]  # columns → characters
        self.output, self.input = last.input[0], model.graph.input[0].name
        model.graph.output.append(onnx.ValueInfoProto(name=self.output))
        self.session = onnxruntime.InferenceSession(model.SerializeToString())

    def page(self, image: Image.Image) -> Page:
        """The patches of all lines of a greyscale image."""
        found, boxes = [torch.empty(0, 120)], list[Box]()
        for left, upper, right, lower in lines(image):
            columns = max(1, round((right - left) / (lower - upper) * HEIGHT * NARROW / STRIDE))
            line = image.crop((left, upper, right, lower)).resize((columns * STRIDE, HEIGHT), Image.Resampling.BICUBIC)
            pixels = np.asarray(line, dtype=np.float32) / 127.5 - 1
            [rows] = self.session.run([self.output], {self.input: np.stack([pixels] * 3)[None]})
            found.append(torch.from_numpy(rows[0]))
            edges = np.linspace(left, right, len(rows[0]) + 1).round().astype(int).tolist()
            boxes += [(a, upper, b, lower) for a, b in pairwise(edges)]
        return Page(image, torch.nn.functional.normalize(torch.cat(found), dim=-1), boxes)

    def query(self, text: str) -> Query:
        """The patches of typed words, drawn in one line."""
        font = ImageFont.load_default(size=10 * SCALE)
        image = Image.new("L", (round(font.getlength(text)) + 40, round(30 * SCALE)), 255)
        ImageDraw.Draw(image).text((20, 20), text, fill=0, font=font)
        drawn = self.page(image)
        ends = [20 + font.getlength(text[: n + 1]) for n in range(len(text))]
        last = len(text) - 1
        spans = [(min(bisect(ends, a), last), min(bisect(ends, b), last) + 1) for a, _, b, _ in drawn.boxes]
        return Query(text, drawn.patches, spans)


def lines(image: Image.Image) -> list[Box]:
    """Where the lines of text are: rows with ink between rows without (a frame at the sides is little ink)."""
    ink = np.asarray(image) < 160
    inked = ink.sum(1) > 0.004 * image.width
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inked, [False]])))
    found = []
    for upper, lower in edges.reshape(-1, 2).tolist():
        if lower - upper > 3 * SCALE:  # else a rule
            columns = np.flatnonzero(ink[upper:lower].any(0))
            around = (lower - upper) // 8
            found.append((columns[0] - around, upper - around, columns[-1] + around, lower + around))
    return found


def centred(items: Sequence[torch.Tensor], centre: torch.Tensor) -> list[torch.Tensor]:
    """Unit vectors without what they all have in common, which here is most of them."""
    return [torch.nn.functional.normalize(item - centre, dim=-1) for item in items]


def by_means(queries: Sequence[torch.Tensor], pages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scores by one vector a page, for comparison, `[NQ, ND]`."""
    mean_of = [
        torch.stack([torch.nn.functional.normalize(x.sum(0), dim=-1) for x in side]) for side in (queries, pages)
    ]
    return mean_of[0] @ mean_of[1].T


def heat_map(page: Page, query: Query, place: str) -> maxsim.Explanation:
    """The page under its patches, each a token of the document."""
    table = torch.full((math.ceil(page.image.height / CELL), math.ceil(page.image.width / CELL)), -1)
    for n, (left, upper, right, lower) in enumerate(page.boxes):
        table[max(upper, 0) // CELL : lower // CELL, max(left, 0) // CELL : right // CELL] = n
    return maxsim.explain(
        query.patches,
        page.patches,
        query_text=query.text,
        query_tokens=query.spans,
        image=page.image,
        patches=table,
        name=place,
    )


def rendered(path: Path, count: int) -> tuple[list[Image.Image], int, dict[str, set[int]]]:
    """Images of pages, from the first bookmark on; that page's number; for each bookmark the images it leads to."""
    with pypdfium2.PdfDocument(path) as pdf:
        marks = [(mark.get_title().strip(), mark.get_dest()) for mark in pdf.get_toc()]
        places = [(title, place.get_index()) for title, place in marks if title and place]
        if not places:
            sys.exit(f"{path} has no bookmarks to judge a ranking by")
        first = min(number for _, number in places)
        numbers = range(first, min(first + count, len(pdf)))
        images = [pdf[number].render(scale=SCALE, grayscale=True).to_pil() for number in numbers]
    relevant: dict[str, set[int]] = {}
    for title, number in places:
        if number in numbers:
            relevant.setdefault(title, set()).add(number - first)
    return images, first, relevant


def main() -> None:
    parser = argparse.ArgumentParser(description="Searches images of PDF pages.")
    parser.add_argument("--pdf", type=Path, default=FOLDER / "developers-reference.pdf", help="with bookmarks")
    parser.add_argument("--pages", type=int, default=16, help="how many, from the first bookmark's on (16)")
    parser.add_argument("--ask", help="words to look for, in place of a bookmark")
    parser.add_argument("--out", type=Path, default=FOLDER / "heat-map.html", help="where the heat map is written")
    chosen = parser.parse_args()
    if not chosen.pdf.exists():
        sys.exit(f"no {chosen.pdf}: `make pages` fetches it where there is apt; --pdf takes any other with bookmarks")
    images, first, relevant = rendered(chosen.pdf, chosen.pages)
    titles, judged = list(relevant), list(relevant.values())

    recogniser, pages = Recogniser(), []
    with track("embedding pages", len(images)) as progress:
        for image in images:
            pages.append(recogniser.page(image))
            progress(1)
    centre = torch.cat([page.patches for page in pages]).mean(0)
    documents = centred([page.patches for page in pages], centre)
    asked = [recogniser.query(title) for title in titles]
    queries = centred([each.patches for each in asked], centre)
    late, pooled = (
        quality(scores.argsort(dim=1, descending=True, stable=True).tolist(), judged)[0]
        for scores in (maxsim.score(queries, documents), by_means(queries, documents))
    )
    print(
        f"{chosen.pdf.name}: {len(pages)} pages, {sum(map(len, documents)) / len(pages):.0f} patches a page, ", end=""
    )
    print(f"{len(titles)} bookmarks as queries\n")
    print("                   nDCG@10")
    print(f"late interaction     {late:.3f}")
    print(f"one mean vector      {pooled:.3f}")

    if chosen.ask:
        query = recogniser.query(chosen.ask)
        query = query._replace(patches=centred([query.patches], centre)[0])
    else:  # of the bookmarks that found their page, the one whose words are most like what matched them
        best = maxsim.topk(queries, documents, 1)
        found = [hit in each for [hit], each in zip(best.indices.tolist(), judged, strict=True)]
        like = best.scores[:, 0] / torch.tensor([len(each) for each in queries])
        n = int(like.where(torch.tensor(found), -torch.inf).argmax())
        query = asked[n]._replace(patches=queries[n])
    best = maxsim.topk(query.patches, documents, 3)
    hits = [
        (score, hit) for score, hit in zip(best.scores[0].tolist(), best.indices[0].tolist(), strict=True) if hit >= 0
    ]
    if not hits:
        sys.exit("nothing to look for, or nothing to look at")
    print(f"\n  {query.text}")
    for score, hit in hits:
        print(f"    {score:.3f}  page {first + hit + 1}")
    hit = hits[0][1]
    place = f"{chosen.pdf.name}, page {first + hit + 1}"
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    heat_map(pages[hit]._replace(patches=documents[hit]), query, place).save(chosen.out)
    print(f"\nwhat matched on page {first + hit + 1}, to look at in a browser: {chosen.out}")
    if late <= pooled:
        sys.exit("late interaction did not rank pages better than mean vectors")


if __name__ == "__main__":
    main()
