"""What a score is made of: for each query token the document token it matched, as data and as a page to look at."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import select
from ..graph import run
from ..layout import MaskLike, Problem, Tokens, TokensLike, make_problem
from ..ops import matches_of
from ..quantized.codes import DOCUMENT, TOKEN
from .images import data_uri, patch_grid
from .pieces import Pieces, pieces_of

__all__ = ["Explanation", "Match", "explain", "page"]


class Match(NamedTuple):
    """A query token and the document token that it matched.

    query, document: their texts, None where not known, and of the document also where no token matched. similarity: the
    term of the score. share: the similarity divided by the score, None where that is 0 or not finite. position: of the
    query token. index: of the document token, −1 where nothing, or a masked zero, wins, and for masked query tokens.
    """

    query: str | None
    document: str | None
    similarity: float
    share: float | None
    position: int
    index: int  # type: ignore[assignment]  # hides tuple.index, on purpose


@dataclass(frozen=True, eq=False)
class Explanation:
    """A score taken apart, LQ query tokens against LD document tokens. All tensors are on the CPU.

    score: what `maxsim.score` gives.
    index, similarity: int64 and float32 (float64 for float64 inputs) `[LQ]`, what `maxsim.matches` gives.
    similarities: of every query token with every document token, `[LQ, LD]` in the dtype of `similarity`, with the bits
        that the maximum is taken of: a masked document token has −inf, or 0 under `masked="zero"`, a masked query
        token 0 throughout.
    query_mask, document_mask: boolean `[LQ]`, `[LD]`, True = kept.
    masked, normalize, backend: how it was scored, and by what.
    query, document: the tokens as texts.
    image: the page as a data URI, or None. patches: int64 `[rows, columns]`, which document token is where, or None.
    name: of the document, for the page. notes: sentences for the page.
    """

    score: float
    index: Tensor
    similarity: Tensor
    similarities: Tensor
    query_mask: Tensor
    document_mask: Tensor
    masked: str
    normalize: bool
    backend: str
    query: Pieces
    document: Pieces
    image: str | None = None
    patches: Tensor | None = None
    name: str | int | None = None
    notes: Sequence[str] = ()

    @property
    def share(self) -> Tensor:
        """float64 `[LQ]`, `similarity / score`; NaN where the score is 0 or not finite. Shares add up to 1, up to
        rounding; where similarities have both signs some are negative or beyond 1."""
        if self.score == 0 or not math.isfinite(self.score):
            return torch.full(self.similarity.shape, math.nan, dtype=torch.float64, device="cpu")
        return self.similarity.double() / self.score

    @property
    def matches(self) -> list[Match]:
        """One `Match` for each query token, masked ones too."""
        rows = zip(self.index.tolist(), self.similarity.tolist(), self.share.tolist(), strict=True)
        return [
            Match(
                self.query.token(i),
                self.document.token(j) if j >= 0 else None,
                similarity,
                None if math.isnan(share) else share,
                i,
                j,
            )
            for i, (j, similarity, share) in enumerate(rows)
        ]

    def html(self) -> str:
        """One page that loads nothing: see `page`."""
        return page([self])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `html()` to the file `path`, UTF-8.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.html(), encoding="utf-8")


def explain(
    query: TokensLike,
    document: TokensLike,
    query_mask: MaskLike = None,
    document_mask: MaskLike = None,
    masked: str = "exclude",
    normalize: bool = False,
    backend: str | None = None,
    *,
    query_text: str | None = None,
    query_tokens: Sequence[Any] | None = None,
    document_text: str | None = None,
    document_tokens: Sequence[Any] | None = None,
    image: Any = None,
    patches: Any = None,
    name: str | int | None = None,
    notes: Sequence[str] = (),
) -> Explanation:
    """What the score of one query with one document is made of. Not differentiable.

    Args:
        query, document: one each, in any form that `maxsim.score` takes: `[L, D]`, `[1, L, D]`, a list or `Packed` of
            one, `quantized[n]`. float16, bfloat16, float32 or, on the CPU, float64.
        query_mask, document_mask, masked, normalize, backend: as for `maxsim.score`.
        query_tokens, document_tokens: one entry for each token: its name, as tokenizers give it ("##ing", "▁the" and
            "Ġthe" are understood), or its place (start, end) in `query_text` or `document_text`, what tokenizers call
            offset mapping; beside places, a name is one of a token that is no piece of the text. None: tokens are
            called by their numbers.
        query_text, document_text: the texts that places are in.
        image: of a document whose tokens are patches of it: a path, the bytes of a PNG, JPEG, GIF or WebP file, a data
            URI of such, or a PIL image.
        patches: which tokens are the patches: (rows, columns), one after another by rows from the first token on;
            (rows, columns, first), from another one on; or int `[rows, columns]`, the token at each place, −1 for none
            (one token may fill several, as a patch that is larger than others does).
        name: of the document, shown on the page.
        notes: sentences to show on the page beside it.

    Returns:
        an `Explanation`: `.matches`, `.similarities` and more, and `.html()` and `.save(path)`, a page. It holds all
        LQ·LD similarities, which `maxsim.score` never does.

    Raises:
        ValueError: more or less than one query or document; another number of texts than of tokens, places outside a
            text, patches that are no tokens of the document, an image without patches or of an unknown kind; and as
            `maxsim.score`.
        TypeError, UnsupportedError: as `maxsim.score`. OSError: an image that cannot be read.
    """
    with torch.no_grad():
        problem = make_problem(query, document, query_mask, document_mask, masked, normalize)
        for side, tokens in (("query", problem.queries), ("document", problem.documents)):
            if tokens.count != 1:
                raise ValueError(f"explain takes one {side}, got {tokens.count}")
        (q_start, q_end), (d_start, d_end) = _rows(problem.queries), _rows(problem.documents)
        query_pieces = pieces_of(q_end - q_start, query_text, query_tokens, "query")
        document_pieces = pieces_of(d_end - d_start, document_text, document_tokens, "document")
        grid = None if patches is None else patch_grid(patches, d_end - d_start)
        if image is not None and grid is None:
            raise ValueError("an image needs patches: (rows, columns) of the document's tokens")
        uri = None if image is None else data_uri(image)
        alone = _rows_alone(problem)
        used = select(problem, backend)
        if backend is None and used.unsupported(alone):
            used = select(alone)
        scored, each = (run(every, used.NAME, winners=True, maxima=True) for every in (problem, alone))
        index, similarity = (table.reshape(-1)[: q_end - q_start].cpu() for table in matches_of(scored, problem))
        q_keep, d_keep = _kept(problem.queries), _kept(problem.documents)
        similarities = matches_of(each, alone).similarity[0].T[: q_end - q_start].cpu().contiguous()
        similarities[:, ~d_keep] = 0.0 if masked == "zero" else -math.inf
        similarities[~q_keep] = 0.0
        return Explanation(
            float(scored.scores.reshape(())),
            index,
            similarity,
            similarities,
            q_keep,
            d_keep,
            masked,
            bool(normalize),
            used.NAME,
            query_pieces,
            document_pieces,
            uri,
            grid,
            name,
            tuple(notes),
        )


def page(explanations: Sequence[Explanation]) -> str:
    """One HTML page that loads nothing, of the documents that one query was scored with, in this order.

    Pointing at a query token, or moving to it with the keyboard, shows which token of each document it matched, with
    its similarity and share of the score, and how similar the others are; pointing at a document token which query
    tokens matched it.

    Raises:
        ValueError: no explanation, or queries that differ.
    """
    from .html import render

    return render(explanations)


def _rows(tokens: Tokens) -> tuple[int, int]:
    """First and last (exclusive) row of the one item, of its flat data."""
    if tokens.starts is None or tokens.ends is None:
        return 0, tokens.data.shape[-2]
    return int(tokens.starts[0]), int(tokens.ends[0])


def _kept(tokens: Tokens) -> Tensor:
    start, end = _rows(tokens)
    if tokens.mask is None:
        return torch.ones(end - start, dtype=torch.bool, device="cpu")
    return tokens.mask.reshape(-1)[start:end].cpu()


def _rows_alone(problem: Problem) -> Problem:
    """Each row of the document as a document of its own, without a mask: its maximum is its similarity, and has the
    bits that it has in the whole document."""
    d, (start, end) = problem.documents, _rows(problem.documents)
    data = d.data.reshape(-1, d.data.shape[-1])
    starts = torch.arange(start, end, device=data.device)
    codes = d.codes
    if codes is not None:

        def apart(name: str, tensor: Tensor) -> Tensor:
            if name in DOCUMENT:
                return tensor[:1].expand(end - start).contiguous()
            return tensor.reshape(-1) if name in TOKEN else tensor

        codes = codes.map(apart)
    rows = Tokens(data, end - start, 1, starts, starts + 1, (start, end) == (0, data.shape[0]), codes=codes)
    return dataclasses.replace(problem, documents=rows, per_query=0)
