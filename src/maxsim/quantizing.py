"""`quantize`: documents to codes, a block of token rows at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import MaskLike, TokensLike, check_tokens, tokens_of
from .quantized import Codes, Quantized, scaled
from .quantized.codes import CODECS
from .stream import Block, Stream


def quantize(
    documents: TokensLike,
    codec: str = "int8",
    document_mask: MaskLike = None,
    normalize: bool = False,
    *,
    scale: str | float = "document",
) -> Quantized:
    """Documents as codes, which `score`, `score_pairs`, `matches` and `topk` take in place of the documents.

    Codecs, for tokens of width D:
        "int8": D bytes a token, −127 to 127 times a scale. Symmetric, without a zero point. Query tokens are quantised
            so too when they are scored, each with its own scale; products of codes are exact.
        "fp8": D bytes a token, of e4m3 (448 is the largest) times a scale. Query tokens so too.

    Args:
        documents: as for `score`, in any float dtype; `Views` and jagged tensors with gaps are packed. They stay as
            they are and are read in blocks: besides the codes nothing of their size is held.
        document_mask: as for `score`. What it leaves out is not looked at, has codes of 0 and is left out of every
            score of the result.
        normalize: quantise unit vectors (each token divided by its L2 norm), for scores with `normalize=True`, which
            then normalise queries alone.
        scale: of "int8" and "fp8". "document": one a document, by its largest value. "token": one a token (4 bytes
            more), nearer to the tokens where their sizes differ. A number: that one for all documents; values beyond it
            saturate and are counted in `saturated`.

    Returns:
        `Quantized` on the documents' device, in their layout.

    Raises:
        TypeError, ValueError: as `score`; ValueError also for an unknown codec or scale, for an empty list of
            documents, whose width is unknown, and for NaN or infinity in a kept token; says where. On a GPU this waits
            for the device.
    """
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(map(repr, CODECS))}, got {codec!r}")
    if not isinstance(normalize, bool):
        raise TypeError(f"normalize must be True or False, got {type(normalize).__name__}")
    tokens, groups = tokens_of(documents, document_mask, "documents")
    if tokens.codes is not None:
        raise TypeError("documents are quantised already")
    if tokens.data.shape == (0, 0):
        raise ValueError("cannot quantise an empty list: its width is unknown; give [0, L, D]")
    check_tokens(tokens, "documents")
    if tokens.data.is_meta:
        raise ValueError("documents are on the meta device, which holds no values")
    with torch.no_grad():
        made = _scaled(Stream.of(tokens, normalize), codec, scale)
    return made if groups is None else made[torch.arange(len(made)).view(groups)]


class Encoded(NamedTuple):
    """What a codec makes of a block: codes `[m, W]`, what it decodes them to, float64 `[m, D]`, entries of `Codes` that
    are one a token, and how many values saturated."""

    codes: Tensor
    decoded: Tensor
    beside: dict[str, Tensor]
    saturated: Tensor | int = 0


def _encode(documents: Stream, parameters: Codes, code: Tensor, encode: Callable[[Block], Encoded]) -> Quantized:
    """All documents by `encode`. `parameters`: what is known before; `code`: an empty row of codes `[0, W]`."""
    shape = documents.tokens.data.shape[:-1]
    codes = code.new_empty(documents.rows, code.shape[1])
    radius, norm = (torch.zeros(documents.tokens.count, dtype=torch.float64, device=documents.device) for _ in range(2))
    beside: dict[str, Any] = {}
    saturated: Tensor | int = 0
    for block in documents.blocks():
        made = encode(block)
        codes[block.low : block.high] = made.codes
        for name, values in made.beside.items():
            rows = beside.setdefault(name, values.new_empty(documents.rows))
            rows[block.low : block.high] = values
        saturated = saturated + made.saturated
        error = (block.tokens.double() - made.decoded).norm(dim=1)
        radius.scatter_reduce_(0, block.owner, error, "amax")
        norm.scatter_reduce_(0, block.owner, made.decoded.norm(dim=1), "amax")
    parameters = dataclasses.replace(
        parameters,
        radius=_up(radius),
        norm=_up(norm),
        normalized=documents.normalize,
        source=documents.tokens.data.dtype,
        **{name: rows.view(shape) for name, rows in beside.items()},
    )
    t = documents.tokens
    return Quantized(
        codes.view(*shape, -1) if documents.rows else codes.view(*shape, code.shape[1]),
        parameters,
        t.max_length,
        t.starts,
        t.ends,
        t.consecutive,
        t.mask,
        int(saturated),
    )


def _up(values: Tensor) -> Tensor:
    """float64 → float32, never smaller; 0 stays."""
    above = torch.nextafter(values.float(), values.new_tensor(math.inf, dtype=torch.float32))
    return torch.where(values == 0, 0.0, above)


def _scaled(documents: Stream, codec: str, scale: str | float) -> Quantized:
    largest = documents.largest()
    parameters = Codes(codec, documents.tokens.width)
    if scale == "token":
        of_rows = scaled.scale_of(largest, codec)
    elif scale == "document":
        parameters = dataclasses.replace(parameters, scale=scaled.scale_of(documents.of_documents(largest), codec))
    else:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise ValueError(f"scale must be 'document', 'token' or a number, got {scale!r}")
        if not scaled.LEAST <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be positive, finite and a normal float32, got {scale}")
        parameters = dataclasses.replace(parameters, scale=largest.new_full((documents.tokens.count,), float(scale)))

    def encode(block: Block) -> Encoded:
        own = of_rows[block.low : block.high] if parameters.scale is None else parameters.scale[block.owner]
        codes, saturated = scaled.encode(block.tokens.float(), own, codec)
        decoded = scaled.decode(codes).double() * own.double()[:, None]
        return Encoded(codes, decoded, {"token_scale": own} if parameters.scale is None else {}, saturated)

    code = torch.empty(0, documents.tokens.width, dtype=scaled.STORED[codec], device=documents.device)
    made = _encode(documents, parameters, code, encode)
    if scale == "token" and not documents.rows:  # no block has said so
        made.parameters = dataclasses.replace(made.parameters, token_scale=largest.view(made.codes.shape[:-1]))
    return made
