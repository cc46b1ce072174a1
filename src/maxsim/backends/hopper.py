"""Warp-specialised kernels for Hopper GPUs (sm_90): many query rows, whose products the tensor cores bound, and few,
bound by the documents' bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..gpu import MOST_TOKENS, again, backward, codes_unsupported, on_device, outputs, side
from ..kernels.chosen import chosen
from ..kernels.configs import (
    FewConfig,
    few_codes_config,
    few_config,
    few_decoded_config,
    few_float32_config,
    few_product_config,
    hopper_codes_config,
    hopper_config,
    hopper_decoded_config,
    hopper_float32_config,
    hopper_product_config,
    power_of_two,
)
from ..kernels.hopper_few_launch import hopper_few
from ..kernels.hopper_launch import hopper_scores
from ..kernels.hopper_product import hopper_product, hopper_product_few
from ..kernels.launches import Repeatable
from ..kernels.scores_launch import PARTS_BYTES
from ..layout import Problem, Tokens
from ..precision import float32_is_exact
from ..result import Scored

__all__ = ["NAME", "backward", "forward", "preferred", "unsupported"]

NAME = "hopper"
MOST_ROWS = 2**31 - 1024  # of a buffer of documents


@cache
def _card(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def unsupported(problem: Problem) -> Sequence[str]:
    device, d = problem.device, problem.documents
    if device.type != "cuda" or torch.version.cuda is None:
        return [f"needs a CUDA device, the documents are on {device}"]
    capability, _ = _card(device)
    why = []
    if capability != (9, 0):
        why.append(f"needs compute capability 9.0, {device} has {'.'.join(map(str, capability))}")
    if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        why.append(f"serves float16, bfloat16 and float32, not {problem.dtype}")
    why += codes_unsupported(d)
    if d.codes is not None and not d.codes.scaled and not why:
        why += _decoded_unsupported(problem)
    if d.codes is not None and d.codes.factor is not None and (d.codes.codec != "int8" or d.width > 256):
        why.append(f"serves scales of tokens of int8 codes of width 1 to 256, not {d.codes.codec} {d.width}")
    if problem.normalize:
        why.append("does not normalise")
    q = problem.queries
    if problem.pairs is not None:
        why += _pairs_unsupported(problem)
    own, count = _own(problem), d.count if problem.pairs is None else problem.pairs.shape[0]
    widest = 128 if _single(problem) else 256
    if own and d.width > widest:
        why.append(f"serves {d.data.dtype} candidates and pairs of width 1 to {widest}, not {d.width}")
    most = PARTS_BYTES // (8 * max(1, -(-q.max_length // 256)))
    if own and count > most:
        why.append(f"serves at most {most} candidates or pairs of queries of {q.max_length} tokens, not {count}")
    if q.max_length > MOST_TOKENS:
        why.append(f"serves at most {MOST_TOKENS} tokens a query")
    if q.ragged and q.count > 1 and q.max_length == q.data.shape[0]:  # offsets on the card: any may be the longest
        why.append("needs max_length of ragged queries, or would multiply for tokens that are not there")
    return why + _not_addressable(d)


def _decoded_unsupported(problem: Problem) -> list[str]:
    """Of documents whose codes are no numbers."""
    codes = problem.documents.codes
    assert codes is not None
    why = []
    if problem.dtype == torch.float32:
        why.append(f"serves {codes.codec} codes for queries in float16 and bfloat16, not float32")
    if codes.books is not None:
        parts, _, size = codes.books.shape
        if (parts, size) != (16, 8):
            why.append(f"serves pq codes of 16 parts of 8 dimensions, not {parts} of {size}")
        if problem.per_query and _few(problem, True) is None:
            why.append(f"serves pq candidates of queries of up to 32 tokens, not {problem.queries.max_length}")
    elif codes.width % 8 or hopper_decoded_config(codes.width, codes.bits) is None:
        why.append(f"serves {codes.codec} codes of widths that 8 divides up to 256, of 8 bits 128, not {codes.width}")
    return why


def _own(problem: Problem) -> int:
    """How many documents of its own each query has; 0: all. Chosen pairs are queries with one each (`chosen`)."""
    return problem.per_query if problem.pairs is None else 1


def _pairs_unsupported(problem: Problem) -> list[str]:
    """Of pairs chosen by index."""
    q, why = problem.queries, []
    if problem.documents.codes is not None:
        why.append("serves codes of all documents or of each query's own candidates, not of chosen pairs")
    item, follow = _rows(q)[1], 0 if q.ragged else q.max_length
    if item is None or (q.mask is not None and not (q.mask.is_contiguous() and item == follow)):
        why.append("needs queries of chosen pairs as rows of one matrix, and their mask likewise")
    return why


def _single(problem: Problem) -> bool:
    """Whether float32 numbers are to be multiplied."""
    return problem.documents.data.dtype == torch.float32


def _not_addressable(d: Tokens) -> list[str]:
    """Why the copy engine cannot take documents as rows of one matrix."""
    why = []
    rows, item = _rows(d)
    row, col = d.data.stride()[-2:]
    if col != 1 or row * d.data.element_size() % 16 or d.data.data_ptr() % 16:
        why.append("needs documents whose last dimension is contiguous and whose rows begin at multiples of 16 bytes")
    if row < d.data.shape[-1]:
        why.append("needs documents whose rows do not overlap")
    if not 0 < rows <= MOST_ROWS:
        why.append(f"serves 1 to {MOST_ROWS} rows of document tokens, not {rows}")
    if item is None:
        why.append("needs documents whose distance is a multiple of their rows'")
    if d.mask is not None and not (d.mask.is_contiguous() and item == (0 if d.ragged else d.max_length)):
        why.append("needs a document mask that is contiguous, of documents that are")
    return why


def _rows(d: Tokens) -> tuple[int, int | None]:
    """Items as a matrix: its rows, and after how many rows the next padded one begins (ragged ones: 0), None where
    they do not lie so."""
    if d.ragged:
        return d.data.shape[0], 0
    count, length = d.count, d.max_length
    if count == 1 or length == 0:
        return length, length
    item, row = d.data.stride()[-3:-1]
    if d.data.ndim == 4:  # candidates of each query
        queries, K = d.data.shape[:2]
        group = d.data.stride()[0]
        if K == 1:
            item = group
        elif queries > 1 and group != K * item:
            return length, None
    if row <= 0 or item % row:
        return length, None
    return (count - 1) * (item // row) + length, item // row


def preferred(problem: Problem) -> bool:
    """Whether this is the fastest for as much work: below, the portable kernels start sooner."""
    q, d, own = problem.queries, problem.documents, _own(problem)
    # chosen by index: 1000 pairs of 32 with 300 tokens 26 us, portable 24; 4000 of 128 with 300 150, 122
    if problem.pairs is not None:
        return False
    rows = (1 if own else q.count) * max(16, q.max_length)
    tokens = min(d.data.shape[0], d.count * d.max_length) if d.ragged else d.count * d.max_length
    single, codes = _single(problem), d.codes is not None  # products of codes take half the time
    if d.codes is not None and not d.codes.scaled:  # the portable kernel takes 5 times as long to decode
        return tokens * d.width >= 1 << 20
    if single and d.width > 128:  # 4x32 vs 200x300 of width 256 at `highest`: 72 TFLOP/s, portable 29; 1x32: 35 and 33
        few = rows > 16 and not d.ragged and d.mask is None
        return (rows > 64 or few) and rows * tokens * d.width >= 1 << 30
    if d.width > 256:  # 64 rows are bound by the bytes of the documents, for which the portable kernels do
        return rows > 64 and rows * tokens * d.width >= 1 << (31 + codes)
    if rows > 64:
        # candidates: 4x256 vs 4x32x512 18.6 us, portable 16.8; 16x128 vs 16x100x300 48, 55
        return rows * tokens >= 1 << ((23 if single else 24) + codes + (own > 0))
    size, least = tokens * d.width, 1 << (25 + codes)
    if own:  # 16x32 vs 16x32x300 14.4 us, portable 14.8; 4096x32 vs 4096x1x300, each another query, 84 and 83
        if own < 8 or _few(problem, False) is None:
            return False
        least >>= 1
    if d.ragged and not d.consecutive:
        return False
    if _few(problem, False) is None:
        return single and d.mask is None and not float32_is_exact() and size >= 1 << 27
    if single:
        return d.count >= 256 and size >= (least if d.mask is None else 1 << 27)
    if d.mask is not None or d.count < 512:
        return False
    # programs have equal shares, set beforehand: of many equal documents the card deals as well, document by document;
    # of codes 1x32 vs 10000x300 91 us, portable 113
    return (d.ragged or d.count <= 2048 or codes) and size >= least


def _few(problem: Problem, winners: bool) -> FewConfig | None:
    """The tiles where the kernel for few query rows serves."""
    q = problem.queries
    rows = (1 if _own(problem) else q.count) * max(16, power_of_two(q.max_length))
    codes = problem.documents.codes
    if codes is not None and codes.codec == "pq":
        return few_product_config(rows, winners)
    if codes is not None:
        if codes.scaled:
            return few_codes_config(q.width, rows, winners)
        return few_decoded_config(q.width, codes.bits, rows, winners)
    if _single(problem):
        return few_float32_config(q.width, rows)
    return few_config(q.width, rows, winners)


def forward(problem: Problem, winners: bool, maxima: bool) -> Scored:
    q, d = problem.queries, problem.documents
    out = outputs(problem, winners, maxima)
    rows, item = _rows(d)
    _, processors = _card(problem.device)
    own = _own(problem)
    precision, config, few = "native", hopper_config(q.width), _few(problem, winners)
    of_queries, of_documents = side(q), side(d)
    if d.codes is not None and d.codes.codec == "pq":
        config = hopper_product_config()
    elif of_documents.decoder is not None:
        decoded = hopper_decoded_config(q.width, of_documents.decoder.codec)
        assert decoded is not None
        config = decoded
        of_documents = of_documents._replace(decoder=of_documents.decoder.aligned())
    elif d.codes is not None:
        config = hopper_codes_config(q.width)
        factors = of_documents.factors
        if factors is not None and factors.data_ptr() % 16:  # of documents sliced out of others
            of_documents = of_documents._replace(factors=factors.clone())
    elif _single(problem):
        precision = "f16x3" if float32_is_exact() else "f16"
        config = hopper_float32_config(q.width, precision, winners)
    with on_device(problem.device):
        if problem.pairs is not None:
            q_rows, q_item = _rows(q)
            of_queries, of_documents = chosen(
                of_queries, of_documents, problem.pairs, (q_rows, q_item or 0), (rows, item or 0)
            )
            item = 0
        launch: Repeatable | None = None
        places = out, rows, item or 0, processors
        if d.codes is not None and d.codes.codec == "pq":
            if few is not None:
                hopper_product_few(of_queries, of_documents, *places, problem.masked_zero, few, own)
            else:
                hopper_product(of_queries, of_documents, *places, problem.masked_zero, config)
        elif few is not None:
            launch = hopper_few(of_queries, of_documents, *places, precision, problem.masked_zero, few, own)
        else:
            launch = hopper_scores(of_queries, of_documents, *places, precision, problem.masked_zero, config, own)
    return Scored(*out, again(launch, problem, out))
