"""Other libraries, each called the best way it offers for a layout. All are optional: a missing one says so."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .contenders import Contender, Unavailable, gradients_of
from .inputs import Inputs
from .plain import padded
from .timer import Call

FLASH, LIK = "flash-maxsim==0.3.0", "late-interaction-kernels==0.4.5"
MAXSIM_CPU, NUMKONG = "maxsim-cpu==0.1.0", "numkong==7.8.6"


def load(module: str, requirement: str, inputs: Inputs, device: str) -> Any:
    """An installed library, for a device."""
    if inputs.device.type != device:
        raise Unavailable("needs a CUDA GPU" if device == "cuda" else "runs on the CPU only")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"not installed ({requirement})") from error
    except Exception as error:  # an old library on a new stack can fail in any way
        raise Unavailable(f"does not import: {error}") from error


def _floats(module: str, requirement: str, inputs: Inputs, device: str) -> Any:
    """An installed library that is measured on documents as they are."""
    if inputs.case.codec:
        raise Unavailable("for documents as they are")
    return load(module, requirement, inputs, device)


def _lengths(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.sum(-1, dtype=torch.int32).flatten()


# flash-maxsim


def prepare_flash(inputs: Inputs) -> Call:
    flash = _floats("flash_maxsim", FLASH, inputs, "cuda")
    case, queries, documents = inputs.case, inputs.queries, inputs.documents
    if case.winners:
        raise Unavailable("returns no winners")
    query_lengths, lengths = _lengths(inputs.query_mask), _lengths(inputs.document_mask)
    if case.train:
        if case.pairs or inputs.starts is not None:
            raise Unavailable("trains on padded documents or candidates only")

        def train(q: Tensor, d: Tensor) -> Tensor:
            scores: Tensor = flash.flash_maxsim_batched_train(
                q, d, shared_docs=not case.candidates, doc_lengths=lengths, query_lengths=query_lengths
            )
            return scores

        return gradients_of(train, inputs)
    if case.ragged:
        cumulative, longest = inputs.offsets.int(), inputs.max_length
        return _each_query(queries, lambda q: flash.flash_maxsim_packed(q, documents, cumulative, longest))
    if case.views:
        assert inputs.starts is not None
        assert inputs.lengths is not None
        starts, counts, longest = inputs.starts.int(), inputs.lengths.int(), inputs.max_length
        return _each_query(queries, lambda q: flash.flash_maxsim_rerank_direct(q, documents, starts, counts, longest))
    if case.pairs:
        return lambda: flash.flash_maxsim_pairs_dense(queries, documents, query_lengths, lengths)
    if case.NQ == 1 and not case.candidates and query_lengths is None:
        return lambda: flash.flash_maxsim(queries[0], documents, lengths)[None]
    # Its chunks of queries would forget the lengths of queries.
    options: dict[str, Any] = {} if query_lengths is None else {"query_chunk_size": None}
    return lambda: flash.flash_maxsim_batched(
        queries, documents, lengths, shared_docs=not case.candidates, query_lengths=query_lengths, **options
    )


def _each_query(queries: Tensor, score: Callable[[Tensor], Tensor]) -> Call:
    """One call a query, where no call takes several."""
    if len(queries) == 1:
        return lambda: score(queries[0])[None]
    return lambda: torch.stack([score(query) for query in queries])


def prepare_flash_persistent(inputs: Inputs) -> Call:
    """Its kernel for documents of unequal lengths, padded."""
    flash = _floats("flash_maxsim", FLASH, inputs, "cuda")
    case = inputs.case
    if not (case.ragged or case.masked) or case.pairs or case.candidates or case.winners or case.train:
        raise Unavailable("for documents of unequal lengths")
    if inputs.query_mask is not None:
        raise Unavailable("takes no query lengths")
    documents, mask = padded(inputs)
    lengths = _lengths(mask)
    return lambda: flash.flash_maxsim_persistent(inputs.queries, documents, lengths)


def prepare_flash_splitk(inputs: Inputs) -> Call:
    flash = _floats("flash_maxsim", FLASH, inputs, "cuda")
    case = inputs.case
    if case.NQ != 1 or not case.plain or case.masked or case.winners or case.train:
        raise Unavailable("for one query and padded documents")
    return lambda: flash.flash_maxsim(inputs.queries[0], inputs.documents, splitk=True)[None]


def prepare_flash_invgrid(inputs: Inputs) -> Call:
    """Its backward without atomics, chosen by an environment variable that it reads in every backward."""
    if not inputs.case.train or inputs.case.candidates:
        raise Unavailable("a backward of documents shared by all queries")
    call = prepare_flash(inputs)

    def run() -> Any:
        os.environ["FLASH_BWD_PATH"] = "invgrid"
        try:
            return call()
        finally:
            del os.environ["FLASH_BWD_PATH"]

    return run


# late-interaction-kernels


def prepare_lik(inputs: Inputs, backward: str = "auto") -> Call:
    lik = _floats("late_interaction_kernels", LIK, inputs, "cuda")
    case, queries, documents = inputs.case, inputs.queries, inputs.documents
    if backward != "auto" and not case.train:
        raise Unavailable("differs in training only")
    if documents.numel() >= 2**31:
        raise Unavailable("illegal memory access past 2^31 elements (int32 offsets)")
    if case.winners:
        return _lik_winners(inputs)
    masks = {"q_mask": inputs.query_mask, "d_mask": inputs.document_mask}
    if case.ragged:
        tokens = queries.flatten(0, 1)
        query_offsets = torch.arange(case.NQ + 1, device=inputs.device, dtype=torch.int32) * case.LQ
        offsets, longest = inputs.offsets.int(), inputs.max_length

        def varlen(q: Tensor, d: Tensor) -> Tensor:
            scores: Tensor = lik.maxsim_varlen(q, d, query_offsets, offsets, case.LQ, longest)
            return scores

        if case.train:
            return gradients_of(lambda q, d: varlen(q.flatten(0, 1), d), inputs)
        return lambda: varlen(tokens, documents)
    if case.views:  # it reads no scattered documents: they are gathered first, in its time
        assert inputs.starts is not None
        padded_pool, places = documents.view(-1, case.LD, case.D), inputs.starts // case.LD
        return lambda: lik.maxsim(queries, padded_pool[places])
    function = lik.maxsim_pairs if case.pairs else lik.maxsim
    if case.train:
        return gradients_of(lambda q, d: function(q, d, backward=backward, **masks), inputs)
    return lambda: function(queries, documents, **masks)


def _lik_winners(inputs: Inputs) -> Call:
    """Its forward that saves the winners; long queries in parts of 128 tokens, as its training does."""
    case = inputs.case
    if not case.plain or case.masked:
        raise Unavailable("measured on padded documents only")
    forward = importlib.import_module("late_interaction_kernels.forward").maxsim_forward
    parts = case.LQ // 128 if case.LQ > 512 and case.LQ % 128 == 0 else 1
    queries = inputs.queries.view(case.NQ * parts, -1, case.D)

    def run() -> Any:
        winners = forward(queries, inputs.documents, save_argmax=True)[1]
        return winners.view(case.NQ, parts, case.ND, -1).transpose(1, 2), None

    return run


def _lik_crashes(case: Case, device: str) -> bool:
    return device == "cuda" and case.ragged


# On a CPU


def _one_query(inputs: Inputs) -> None:
    case = inputs.case
    if (
        case.codec
        or case.dtype != "float32"
        or not (case.plain or case.ragged)
        or case.masked
        or case.winners
        or case.train
    ):
        raise Unavailable("for float32 scores of padded or ragged documents")
    if case.NQ != 1:
        raise Unavailable("takes one query")
    if inputs.device.type != "cpu":
        raise Unavailable("runs on the CPU only")


def _documents(inputs: Inputs) -> list[Any]:
    tokens = inputs.documents.numpy()
    if not inputs.case.ragged:
        return list(tokens)
    offsets = inputs.offsets.tolist()
    return [tokens[first:last] for first, last in pairwise(offsets)]


def prepare_numpy(inputs: Inputs) -> Call:
    _one_query(inputs)
    import numpy as np

    query, case = inputs.queries[0].numpy(), inputs.case
    tokens = inputs.documents.view(-1, case.D).numpy()
    if case.ragged:
        assert inputs.starts is not None
        starts = inputs.starts.numpy()
        return lambda: torch.from_numpy(np.maximum.reduceat(query @ tokens.T, starts, axis=1).sum(0)[None])
    return lambda: torch.from_numpy((query @ tokens.T).reshape(case.LQ, case.ND, -1).max(-1).sum(0)[None])


def prepare_maxsim_cpu(inputs: Inputs) -> Call:
    _one_query(inputs)
    library = _floats("maxsim_cpu", MAXSIM_CPU, inputs, "cpu")
    query = inputs.queries[0].numpy()
    if inputs.case.ragged:
        documents = _documents(inputs)
        return lambda: torch.as_tensor(library.maxsim_scores_variable(query, documents))[None]
    table = inputs.documents.numpy()
    return lambda: torch.as_tensor(library.maxsim_scores(query, table))[None]


def prepare_numkong(inputs: Inputs) -> Call:
    """One thread; documents packed before. It sums angular distances of unit vectors, 1 − similarity."""
    _one_query(inputs)
    library = _floats("numkong", NUMKONG, inputs, "cpu")
    query = library.maxsim_pack(inputs.queries[0].numpy(), dtype="f32")
    documents = [library.maxsim_pack(document, dtype="f32") for document in _documents(inputs)]
    LQ = inputs.case.LQ
    return lambda: LQ - torch.tensor([[library.maxsim_packed(query, document) for document in documents]])


_HALVES = ("float16", "bfloat16")

PEERS = (
    Contender("flash-maxsim", prepare_flash, _HALVES),
    Contender("flash-maxsim-persistent", prepare_flash_persistent, _HALVES),
    Contender("flash-maxsim-splitk", prepare_flash_splitk, _HALVES),
    Contender("flash-maxsim-invgrid", prepare_flash_invgrid, _HALVES),
    Contender("late-interaction-kernels", prepare_lik, _HALVES, isolated=_lik_crashes),
    Contender("late-interaction-kernels-lowmem", partial(prepare_lik, backward="lowmem"), _HALVES),
    Contender("late-interaction-kernels-unified", partial(prepare_lik, backward="unified"), _HALVES),
    Contender("numpy", prepare_numpy, ("float32",)),
    # Past 32 query tokens it corrupts memory: a wrong score, or the end of the process.
    Contender("maxsim-cpu", prepare_maxsim_cpu, ("float32",), isolated=lambda case, device: case.LQ > 32),
    Contender("numkong", prepare_numkong, ("float32",)),
)
