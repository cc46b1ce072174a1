"""Documents as codes of 8 bits, in the kernels themselves, against integer arithmetic on the CPU: products of int8 are
exact, so scores, winners and maxima are equal bit for bit; those of e4m3 are between backends."""

from __future__ import annotations

import pytest
import torch
from lanes import CUDA, INTERPRETED, TRITON, interpreter_when, random

import maxsim
from maxsim import Packed, UnsupportedError, Views, quantize
from maxsim.layout import Tokens

if TRITON:
    import quantised
    from quantised import Case, case, run

pytestmark = [
    pytest.mark.needs_triton,
    pytest.mark.skipif(not TRITON or not (CUDA or INTERPRETED), reason="needs Triton and a GPU, or its interpreter"),
]
DEVICE = "cuda" if CUDA else "cpu"
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
E4M3 = torch.float8_e4m3fn
CODES = [torch.int8, E4M3]
BOTH = pytest.mark.parametrize("code", CODES, ids=["int8", "e4m3"])
INTERPRETER = pytest.mark.interpreter


def codes_of(shape: tuple[int, ...], code: torch.dtype) -> torch.Tensor:
    return quantised.codes_of(shape, code, DEVICE)


def items(tokens: Tokens, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Of each item its tokens, which of them are kept, and the first of its rows in `data`, laid out flat."""
    found = []
    for n in range(tokens.count):
        if tokens.ragged:
            start, end = int(tokens.starts[n]), int(tokens.ends[n])
            rows, mask = data[start:end], None if tokens.mask is None else tokens.mask[start:end]
        else:
            start = n * tokens.max_length
            rows, mask = data[n], None if tokens.mask is None else tokens.mask[n]
        keep = torch.ones(len(rows), dtype=torch.bool) if mask is None else mask.cpu().bool()
        found.append((rows.cpu(), keep, start))
    return found


def encoded(x: torch.Tensor, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    scale = (x.abs().amax(-1) / (127 if code == torch.int8 else 448)).clamp_min(2.0**-126)
    return (x / scale[:, None]).round() if code == torch.int8 else (x / scale[:, None]).to(code), scale


def tree(values: torch.Tensor) -> torch.Tensor:
    """Sums of adjacent pairs in blocks of 128, added up in order."""
    total = torch.zeros(())
    for block in values.split(128):
        block = torch.nn.functional.pad(block, (0, 128 - len(block)))
        while len(block) > 1:
            block = block.view(-1, 2).sum(1)
        total = total + block[0]
    return total


def reference(given: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[NQ, ND], and a list of [ND, kept tokens] of each query for maxima and winners."""
    problem, code = given.problem, given.codes.dtype
    q = items(problem.queries, problem.queries.data)
    d = items(problem.documents, given.codes)
    factors = None if given.factors is None else given.factors.cpu().double()
    q_codes, q_scales = encoded(torch.cat([x[keep] for x, keep, _ in q]), code)
    counts = [int(keep.sum()) for _, keep, _ in q]
    scores, maxima, winners = [], [], []
    for (x, keep, first), scale in zip(d, given.scales.cpu(), strict=True):
        sim = q_codes.double() @ x.double().T
        if factors is not None:
            sim = sim * factors[first : first + len(x)]
        sim[:, ~keep] = 0 if problem.masked_zero else float("-inf")
        if len(x) and (problem.masked_zero or keep.any()):
            best = sim.amax(1)
            won = (sim == best[:, None]).to(torch.uint8).argmax(1)
            won = torch.where(keep[won], won, -1)
        else:
            best = torch.full((len(sim),), float("-inf"), dtype=torch.float64)
            won = torch.full((len(sim),), -1)
        value = best.float() * scale * q_scales
        empty = best[:1].isneginf().any() or not len(x)
        scores.append([torch.tensor(float("-inf")) if empty else tree(part) for part in value.split(counts)])
        maxima.append(value)
        winners.append(won)
    return torch.tensor(scores).T, torch.stack(maxima), torch.stack(winners)


def reach(given: Case) -> float:
    """The largest ‖q‖‖d‖."""
    norms = given.codes.float().cpu().norm(dim=-1).flatten()
    if given.factors is not None:
        norms = norms * given.factors.cpu()
    return float(norms.max() * given.scales.max()) * float(given.problem.queries.data.float().norm(dim=-1).max())


def kept_columns(tokens: Tokens) -> torch.Tensor:
    """Columns of a table of winners that belong to kept tokens."""
    columns = []
    for n, (x, keep, start) in enumerate(items(tokens, tokens.data)):
        first = start if tokens.consecutive or not tokens.ragged else n * tokens.max_length
        columns.append(first + torch.arange(len(x))[keep])
    return torch.cat(columns)


def _tables(out):
    return out.scores.cpu(), out.maxima.cpu(), out.winners.cpu()


def check(given: Case, *kernels: str) -> None:
    want, want_maxima, want_winners = reference(given)
    columns = kept_columns(given.problem.queries)
    before = None
    for which in kernels:
        got, maxima, winners = _tables(run(which, given))
        alone = run(which, given, winners=False).scores.cpu()
        maxima, winners = maxima[:, columns], winners[:, columns].long()
        if given.problem.documents.max_length > 32767:
            winners &= 0xFFFF
        assert torch.equal(alone, got)
        if given.codes.dtype == torch.int8:
            assert torch.equal(got, want)
            assert torch.equal(maxima, want_maxima)
            assert torch.equal(winners, want_winners)
        else:  # the tensor cores keep fewer bits of a sum than float32 has
            off = 2.0**-12 * reach(given)
            torch.testing.assert_close(maxima, want_maxima, rtol=0, atol=off)
            torch.testing.assert_close(got, want, rtol=0, atol=off * given.problem.queries.max_length)
        if before is not None:
            assert all(torch.equal(a, b) for a, b in zip(before, (got, maxima, winners), strict=True))
        before = got, maxima, winners


def kernels(rows: int, D: int) -> tuple[str, ...]:
    if not HOPPER:
        return ("triton",)
    return ("triton", "hopper", "few") if rows <= 64 and 64 < D <= 256 else ("triton", "hopper")


def tokens(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return random(seed, *shape, dtype=dtype, device=DEVICE)


def lengths(count: int, most: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([0, 1, 7, 8, 31, 32, 33, 64, 127, 128, 129, most]).clamp(max=most)
    picked = choices[torch.randint(0, len(choices), (count,), generator=generator)]
    uniform = torch.randint(0, most + 1, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, picked, uniform).tolist()


def packed(sizes: list[int]):
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return lambda data: Packed(data, offsets.to(DEVICE), max_length=max(sizes))


@BOTH
@pytest.mark.parametrize("D", [8, 48, 64, 100, 128, 200, 256])
def test_widths(D, code):
    few = 3 if INTERPRETED else 37
    for NQ, LQ in ((1, 20), (1, 60), (3, 50)):
        check(case(tokens(NQ, LQ, D), codes_of((few, 140, D), code)), *kernels(NQ * LQ, D))


@interpreter_when(lambda D, code: D == 320)
@BOTH
@pytest.mark.parametrize("D", [320, 640, 1000])
def test_wide_tokens(D, code):
    for NQ, LQ in ((1, 20), (2, 100)):
        check(case(tokens(NQ, LQ, D), codes_of((5, 70, D), code)), *kernels(128, D))


@INTERPRETER
@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_queries(dtype, code):
    check(case(tokens(2, 20, 128, dtype=dtype), codes_of((4, 40, 128), code)), *kernels(64, 128))


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("LQ", [1, 16, 17, 32, 33, 64, 65, 128, 129, 300])
def test_query_lengths(LQ, code):
    sizes = lengths(300, 300, LQ)
    for NQ in (1, 2, 9):
        check(case(tokens(NQ, LQ, 128), codes_of((sum(sizes), 128), code), packed(sizes)),
              *kernels(NQ * max(16, 1 << (LQ - 1).bit_length()), 128))  # fmt: skip


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("LD", [1, 31, 32, 33, 127, 128, 129, 1024])
def test_document_lengths(LD, code):
    for ND in (1, 132, 133, 400):
        for NQ in (1, 5):
            check(case(tokens(NQ, 32, 128), codes_of((ND, LD, 128), code)), *kernels(NQ * 32, 128))


@interpreter_when(lambda NQ, code: NQ == 1)
@BOTH
@pytest.mark.parametrize("NQ", [1, 5])
def test_ragged(NQ, code):
    for most in (20,) if INTERPRETED else (3, 20, 130, 700):
        sizes = lengths(30 if INTERPRETED else 1500, most, most)
        check(case(tokens(NQ, 32, 128), codes_of((sum(sizes), 128), code), packed(sizes)), *kernels(NQ * 32, 128))


@INTERPRETER
@pytest.mark.parametrize("NQ", [1, 5])
def test_views(NQ):
    """Documents, and queries, anywhere in a buffer."""
    starts, sizes = torch.tensor([50, 3, 3, 90, 0]), torch.tensor([20, 33, 0, 10, 1])
    where = starts.to(DEVICE), sizes.to(DEVICE)
    queries = Views(tokens(100, 128), starts[:NQ].to(DEVICE), sizes[:NQ].to(DEVICE), max_length=33)
    wrap = lambda data: Views(data, *where, max_length=33)  # noqa: E731
    check(case(queries, codes_of((100, 128), torch.int8), wrap), *kernels(NQ * 64, 128))
    check(case(queries, codes_of((100, 128), torch.int8), wrap, factors=True), *kernels(NQ * 64, 128))


@interpreter_when(lambda NQ, masked, code: (masked == "zero") == (NQ == 1) and code == torch.int8)
@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("NQ", [1, 5])
@BOTH
def test_masks(NQ, masked, code):
    generator = torch.Generator().manual_seed(NQ)
    few = 5 if INTERPRETED else 300
    document_mask = torch.rand(few, 150, generator=generator) < 0.3
    document_mask[1] = False
    document_mask[2, :140] = False
    query_mask = torch.rand(NQ, 32, generator=generator) < 0.6
    if NQ > 1:
        query_mask[1] = False
    options = {"document_mask": document_mask.to(DEVICE), "query_mask": query_mask.to(DEVICE), "masked": masked}
    check(case(tokens(NQ, 32, 128), codes_of((few, 150, 128), code), **options), *kernels(NQ * 32, 128))
    sizes = lengths(few, 60, NQ)
    options["document_mask"] = (torch.rand(sum(sizes), generator=generator) < 0.5).to(DEVICE)
    check(case(tokens(NQ, 32, 128), codes_of((sum(sizes), 128), code), packed(sizes), **options),
          *kernels(NQ * 32, 128))  # fmt: skip


@interpreter_when(lambda LQ: LQ == 20)
@pytest.mark.parametrize("LQ", [20, 128, 300])
def test_factors(LQ):
    """A scale a token, as an integer times the document's: products stay exact."""
    for NQ in (1, 5):
        rows = NQ * max(16, 1 << (LQ - 1).bit_length())
        few = 2 if INTERPRETED else 141
        check(case(tokens(NQ, LQ, 128), codes_of((few, 77, 128), torch.int8), factors=True), *kernels(rows, 128))
        sizes = lengths(few, 40 if INTERPRETED else 300, LQ)
        check(case(tokens(NQ, LQ, 128), codes_of((sum(sizes), 128), torch.int8), packed(sizes), factors=True),
              *kernels(rows, 128))  # fmt: skip


@pytest.mark.gpu
@BOTH
def test_shared_documents(code):
    """Of long queries and few long documents programs share documents too."""
    check(case(tokens(1, 700, 128), codes_of((41, 1500, 128), code)), *kernels(700, 128))
    sizes = lengths(100, 1500)
    check(case(tokens(2, 300, 128), codes_of((sum(sizes), 128), code), packed(sizes)), *kernels(600, 128))


@INTERPRETER
@pytest.mark.parametrize("rows", [20, 200])
def test_extremes(rows):
    """The largest codes, of which no sum leaves an int32, equal ones, and zeros."""
    q = torch.ones(1, rows, 256, device=DEVICE)
    q[0, 1] = -1
    q[0, 2] = 0
    codes = torch.full((3, 40, 256), 127, dtype=torch.int8, device=DEVICE)
    codes[1] = -127
    codes[2] = 0
    check(case(q, codes), *kernels(rows, 256))
    check(case(q, codes, factors=True), *kernels(rows, 256))


@INTERPRETER
@BOTH
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_queries_that_no_code_holds(value, code):
    """A query with NaN or inf has no number for a score, and spoils no other's; an empty document stays −inf."""
    q = tokens(3, 20, 128)
    q[1, 3, 5] = value
    given = case(q, codes_of((60, 128), code), packed([30, 0, 30]))
    clean = case(tokens(3, 20, 128), given.codes, packed([30, 0, 30]))
    for which in kernels(128, 128):
        got, want = run(which, given).scores, run(which, clean).scores
        assert torch.equal(got[[0, 2]], want[[0, 2]])
        assert got[1, [0, 2]].isnan().all()
        assert got[1, 1] == float("-inf")


@interpreter_when(lambda LQ: LQ == 20)
@pytest.mark.parametrize("LQ", [20, 60, 100, 300])
def test_candidates(LQ):
    """Each query with documents of its own, and its own scales: what it finds among all."""
    q = tokens(3, LQ, 128)
    for code in CODES:
        codes = codes_of((3, 4, 70, 128), code)
        own = case(q, codes, factors=code == torch.int8)
        grid = case(q, codes.view(12, 70, 128), factors=code == torch.int8)
        all_scores, all_maxima, all_winners = _tables(run("triton", grid))
        there = [all_scores.view(3, 3, 4)[n, n] for n in range(3)]
        for which in kernels(max(16, 1 << (LQ - 1).bit_length()), 128):
            got, maxima, winners = _tables(run(which, own))
            assert torch.equal(got, torch.cat(there))
            assert torch.equal(got, run(which, own, winners=False).scores.cpu())
            for found, whole in ((maxima, all_maxima), (winners, all_winners)):
                assert torch.equal(
                    found.view(3, 4, LQ), torch.stack([whole.view(3, 4, 3, LQ)[n, :, n] for n in range(3)])
                )


@INTERPRETER
def test_pairs():
    q, codes = tokens(3, 20, 128), codes_of((5, 40, 128), torch.int8)
    grid = case(q, codes, factors=True)
    pairs = torch.tensor([[0, 4], [2, 2], [1, 0], [0, 4]], device=DEVICE)
    some = case(q, codes, factors=True, pairs=pairs, pairwise=True)
    whole = run("triton", grid, winners=False).scores
    assert torch.equal(run("triton", some, winners=False).scores, whole[pairs[:, 0], pairs[:, 1]])


needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def agree(q: torch.Tensor, made: maxsim.Quantized, *masks: torch.Tensor | None) -> None:
    """Hopper's kernels and the portable one, on every bit, gradients too."""
    found = [maxsim.matches(q, made, *masks, backend=backend) for backend in ("hopper", "triton")]
    assert torch.equal(found[0].index, found[1].index)
    assert torch.equal(found[0].similarity, found[1].similarity)
    scores, grads = [], []
    for backend in ("hopper", "triton"):
        leaf = q.clone().requires_grad_()
        scores.append(maxsim.score(leaf, made, *masks, backend=backend))
        assert torch.equal(scores[-1], maxsim.score(q, made, *masks, backend=backend))
        grads.append(torch.autograd.grad(scores[-1].masked_fill(scores[-1].isinf(), 0).sum(), leaf)[0])
    assert torch.equal(*scores)
    assert torch.equal(*grads)


@needs_hopper
@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("D", [48, 128, 256, 768])
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 20), (5, 32), (2, 300)])
def test_hopper_backend(NQ, LQ, D, codec):
    q, sizes = tokens(NQ, LQ, D), lengths(150, 200, LQ)
    padded, ragged = tokens(141, 77, D, seed=1), packed(sizes)(tokens(sum(sizes), D, seed=2))
    mask = (torch.rand(141, 77, generator=torch.Generator().manual_seed(0)) < 0.6).to(DEVICE)
    for scale in ("document", "token") if codec == "int8" and D <= 256 else ("document",):
        made = quantize(padded, codec, scale=scale)
        agree(q, made)
        agree(q, made, None, mask)
        agree(q, made[3:90])  # whose factors begin anywhere
        made = quantize(ragged, codec, scale=scale)
        agree(q, made)
        agree(q, made[torch.arange(0, 150, 7)])
        if D <= 256:
            agree(q, made[torch.arange(NQ * 9).view(NQ, 9)])


@needs_hopper
def test_what_hopper_refuses():
    def refused(made: maxsim.Quantized, D: int, reason: str, **options) -> None:
        with pytest.raises(UnsupportedError, match=reason):
            maxsim.score(tokens(1, 20, D), made, backend="hopper", **options)
        assert maxsim.score(tokens(1, 20, D), made, **options).isfinite().all()

    d = tokens(9, 20, 320)
    refused(quantize(d, scale="token"), 320, "scales of tokens of int8 codes of width 1 to 256")
    refused(quantize(d[..., :128], "fp8", scale="token"), 128, "scales of tokens of int8")
    refused(quantize(d[..., :100]), 100, "multiples of 16 bytes")
    refused(quantize(d, normalize=True), 320, "does not normalise", normalize=True)
