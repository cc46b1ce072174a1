"""What the GPU backends share: tokens as kernels take them, results to be written, gradients, the right device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .kernels import gradients
from .kernels.decoding import Decoder
from .kernels.launches import Repeatable
from .kernels.scores_launch import Outputs
from .kernels.sides import Side
from .layout import Problem, Tokens
from .quantized.codes import Codes
from .result import Again

MOST_WIDTH = (2**31 - 1) // 127**2  # of int8 codes, whose products are sums in int32
MOST_TOKENS = 2**31 - 1025  # of one item: positions in it are 32-bit numbers, and a tile may go beyond the last


def codes_unsupported(documents: Tokens) -> list[str]:
    """Why no kernel serves quantised documents."""
    codes = documents.codes
    if codes is None:
        return []
    why = []
    if codes.codec == "int8" and codes.width > MOST_WIDTH:
        why.append(f"serves int8 codes of width 1 to {MOST_WIDTH}, not {codes.width}")
    if codes.codec == "pq" and documents.data.numel() and not documents.ragged:
        *items, row, _ = documents.data.stride()
        apart = [step for step, count in zip(items, documents.data.shape, strict=False) if count > 1]
        if row <= 0 or any(step % row for step in apart):
            why.append("needs codes of documents whose distance is a multiple of their rows'")
    if codes.of_tokens() and not documents.ragged and documents.data.numel():
        item, row, _ = documents.data.stride()
        if row <= 0 or (documents.count > 1 and item != documents.max_length * row):
            why.append("needs codes with numbers beside each token in rows at one distance")
    return why


def outputs(problem: Problem, winners: bool, maxima: bool) -> Outputs:
    """What a forward writes."""
    return Outputs(
        torch.empty(problem.shape, dtype=torch.float32, device=problem.device),
        _table(problem, problem.winners_dtype, -1) if winners else None,
        _table(problem, torch.float32, 0) if maxima else None,
    )


def _table(problem: Problem, dtype: torch.dtype, fill: int) -> Tensor:
    """A winners or maxima table; filled only where some token rows may not be written."""
    q = problem.queries
    if q.mask is None and not q.ragged:
        return torch.empty(problem.winners_shape, dtype=dtype, device=problem.device)
    return torch.full(problem.winners_shape, fill, dtype=dtype, device=problem.device)


def again(launch: Repeatable | None, problem: Problem, out: Outputs) -> Again | None:
    """What a forward launched, to be repeated; keeps nothing of the problem alive but where ragged documents lie."""
    q = problem.queries
    if launch is None or out.maxima is not None or q.ragged or q.mask is not None:
        return None
    if problem.pairs is not None or problem.documents.mask is not None:  # calls of which no plan is kept
        return None
    K = problem.per_query
    shape = (q.count, K) if K else problem.shape
    table = None if out.winners is None else (problem.winners_shape, problem.winners_dtype)

    def repeat(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor | None]:
        scores = torch.empty(shape, dtype=torch.float32, device=documents.device)
        winners = None if table is None else torch.empty(table[0], dtype=table[1], device=documents.device)
        launch.repeat(queries, documents, scores, winners)
        return scores, winners

    return repeat


def backward(
    problem: Problem, winners: Tensor, grad: Tensor, need_queries: bool, need_documents: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """`Backend.backward`."""
    with on_device(problem.device):
        return gradients.gradients(
            side(problem.queries),
            side(problem.documents),
            winners,
            grad,
            problem.pairs,
            problem.per_query,
            problem.normalize,
            need_queries,
            need_documents,
            dtype,
        )


def side(tokens: Tokens) -> Side:
    data, mask, codes = tokens.data, tokens.mask, tokens.codes
    strides = (0, 0, 0, 0, *data.stride())
    mask_strides = (0, 0, 0, *(() if mask is None else mask.stride()))
    ragged = tokens.ragged
    return Side(
        data,
        tokens.count,
        tokens.max_length,
        data.shape[0] if ragged else 0,
        data.shape[1] if data.ndim == 4 else max(tokens.count, 1),
        strides[-4],
        strides[-3],
        strides[-2],
        strides[-1],
        tokens.starts,
        tokens.ends,
        tokens.consecutive,
        mask,
        mask_strides[-3],
        mask_strides[-2],
        mask_strides[-1],
        None if codes is None else codes.scale,
        None if codes is None or codes.factor is None else codes.factor.reshape(-1),
        _decoder(codes),
    )


def _decoder(codes: Codes | None) -> Decoder | None:
    if codes is None or codes.scaled:
        return None
    if codes.books is not None:
        _, words, size = codes.books.shape
        return Decoder(-size, codes.books.contiguous(), words)
    assert codes.centroid is not None
    assert codes.centroids is not None
    inverses = None if codes.inverse is None else codes.inverse.reshape(-1)
    ids, table = codes.centroid.reshape(-1), codes.centroids.contiguous()
    return Decoder(codes.bits, table, 0, ids, codes.weights, inverses)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the tensors' device, whatever the current one is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
