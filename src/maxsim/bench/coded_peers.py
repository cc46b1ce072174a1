"""Other libraries on documents as codes. Each makes its codes before the clock starts, and reads ours where it can."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .contenders import Contender, Unavailable
from .inputs import Inputs
from .peers import FLASH, LIK, load
from .timer import Call


def _of(codec: str, inputs: Inputs) -> None:
    if inputs.case.codec != codec:
        raise Unavailable(f"for {codec} documents")
    if inputs.case.ragged or inputs.case.masked or inputs.case.pairs or inputs.case.winners:
        raise Unavailable("measured on padded documents only")


def prepare_flash_int8(inputs: Inputs) -> Call:
    """int8 by int8, a scale for each token; queries are quantised in the call, as ours are."""
    _of("int8", inputs)
    flash = load("flash_maxsim", FLASH, inputs, "cuda")
    if inputs.case.NQ > 1:
        raise Unavailable("takes one query")
    codes, scales = flash.quantize_int8_symmetric(inputs.documents)
    return lambda: flash.flash_maxsim_int8x8(inputs.queries[0], codes, scales)[None]


def prepare_lik_fp8(inputs: Inputs) -> Call:
    """e4m3 with a scale for each token; queries are quantised in the call, as ours are."""
    _of("fp8", inputs)
    load("late_interaction_kernels", LIK, inputs, "cuda")
    library: Any = importlib.import_module("late_interaction_kernels.fp8")
    codes, scales = library.quantize_fp8_per_token(inputs.documents)

    def run() -> Any:
        queries, scale = library.quantize_fp8_per_token(inputs.queries)
        return library.maxsim_inference_fp8(queries, codes, scale_Q=scale, scale_D=scales)

    return run


def prepare_lik_residual(inputs: Inputs) -> Call:
    """Our codes, as they lie in an index of ColBERT or fast-plaid."""
    _of("residual2", inputs)
    load("late_interaction_kernels", LIK, inputs, "cuda")
    library: Any = importlib.import_module("late_interaction_kernels.plaid")
    flat = inputs.codes.flat()
    offsets = torch.nn.functional.pad(flat.ends, (1, 0)).int()
    own, longest = flat.parameters, inputs.max_length
    return lambda: library.maxsim_residual_varlen(
        inputs.queries, own.centroid, flat.codes, offsets, own.centroids, own.weights, own.bits,
        max_seqlen_d=longest, normalize=False,
    )  # fmt: skip


CODED_PEERS = (
    Contender("flash-maxsim-int8", prepare_flash_int8),
    Contender("late-interaction-kernels-fp8", prepare_lik_fp8),
    Contender("late-interaction-kernels-residual", prepare_lik_residual),
)
