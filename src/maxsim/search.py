"""Exact search over a corpus: the join of the store and the scoring functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .best import check_k, merge, topk
from .corpus import Id, Store
from .layout import TokensLike
from .packed import Packed, Views, as_tensor


class Hit(NamedTuple):
    """A document of a search's result and its score."""

    id: Id
    score: float


class Corpus(Store):
    """Documents on disk, with ids, token embeddings, texts and metadata, that can be searched exactly.

    `Corpus.create(path, dim)` makes one in a new folder and `Corpus.open(path)` opens it; `add`, `delete` and `search`
    change and ask it, `get`, `texts`, `metadata`, `ids`, `in` and `len` read it, `info` and `check` describe and
    verify it.

        corpus = maxsim.Corpus.create("embeddings", dim=128)
        corpus.add(["a", 2], [torch.randn(7, 128), torch.randn(300, 128)], texts=["first", "second"])
        hits = corpus.search(torch.randn(1, 32, 128), k=2)  # hits[0][0].id, .score
        maxsim.Corpus.open("embeddings", device="cuda")  # its tokens copied to a GPU and searched there

    An id is a str or an int, and 1 and "1" are two ids. Embeddings are kept in one dtype (float16 unless told), which
    queries are converted to. Each change is one transaction, seen by other handles and processes from its commit on;
    after a crash the folder opens as it was before or after. It may be moved, copied, read from a read-only place, and
    used from several threads and processes; a second writer waits for the first.
    """

    def search(self, queries: TokensLike, k: int, subset: Iterable[Id] | None = None) -> list[list[Hit]]:
        """The k best documents of each query, exactly.

        Args:
            queries: `[NQ, LQ, D]` of which every row counts, one `[LQ, D]`, a list or another iterable of `[L_i, D]`
                (torch or numpy, of any mixture of dtypes and devices), an object array of them, `Packed`, `Views`, or
                PyTorch's jagged nested tensor; any float dtype, converted to the corpus' dtype, on any device.
            k: at least 0; beyond the corpus it gives every document that has tokens.
            subset: ids to search in; None searches everything, an empty one nothing.

        Returns:
            for each query its hits: score descending, then the order in which documents were added. Documents without
            tokens are never hits; a query without tokens has none.

        Raises:
            ValueError: negative k, queries of another shape or width, NaN or infinity in them (in the corpus' dtype).
            TypeError: queries of another form or not floats, k that is not an integer, a single str as `subset`.
            KeyError: an id in `subset` that is not there.
            CorpusError: the files are not what the catalogue says.
            UnsupportedError: no backend can score this corpus on its device.
        """
        return search(self, queries, k, subset)


def search(store: Store, queries: TokensLike, k: int, subset: Iterable[Id] | None = None) -> list[list[Hit]]:
    """`Corpus.search` for any store."""
    k = check_k(k)
    asked = _queries(queries, store)
    selection = store.select(subset)
    NQ = asked.shape[0] if isinstance(asked, Tensor) else len(asked)
    scores = torch.empty(NQ, 0, device=store.device)
    positions = torch.empty(NQ, 0, dtype=torch.int64, device=store.device)
    if k and NQ:
        for segment, rows in selection:
            starts, lengths = segment.starts, segment.lengths
            if rows is not None:
                if not len(rows):
                    continue
                starts, lengths = starts[rows], lengths[rows]
            found = topk(asked, Views(segment.tokens, starts, lengths, max_length=segment.longest), k)
            local = found.indices if rows is None else rows[found.indices.clamp(min=0)]
            place = torch.where(found.indices < 0, found.indices, local + segment.record.first)
            # segments come in the order of adding, so columns of equal scores stay in it
            scores, positions = merge(torch.cat([scores, found.scores], 1), torch.cat([positions, place], 1), k)
    hits = positions >= 0
    names = store.ids_at(set(positions[hits].tolist()))
    return [
        [Hit(names[position], score) for position, score, hit in zip(*row, strict=True) if hit]
        for row in zip(positions.tolist(), scores.tolist(), hits.tolist(), strict=True)
    ]


def _queries(queries: Any, store: Store) -> Tensor | Packed:
    """Queries in the corpus' dtype and on its device, of its width and finite."""
    if isinstance(queries, np.ndarray) and queries.dtype == object:
        # of items of one length numpy makes a block of Python floats
        queries = list(queries) if queries.ndim == 1 else queries.astype(np.float64)
    if isinstance(queries, Packed):
        asked: Tensor | Packed = Packed(_convert(queries.tokens, store, "queries"), queries.offsets, queries.max_length)
    elif isinstance(queries, Views):
        items = [queries.tokens[a:b] for a, b in zip(queries.starts.tolist(), queries.ends.tolist(), strict=True)]
        return _queries(items, store)
    elif isinstance(queries, (Tensor, np.ndarray)):
        tensor = as_tensor(queries, "queries")
        if tensor.is_nested:
            return _queries(list(tensor.unbind()), store)
        if tensor.ndim not in (2, 3):
            raise ValueError(f"queries must have shape [NQ, LQ, D] or [LQ, D], got {list(tensor.shape)}")
        asked = _convert(tensor if tensor.ndim == 3 else tensor[None], store, "queries")
    elif isinstance(queries, (str, bytes, dict)) or not isinstance(queries, Iterable):
        raise TypeError(
            f"queries must be a tensor, an array, a list of them, Packed or Views, got {type(queries).__name__}"
        )
    else:
        items = [_convert(as_tensor(item, f"queries[{i}]"), store, f"queries[{i}]") for i, item in enumerate(queries)]
        for i, item in enumerate(items):
            if item.ndim != 2:
                raise ValueError(f"queries[{i}] must have shape [L, D], got {list(item.shape)}")
        asked = (
            Packed.from_list(items) if items else torch.empty(0, 0, store.dim, dtype=store.dtype, device=store.device)
        )
    values = asked if isinstance(asked, Tensor) else asked.tokens
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"queries hold NaN or infinity in the corpus' dtype, {store.dtype}")
    return asked


def _convert(tensor: Tensor, store: Store, what: str) -> Tensor:
    if not tensor.is_floating_point():
        raise TypeError(f"{what} must hold floats, got {tensor.dtype}")
    if tensor.ndim == 0 or tensor.shape[-1] != store.dim:
        raise ValueError(f"{what} must have the corpus' width {store.dim}, got shape {list(tensor.shape)}")
    if tensor.is_meta:
        raise ValueError(f"{what} must hold values, got a meta tensor")
    return tensor.detach().to(store.device, store.dtype)
