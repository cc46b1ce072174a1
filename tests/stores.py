"""For the tests of the store: embeddings of small whole numbers, exact in every dtype, and search by the definition."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from maxsim.corpus import adding, segments


def document(seed: int, length: int, dim: int = 8) -> torch.Tensor:
    """float32 [length, dim] of whole numbers from −2 to 2: many equal scores, each of them exact."""
    rng = random.Random(seed)
    return torch.tensor([[rng.randint(-2, 2) for _ in range(dim)] for _ in range(length)]).float().reshape(length, dim)


def ranking(query: torch.Tensor, documents: Mapping[str | int, torch.Tensor]) -> list[tuple[str | int, float]]:
    """Every hit by the definition: documents in the order of adding, a stable sort by score."""
    q, hits = query.tolist(), []
    for id, tokens in documents.items():
        d = tokens.tolist()
        if q and d:
            score = sum(max(sum(x * y for x, y in zip(a, b, strict=True)) for b in d) for a in q)
            hits.append((id, float(score)))
    return sorted(hits, key=lambda hit: -hit[1])


def fill(corpus, lengths: Sequence[int], prefix: str = "d") -> dict[str | int, torch.Tensor]:
    """Adds documents of these lengths in one call; returns what was added."""
    documents = {f"{prefix}{i}": document(1000 + i, length, corpus.dim) for i, length in enumerate(lengths)}
    corpus.add(list(documents), list(documents.values()), texts=[f"text of {id}" for id in documents])
    return documents


def stopped_at(monkeypatch, count: int, error: BaseException) -> None:
    """The segment of that number, from now on, is not written any more."""
    calls, real = [], segments.write_segment

    def write_segment(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(adding, "write_segment", write_segment)
