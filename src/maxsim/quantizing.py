"""`quantize`: documents to codes, a block of token rows at a time."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .devices import no_autocast
from .layout import MaskLike, Tokens, TokensLike, check_tokens, tokens_of
from .packed import Packed
from .quantized import Codes, Quantized, product, residual, scaled
from .quantized.codes import CODECS, owners, rows_of
from .quantized.container import BLOCK
from .stream import Block, Stream

OPTIONS = {
    "scale": ("int8", "fp8"),
    "bits": ("residual",),
    "centroids": ("residual",),
    "renormalize": ("residual",),
    "parts": ("pq",),
}


def quantize(
    documents: TokensLike,
    codec: str | None = None,
    document_mask: MaskLike = None,
    normalize: bool = False,
    *,
    scale: str | float | None = None,
    bits: int | None = None,
    centroids: int | None = None,
    renormalize: bool | None = None,
    parts: int | None = None,
    seed: int = 0,
    like: Quantized | None = None,
    straight_through: bool = False,
) -> Quantized:
    """Documents as codes, which `score`, `score_pairs`, `matches` and `topk` take in place of the documents.

    Codecs, for tokens of width D:
        "int8" (None): D bytes a token, −127 to 127 times a scale. Symmetric, without a zero point. Query tokens are
            quantised so too when they are scored, each with its own scale; products of codes are exact.
        "fp8": D bytes a token, of e4m3 (448 is the largest) times a scale. Query tokens so too.
        "residual": D × bits / 8 bytes a token and 4 for the number of its centroid: how far it is from that, in each
            dimension one of 2^bits buckets. Queries stay as they are.
        "pq": `parts` bytes a token: each part of D / parts dimensions is one of 256 codewords. Queries stay as they
            are.
    Centroids, buckets and codewords are trained on a sample of the documents: k-means, the same result on every run.
    The score of "residual" and "pq" documents is that of `dequantize(queries.dtype)`.

    Sources: "fp8" is E4M3 of Micikevicius et al. (arXiv 2209.05433); "residual" is the compression of ColBERTv2
    (Santhanam et al., arXiv 2112.01488, section 3.3); "pq" is product quantisation (Jégou et al., IEEE TPAMI 33 (1),
    2011); the straight-through estimator is that of Bengio et al. (arXiv 1308.3432).

    Args:
        documents: as for `score`, in any float dtype; `Views` and jagged tensors with gaps are packed. They stay as
            they are and are read in blocks: besides the codes, and a sample, nothing of their size is held.
        codec: "int8", "fp8", "residual" or "pq"; None is that of `like`, or "int8".
        document_mask: as for `score`. What it leaves out is not looked at, has codes of 0 and is left out of every
            score of the result.
        normalize: quantise unit vectors (each token divided by its L2 norm), for scores with `normalize=True`, which
            then normalise queries alone.
        scale: of "int8" and "fp8". "document" (None): one a document, by its largest value. "token": one a token, a
            whole multiple of its document's (2 bytes more), nearer to the tokens where their sizes differ. A number:
            that one for all documents; values beyond it saturate and are counted in `saturated`.
        bits: of "residual": 1, 2 (None), 4 or 8 a dimension.
        centroids: of "residual": how many. None: 16 √tokens, down to a power of two. No more than there are tokens.
        renormalize: of "residual": divide what is decoded by its norm (kept beside it, 4 bytes more), as ColBERT and
            fast-plaid do, for tokens that are unit vectors. None: no.
        parts: of "pq": how many bytes a token, 16 where None; must divide D.
        seed: of the sample and of where k-means begins.
        like: documents whose codec, options (`normalize` too, but no number given as `scale`), centroids, buckets and
            codewords are taken, in place of training.
        straight_through: for training: scores of the result pass gradients to the documents as if these had not been
            quantised (the straight-through estimator): a document token's gradient is that of the tokens given, at the
            winners of the codes, where values saturate too. Queries need the documents' dtype then. Nothing is kept of
            documents that ask for no gradient.

    Returns:
        `Quantized` on the documents' device, in their layout.

    Raises:
        TypeError: as `score`, and `straight_through` with documents of float64.
        ValueError: as `score`, an unknown codec, options that are wrong or of another codec, an empty list of
            documents, whose width is unknown, and NaN or infinity in a kept token; says where. On a GPU this waits for
            the device.
    """
    options = {"scale": scale, "bits": bits, "centroids": centroids, "renormalize": renormalize, "parts": parts}
    given = {name: value for name, value in options.items() if value is not None}
    if like is not None:
        codec = _codec_of(like, codec, given)
        normalize = normalize or like.parameters.normalized
    codec = "int8" if codec is None else codec
    if codec not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(map(repr, CODECS))}, got {codec!r}")
    for name in given:
        if codec not in OPTIONS[name]:
            raise ValueError(f"{name} is an option of {' and '.join(OPTIONS[name])}, not of {codec}")
    if not isinstance(normalize, (bool, np.bool_)):
        raise TypeError(f"normalize must be True or False, got {type(normalize).__name__}")
    if not isinstance(straight_through, (bool, np.bool_)):
        raise TypeError(f"straight_through must be True or False, got {type(straight_through).__name__}")
    if renormalize is not None and not isinstance(renormalize, (bool, np.bool_)):
        raise TypeError(f"renormalize must be True or False, got {type(renormalize).__name__}")
    bits, centroids, parts = _whole("bits", bits), _whole("centroids", centroids), _whole("parts", parts)
    begin = _whole("seed", seed)
    if begin is None or not 0 <= begin < 1 << 63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 − 1, got {seed!r}")
    seed = begin
    tokens, groups = tokens_of(documents, document_mask, "documents")
    if tokens.codes is not None:
        raise TypeError("documents are quantised already")
    if tokens.data.shape == (0, 0):
        raise ValueError("cannot quantise an empty list: its width is unknown; give [0, L, D]")
    check_tokens(tokens, "documents")
    if tokens.data.is_meta:
        raise ValueError("documents are on the meta device, which holds no values")
    if straight_through and tokens.data.dtype == torch.float64:
        raise TypeError("straight_through takes documents of float16, bfloat16 or float32, as scores of codes do")
    if like is not None and like.width != tokens.width:
        raise ValueError(f"documents have width {tokens.width}, those of like {like.width}")
    with torch.no_grad(), no_autocast(tokens.data.device.type):
        stream = Stream.of(tokens, bool(normalize))
        largest = stream.largest()
        known = None if like is None else like.parameters.to(stream.device)
        if codec in scaled.LIMIT:
            made = _scaled(stream, largest, codec, "document" if scale is None else scale, known)
        elif codec == "residual":
            made = _residual(stream, 2 if bits is None else bits, centroids, bool(renormalize), seed, known)
        else:
            made = _product(stream, 16 if parts is None else parts, seed, known)
    made.floats = _floats(tokens) if straight_through else None
    return made if groups is None else made[torch.arange(len(made), device="cpu").view(groups)]


def _floats(tokens: Tokens) -> Tensor | None:
    """Documents that ask for gradients, in the layout that their codes will have."""
    if not (torch.is_grad_enabled() and tokens.data.requires_grad):
        return None
    if tokens.starts is not None and tokens.ends is not None and not tokens.consecutive:
        return tokens.data[rows_of(tokens.starts, tokens.ends)]
    return tokens.data.flatten(0, 1) if tokens.data.ndim == 4 else tokens.data


def _whole(name: str, value: object) -> int | None:
    """An option as Python's int; of numpy's integers too."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {type(value).__name__}: {value!r}") from None


def _codec_of(like: object, codec: str | None, given: dict[str, Any]) -> str:
    if not isinstance(like, Quantized):
        raise TypeError(f"like must be Quantized, got {type(like).__name__}")
    if given:
        raise ValueError(f"with like its own options are taken, got {', '.join(given)}")
    if codec not in (None, like.codec):
        raise ValueError(f"like is {like.codec}, not {codec}")
    return like.codec


class Encoded(NamedTuple):
    """What a codec makes of a block: codes `[m, W]`, what they are decoded to, float64 `[m, D]`, and how many values
    saturated."""

    codes: Tensor
    decoded: Tensor
    saturated: Tensor | int = 0


def _encode(
    documents: Stream, parameters: Codes, dtype: torch.dtype, width: int, encode: Callable[[Block], Encoded]
) -> Quantized:
    """All documents by `encode`, to `width` codes of `dtype` a row. Those that are left out get codes of 0, and no
    say in radius and norm."""
    t, shape = documents.tokens, documents.tokens.data.shape[:-1]
    mask = None if t.mask is None else t.mask.reshape(-1)
    codes = torch.empty(documents.rows, width, dtype=dtype, device=documents.device)
    radius, norm = (torch.zeros(t.count, dtype=torch.float64, device=documents.device) for _ in range(2))
    saturated: Tensor | int = 0
    for block in documents.blocks():
        made = encode(block)
        saturated = saturated + made.saturated
        error, length = (block.tokens.double() - made.decoded).norm(dim=1), made.decoded.norm(dim=1)
        if mask is not None:
            kept = mask[block.low : block.high]
            error, length = error.masked_fill_(~kept, 0), length.masked_fill_(~kept, 0)
        codes[block.low : block.high] = made.codes
        radius.scatter_reduce_(0, block.owner, error, "amax")
        norm.scatter_reduce_(0, block.owner, length, "amax")
    if mask is not None:
        codes.view(torch.uint8)[~mask] = 0
    beside: dict[str, Any] = {name: rows.view(shape) for name, rows in parameters.of_tokens().items()}
    parameters = dataclasses.replace(
        parameters,
        radius=_up(radius),
        norm=_up(norm),
        normalized=documents.normalize,
        source=t.data.dtype,
        **beside,
    )
    return Quantized(
        codes.view(*shape, width), parameters, t.max_length, t.starts, t.ends, t.consecutive, t.mask, int(saturated)
    )


def of_unseen(documents: Quantized) -> tuple[Tensor, Tensor]:
    """`radius` and `norm`, float32 `[N]`, of documents one after another that another library has quantised: how far
    they are from what they were is not known, so the radius is infinite."""
    decoded = documents.dequantize()
    assert isinstance(decoded, Packed)
    norm = torch.zeros(len(documents), dtype=torch.float64, device="cpu")
    for low in range(0, len(decoded.tokens), BLOCK):
        high = min(low + BLOCK, len(decoded.tokens))
        length = decoded.tokens[low:high].double().norm(dim=1)
        norm.scatter_reduce_(0, owners(low, high, decoded.ends), length, "amax")
    return torch.full((len(documents),), math.inf, dtype=torch.float32, device="cpu"), _up(norm)


def _up(values: Tensor) -> Tensor:
    """float64 → float32, never smaller; 0 stays."""
    above = torch.nextafter(values.float(), values.new_tensor(math.inf, dtype=torch.float32))
    return torch.where(values == 0, 0.0, above)


def _scaled(documents: Stream, largest: Tensor, codec: str, scale: str | float, like: Codes | None) -> Quantized:
    parameters = Codes(codec, documents.tokens.width)
    if scale == "token" or (like is not None and like.factor is not None):
        most = scaled.largest_factor(documents.tokens.width, codec)
        wanted = scaled.scale_of(largest, codec)
        own = (documents.of_documents(wanted) / most).clamp_min(scaled.LEAST)
        factor = torch.empty(documents.rows, dtype=torch.int16, device=documents.device)
        for low, high in documents.ranges():
            factor[low:high] = scaled.factors(wanted[low:high], own[documents.owner(low, high)], most)
        parameters = dataclasses.replace(parameters, scale=own, factor=factor)
    elif scale == "document":
        parameters = dataclasses.replace(parameters, scale=scaled.scale_of(documents.of_documents(largest), codec))
    else:
        if isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating, np.integer)):
            raise ValueError(f"scale must be 'document', 'token' or a number, got {scale!r}")
        if not scaled.LEAST <= scale <= torch.finfo(torch.float32).max:
            raise ValueError(f"scale must be positive, finite and a normal float32, got {scale}")
        parameters = dataclasses.replace(parameters, scale=largest.new_full((documents.tokens.count,), float(scale)))

    def encode(block: Block) -> Encoded:
        own = parameters.scale_of(block.low, block.high, block.owner)
        codes, saturated = scaled.encode(block.tokens.float(), own, codec)
        assert parameters.scale is not None
        decoded = scaled.decode(codes).double() * parameters.scale[block.owner].double()[:, None]
        if parameters.factor is not None:
            decoded *= parameters.factor[block.low : block.high, None]
        return Encoded(codes, decoded, saturated)

    return _encode(documents, parameters, scaled.STORED[codec], documents.tokens.width, encode)


def _residual(
    documents: Stream, bits: int, count: int | None, renormalize: bool, seed: int, like: Codes | None
) -> Quantized:
    if bits not in residual.BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, residual.BITS))}, got {bits!r}")
    if count is not None and count < 1:
        raise ValueError(f"centroids must be a whole number of at least 1, got {count!r}")
    if like is not None and like.cutoffs is None:
        raise ValueError("like does not say where its buckets end, so nothing can be quantised as it was")
    width = documents.tokens.width
    if like is None:
        most = residual.count_centroids(documents.kept) if count is None else count
        sample = _sample(documents, residual.POINTS * most + residual.HELD_OUT, seed)
        first, ends, weights = residual.train(sample, most, bits, seed)
        like = Codes("residual", width, centroids=first, cutoffs=ends, weights=weights, renormalize=renormalize)
    assert like.centroids is not None
    assert like.cutoffs is not None
    assert like.weights is not None
    centroids, cutoffs, table = (
        like.centroids,
        like.cutoffs,
        like.weights.float()[residual.unpacked(like.bits, documents.device)],
    )
    own = torch.zeros(documents.rows, dtype=torch.int32, device=documents.device)
    inverse = torch.ones(documents.rows, dtype=torch.float32, device=documents.device) if like.renormalize else None

    def encode(block: Block) -> Encoded:
        codes, nearest = residual.encode(block.tokens.float(), centroids, cutoffs)
        own[block.low : block.high] = nearest
        decoded = residual.decode(codes, nearest, centroids, table, None)
        if inverse is not None:
            again = residual.inverses(decoded)
            inverse[block.low : block.high] = again
            decoded *= again[:, None]
        return Encoded(codes, decoded.double())

    parameters = dataclasses.replace(like, centroid=own, inverse=inverse)
    made = _encode(documents, parameters, torch.uint8, residual.bytes_a_row(width, like.bits), encode)
    if documents.tokens.mask is not None:
        left_out = ~documents.tokens.mask.reshape(-1)
        own.masked_fill_(left_out, 0)
        if inverse is not None:
            inverse.masked_fill_(left_out, 1)
    return made


def _sample(documents: Stream, most: int, seed: int) -> Tensor:
    """To train on: at least one token."""
    sample = documents.sample(most, seed)
    return sample if len(sample) else sample.new_zeros(1, documents.tokens.width)


def _product(documents: Stream, parts: int, seed: int, like: Codes | None) -> Quantized:
    if like is None:
        product.check_parts(documents.tokens.width, parts)
        books = product.train(_sample(documents, product.POINTS * product.WORDS, seed), parts, seed)
    else:
        assert like.books is not None
        books = like.books

    def encode(block: Block) -> Encoded:
        codes = product.encode(block.tokens.float(), books)
        return Encoded(codes, product.decode(codes, books).double())

    return _encode(documents, Codes("pq", documents.tokens.width, books=books), torch.uint8, len(books), encode)
