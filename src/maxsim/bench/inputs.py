"""The tensors of a case: seeded, so that every contender, process and day gets the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .cases import Case

LENGTH_SPREAD = 0.5  # standard deviation of the logarithm of a ragged document's length


@dataclass(frozen=True)
class Inputs:
    """Normalised random tokens of a case, already rounded to its dtype.

    queries: `[NQ, LQ, D]`.
    documents: `[ND, LD, D]`; candidates `[NQ, ND, LD, D]`; ragged and views `[T, D]`.
    query_mask, document_mask: boolean prefix masks of padded tensors, True = keep, or None.
    starts, lengths: int64 `[ND]`, where ragged documents and views lie in `documents`, or None.
    upstream: float32, the gradient of the scores, or None.
    codes: the documents as `maxsim.Quantized`, or None.
    """

    case: Case
    queries: Tensor
    documents: Tensor
    query_mask: Tensor | None = None
    document_mask: Tensor | None = None
    starts: Tensor | None = None
    lengths: Tensor | None = None
    upstream: Tensor | None = None
    codes: Any = None

    @property
    def device(self) -> torch.device:
        return self.documents.device

    @property
    def offsets(self) -> Tensor:
        """int64 `[ND + 1]` of ragged documents."""
        assert self.lengths is not None
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def max_length(self) -> int:
        """Tokens of the longest document."""
        return self.case.LD if self.lengths is None else int(self.lengths.max())

    def form(self, documents: Tensor) -> Any:
        """These documents as functions of ours take them."""
        import maxsim

        if self.case.ragged:
            return maxsim.Packed(documents, self.offsets, max_length=self.max_length)
        if self.case.views:
            return maxsim.Views(documents, self.starts, self.lengths, max_length=self.max_length)
        return documents

    def decoded(self) -> Inputs:
        """What the codes stand for: itself without codes, else the problem whose scores those of codes are."""
        if self.codes is None:
            return self
        import maxsim

        queries, documents = self.queries, self.codes.dequantize(self.queries.dtype)
        if self.codes.parameters.scaled:  # then query tokens are codes too, each with its own scale
            documents = self.codes.dequantize()
            single = maxsim.quantize(queries.flatten(0, 1)[:, None], self.codes.codec)
            queries = single.dequantize().view(queries.shape)  # type: ignore[union-attr]
        if isinstance(documents, maxsim.Packed):
            documents = documents.tokens
        return replace(self, queries=queries, documents=documents)

    def block(self, documents: slice) -> tuple[Tensor, Tensor | None]:
        """Some documents, padded, whatever the layout: `[n, L, D]` and a mask `[n, L]` or None."""
        if self.starts is None or self.lengths is None:
            mask = None if self.document_mask is None else self.document_mask[documents]
            return self.documents[documents], mask
        starts, lengths = self.starts[documents], self.lengths[documents]
        position = torch.arange(int(lengths.max()), device=self.device)
        mask = position < lengths[:, None]
        rows = (starts[:, None] + position).where(mask, 0)
        return self.documents[rows], mask


def work(inputs: Inputs) -> tuple[float, float]:
    """The least a forward does: floating-point operations, and bytes read once and written once, padding excluded."""
    case = inputs.case
    width = of_query = inputs.queries.element_size() * case.D  # bytes of a token
    query_lengths = torch.full((case.NQ,), case.LQ) if inputs.query_mask is None else inputs.query_mask.sum(-1).cpu()
    if inputs.codes is not None:
        width = inputs.codes.bytes_a_token
    if inputs.lengths is not None:
        document_tokens = int(inputs.lengths.sum())
    elif inputs.document_mask is not None:
        document_tokens = int(inputs.document_mask.sum())
    else:
        document_tokens = inputs.documents.numel() // case.D
    if case.pairs or case.candidates:  # a query meets its own documents only
        kept, mask = torch.full((case.NQ,), document_tokens // case.NQ), inputs.document_mask
        per_query = kept if mask is None else mask.reshape(case.NQ, -1).sum(-1).cpu()
        products = int((query_lengths * per_query).sum())
        scores = case.NQ * (1 if case.pairs else case.ND)
    else:
        products = int(query_lengths.sum()) * document_tokens
        scores = case.NQ * case.ND
    written = scores * 4 + (scores * case.LQ * 12 if case.winners else 0)  # a winner: int64 index, float32 similarity
    read = int(query_lengths.sum()) * of_query + document_tokens * width
    return 2.0 * case.D * products, float(read + written)


def make(case: Case, device: torch.device | str) -> Inputs:
    """The inputs of a case on a device."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    dtype = getattr(torch, case.dtype)
    shape = (case.NQ, 1 if case.pairs else case.ND) if case.pairs or case.candidates else (case.NQ, case.ND)
    starts = lengths = query_mask = document_mask = None
    document_shape: tuple[int, ...] = (case.ND, case.LD)
    if case.candidates:
        document_shape = (case.NQ, case.ND, case.LD)
    elif case.ragged:
        noise = torch.randn(case.ND, generator=generator, device=device)
        lengths = (noise * LENGTH_SPREAD - LENGTH_SPREAD**2 / 2).exp().mul(case.LD).round().clamp(min=1).long()
        starts = lengths.cumsum(0) - lengths
        document_shape = (int(lengths.sum()),)
    elif case.views:
        places = torch.randperm(2 * case.ND, generator=generator, device=device)[: case.ND]
        starts, lengths = places * case.LD, torch.full_like(places, case.LD)
        document_shape = (2 * case.ND * case.LD,)
    if case.masked:
        query_mask = _prefix((case.NQ,), 0.4, case.LQ, generator)
        document_mask = _prefix(document_shape[:-1], 0.3, case.LD, generator)
    made = Inputs(
        case,
        _tokens((case.NQ, case.LQ), case.D, dtype, generator),
        _tokens(document_shape, case.D, dtype, generator),
        query_mask,
        document_mask,
        starts,
        lengths,
        torch.randn(shape[:1] if case.pairs else shape, generator=generator, device=device) if case.train else None,
    )
    return made if case.codec is None else replace(made, codes=_codes(made))


# Of `maxsim.quantize`, by a case's codec.
QUANTIZE: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "fp8": ("fp8", {}),
    "residual2": ("residual", {"bits": 2}),
    "pq16": ("pq", {"parts": 16}),
}


def _codes(inputs: Inputs) -> Any:
    import maxsim

    assert inputs.case.codec is not None
    codec, options = QUANTIZE[inputs.case.codec]
    return maxsim.quantize(inputs.form(inputs.documents), codec, inputs.document_mask, **options)


def _prefix(shape: tuple[int, ...], shortest: float, longest: int, generator: torch.Generator) -> Tensor:
    """Boolean `[*shape, longest]` that keeps a random number of first tokens, at least one and `shortest · longest`."""
    low = max(1, int(shortest * longest))
    kept = torch.randint(low, longest + 1, shape, generator=generator, device=generator.device)
    return torch.arange(longest, device=generator.device) < kept[..., None]


def _tokens(shape: tuple[int, ...], D: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Unit tokens `[*shape, D]`, made in pieces: float32 randoms of a large corpus would take twice its memory."""
    flat = torch.empty((*shape, D), dtype=dtype, device=generator.device).view(-1, D)
    for part in blocks(flat.shape[0], max(1, 2**28 // D)):
        noise = torch.randn(part.stop - part.start, D, generator=generator, device=generator.device)
        flat[part] = torch.nn.functional.normalize(noise, dim=-1)
    return flat.view(*shape, D)


def blocks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `range(count)`."""
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))
