"""The Hopper backend gives the bits of the portable one, which the other tests hold against the reference: on every
layout it serves, at the sizes where its tiles, streams and sums turn."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from budget import check, plain_scores, scores_scale, true_scores
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lanes import CUDA, integers

import maxsim
from maxsim import Packed, UnsupportedError, Views

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
HALVES = (torch.float16, torch.bfloat16)
NAN, INF = float("nan"), float("inf")


def tokens(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def lengths(count: int, most: int, seed: int = 0) -> list[int]:
    """Some of 0, some of `most`, some around the width of a tile."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([0, 1, 7, 8, 31, 32, 33, 64, 127, 128, 129, most]).clamp(max=most)
    picked = choices[torch.randint(0, len(choices), (count,), generator=generator)]
    uniform = torch.randint(0, most + 1, (count,), generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.5, picked, uniform).tolist()


def packed(sizes: list[int], D: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> Packed:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return Packed(tokens(max(int(offsets[-1]), 1), D, dtype=dtype, seed=seed)[: int(offsets[-1])], offsets)


def same(*args, winners: bool = True, **options) -> torch.Tensor:
    """Both backends' scores, which are equal, and so are winners."""
    got = maxsim.score(*args, backend="hopper", **options)
    want = maxsim.score(*args, backend="triton", **options)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if winners:
        got_index, got_maxima = maxsim.matches(*args, backend="hopper", **options)
        index, maxima = maxsim.matches(*args, backend="triton", **options)
        torch.testing.assert_close(got_maxima, maxima, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got_index, index)
    return got


@pytest.mark.parametrize(
    ("dtype", "D"),
    [(dtype, D) for dtype in HALVES for D in (8, 48, 64, 72, 128, 136, 256)]
    + [(torch.float32, D) for D in (4, 48, 64, 100, 128)],
)
def test_widths(dtype, D):
    same(tokens(3, 50, D, dtype=dtype), tokens(37, 140, D, dtype=dtype, seed=1))
    for LQ in (10, 30, 60, 100):  # the tiles of few rows, and one of many
        same(tokens(1, LQ, D, dtype=dtype), tokens(37, 140, D, dtype=dtype, seed=1))


@pytest.mark.parametrize("LQ", [1, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 256, 300])
def test_query_lengths(LQ):
    d = packed(lengths(300, 300, LQ), 128)
    for NQ in (1, 2, 3, 9, 70):
        same(tokens(NQ, LQ, 128), d)


@pytest.mark.parametrize("LD", [1, 2, 31, 32, 33, 127, 128, 129, 300, 1024])
def test_document_lengths(LD):
    for ND in (1, 2, 131, 132, 133, 400, 1100):
        d = tokens(ND, LD, 128, seed=1)
        same(tokens(5, 32, 128), d)
        same(tokens(1, 32, 128), d)


def test_more_query_tiles_than_programs():
    same(tokens(3000, 32, 64), tokens(7, 60, 64, seed=1), winners=False)
    same(tokens(300, 200, 64), packed(lengths(11, 90), 64))


@pytest.mark.parametrize("NQ", [1, 9])
@pytest.mark.parametrize("most", [3, 20, 130, 700])
def test_ragged(most, NQ):
    sizes = lengths(1500, most, most)
    d = packed(sizes, 128)
    q = tokens(NQ, 32, 128, seed=2)
    whole = same(q, d)
    assert torch.equal(torch.isneginf(whole[0]).cpu(), torch.tensor(sizes) == 0)
    offsets = d.offsets.tolist()
    for i in (0, 17, 250, 1499):  # alone as in the batch
        if sizes[i]:
            alone = maxsim.score(q, d.tokens[offsets[i] : offsets[i + 1]], backend="hopper")
            assert torch.equal(alone[:, 0], whole[:, i])


@pytest.mark.parametrize("LQ", [16, 20, 32, 64, 128, 129])
def test_many_documents_a_stream(LQ):
    """Their scores wait for one another, and some are left at the end."""
    for count in (1000, 5003):
        d = packed(lengths(count, 60, LQ), 64)
        same(tokens(5, LQ, 64), d)
        mask = torch.rand(5, LQ, generator=torch.Generator().manual_seed(LQ)) < 0.6
        mask[1] = False  # an empty query
        same(tokens(5, LQ, 64), d, query_mask=mask.cuda())


@pytest.mark.parametrize("column", [0, 1, 2, 7, 8, 9, 30, 31, 32, 63, 64, 127, 128, 200, 255])
def test_where_a_winner_lies(column):
    """The lowest of equals, NaN before them, −0 equal to 0."""
    d = torch.zeros(3, 256, 64, dtype=torch.float16, device="cuda")
    d[0, column:] = 1
    d[1, column] = NAN
    d[1, 255] = NAN
    d[2, :column] = -1
    d[2, column + 1 :] = -0.0
    q = torch.ones(70, 32, 64, dtype=torch.float16, device="cuda")
    same(q, d)
    index = maxsim.matches(q, d, backend="hopper").index
    assert (index == column).all()


@pytest.mark.parametrize("value", [1, NAN])
def test_winners_beside_as_large_ones_of_other_documents(value):
    """Documents begin and end among columns that have the same similarity."""
    sizes = [5, 1, 26, 0, 7, 2, 40, 3, 64, 31, 33, 128, 9] * 20
    d = packed(sizes, 128)
    d.tokens.fill_(value)
    q = torch.ones(9, 32, 128, dtype=torch.float16, device="cuda")
    same(q, d)
    index = maxsim.matches(q, d, backend="hopper").index
    there = torch.tensor(sizes, device="cuda") > 0
    assert (index[:, there] == 0).all()
    assert (index[:, ~there] == -1).all()


def test_many_empty_documents():
    sizes = [0] * 40 + [5] + [0] * 300 + [200, 0, 0, 3] + [0] * 50
    for NQ in (1, 9):
        same(tokens(NQ, 32, 128), packed(sizes, 128))


def test_offsets_of_either_width_and_where_they_lie():
    d = packed(lengths(100, 200), 128)
    q = tokens(4, 32, 128)
    want = same(q, d)
    for dtype in (torch.int32, torch.int64):
        for device in ("cpu", "cuda"):
            offsets = d.offsets.to(device=device, dtype=dtype)
            assert torch.equal(maxsim.score(q, Packed(d.tokens, offsets, 200), backend="hopper"), want)


@pytest.mark.parametrize("order", ["in order", "reversed", "shuffled", "overlapping", "gaps"])
def test_views(order):
    buffer = tokens(5000, 128)
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor(lengths(120, 90))
    starts = torch.arange(120) * 40
    if order == "reversed":
        starts = starts.flip(0)
    elif order == "shuffled":
        starts = starts[torch.randperm(120, generator=generator)]
    elif order == "overlapping":
        starts = torch.randint(0, 4900, (120,), generator=generator)
    elif order == "gaps":
        sizes = sizes.clamp(max=29)
        kept = torch.zeros(5000, dtype=torch.bool)
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            kept[start : start + size] = True
        buffer[~kept.cuda()] = NAN
    for NQ in (1, 5):
        assert not torch.isnan(same(tokens(NQ, 32, 128, seed=4), Views(buffer, starts, sizes))).any()


def test_an_empty_document_where_the_next_begins():
    """After a gap, in the same tile, at every place in a group of columns."""
    q, buffer = tokens(9, 32, 128), tokens(4000, 128, seed=4)
    for gap in (0, 1, 8, 31, 32, 33, 40, 64, 70):
        starts, sizes = [], []
        for i in range(40):
            starts += [i * 90, i * 90 + 10 + gap, i * 90 + 10 + gap]
            sizes += [10, 0, 9]
        same(q, Views(buffer, torch.tensor(starts), torch.tensor(sizes)))


def test_strides():
    whole = tokens(40, 80, 256, seed=5)
    q = tokens(6, 32, 128, seed=6)
    for d in (
        whole[..., :128],
        whole[:, 8:60, :128],
        whole[::3, :, 128:],
        whole[:1, :50, :128],
        whole[7][None, :, :128],
    ):
        assert not d.is_contiguous()
        assert torch.equal(same(q, d), maxsim.score(q, d.contiguous(), backend="hopper"))
    same(tokens(128, 32, 6).permute(2, 1, 0), whole[..., :128])  # queries of any stride
    one = tokens(1, 70, 128)
    same(q, one.expand(9, 70, 128))
    mask = torch.rand(9, 70, generator=torch.Generator().manual_seed(6)).cuda() < 0.5
    many = tokens(60, 70, 128)  # enough for it to be chosen
    got = maxsim.score(many, one.expand(9 * 60, 70, 128), None, mask.repeat(60, 1))
    assert torch.equal(got, maxsim.score(many, one.repeat(9 * 60, 1, 1), None, mask.repeat(60, 1), backend="triton"))
    assert not torch.equal(got[:, 0], got[:, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 20), (1, 100), (5, 32), (2, 300)])
def test_queries_wherever_they_lie(NQ, LQ, dtype):
    """Rows that are loaded 16 bytes at once, and rows that are not; as many documents as streams, fewer, more."""
    buffer = tokens(NQ * LQ * 140 + 9, dtype=dtype)
    for D in (128, 120, 100):
        contiguous = tokens(NQ, LQ, D, dtype=dtype, seed=1)
        apart = buffer[1 : 1 + NQ * LQ * D].view(NQ, LQ, D)
        wide = buffer[: NQ * LQ * 136].view(NQ, LQ, 136)[..., :D]
        odd = buffer[: NQ * LQ * 139].view(NQ, LQ, 139)[..., 8 : 8 + D]
        mask = torch.rand(NQ, LQ, generator=torch.Generator().manual_seed(LQ)).cuda() < 0.7
        for ND in (1, 60, 132, 264, 1000):
            d = tokens(ND, 70, 128, dtype=dtype, seed=2)[..., :D]
            for q in (contiguous, apart, wide, odd):
                got = same(q, d, winners=False)
                assert torch.equal(got, maxsim.score(q.contiguous(), d, backend="hopper"))
            if ND == 60:
                same(wide, d, query_mask=mask)


@pytest.mark.parametrize("pattern", ["prefix", "left", "holes", "blocks", "none", "all"])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("NQ", [1, 2, 5])
def test_document_masks(pattern, form, NQ):
    ND, LD = 150, 500
    generator = torch.Generator().manual_seed(7)
    position = torch.arange(LD)
    edge = torch.tensor(lengths(ND, LD, 8))[:, None]
    mask = {
        "prefix": position < edge,
        "left": position >= LD - edge,
        "holes": torch.rand(ND, LD, generator=generator) < 0.5,
        "blocks": torch.rand(ND, LD // 100, generator=generator).repeat_interleave(100, 1) < 0.4,
        "none": torch.zeros(ND, LD, dtype=torch.bool),
        "all": torch.ones(ND, LD, dtype=torch.bool),
    }[pattern].cuda()
    d = tokens(ND, LD, 128)
    d[~mask] = NAN
    q = tokens(NQ, 32, 128, seed=9)
    if form == "padded":
        got = same(q, d, None, mask)
    else:
        sizes = torch.tensor(lengths(ND, LD, 10))
        inside = (position < sizes[:, None]).cuda()
        d, mask = Packed(d[inside], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])), mask[inside]
        got = same(q, d, None, mask)
    assert not torch.isnan(got).any()


def test_short_masked_documents_share_tiles():
    mask = torch.rand(3000, 12, generator=torch.Generator().manual_seed(1)).cuda() < 0.6
    d = tokens(3000, 12, 128)
    d[~mask] = NAN
    for NQ in (1, 20):
        assert not torch.isnan(same(tokens(NQ, 32, 128), d, None, mask)).any()


@pytest.mark.parametrize("pattern", ["prefix", "holes", "blocks", "none", "all"])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(("NQ", "D"), [(1, 128), (2, 128), (5, 128), (5, 64), (5, 320), (5, 600)])
def test_masked_tokens_that_compete(pattern, form, NQ, D):
    """With 0: the first of equals wins, and where it is masked nothing does."""
    ND, LD = 90, 400
    generator = torch.Generator().manual_seed(7)
    position = torch.arange(LD)
    mask = {
        "prefix": position < torch.tensor(lengths(ND, LD, 8))[:, None],
        "holes": torch.rand(ND, LD, generator=generator) < 0.5,
        "blocks": torch.rand(ND, LD // 100, generator=generator).repeat_interleave(100, 1) < 0.4,
        "none": torch.zeros(ND, LD, dtype=torch.bool),
        "all": torch.ones(ND, LD, dtype=torch.bool),
    }[pattern].cuda()
    signs = torch.tensor([-1.0, 0.0, 1.0])[torch.randint(0, 3, (ND, 1, 1), generator=generator)].cuda().half()
    d = tokens(ND, LD, D).abs() * signs  # similarities of one query below, of another above 0, and 0
    d[::4] = tokens(ND, LD, D, seed=1)[::4]
    d[~mask] = NAN
    q = tokens(NQ, 40, D, seed=9).abs()
    q[-1] *= -1
    q[0, ::3] = 0
    if form == "packed":
        sizes = torch.tensor(lengths(ND, LD, 10))
        inside = (position < sizes[:, None]).cuda()
        d, mask = Packed(d[inside], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])), mask[inside]
    got = same(q, d, None, mask, masked="zero")
    assert not torch.isnan(got).any()
    same(q.float(), Packed(d.tokens.float(), d.offsets) if isinstance(d, Packed) else d.float(), None, mask,
         masked="zero")  # fmt: skip


def test_masked_tokens_that_compete_where_not_all_is_finite():
    mask = torch.rand(60, 200, generator=torch.Generator().manual_seed(3)).cuda() < 0.8
    for D in (128, 320):
        for value in (NAN, INF, -INF):
            d = tokens(60, 200, D)
            d[7, 150, 3] = d[20, 0] = d[30, :] = value
            for n in (1, 5):
                same(tokens(n, 40, D), d, None, mask, masked="zero")
                same(-torch.ones_like(d[:n, :40]), d, None, mask, masked="zero")
            same(tokens(5, 40, D).float(), d.float(), None, mask, masked="zero")


WIDE = (264, 320, 328, 512, 640, 1024)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("D", [*WIDE, 768, 2560, 4096])
def test_wide_tokens(D, dtype):
    """Slices, of which the last may hang over the end."""
    d = tokens(37, 140, D, dtype=dtype, seed=1)
    same(tokens(3, 50, D, dtype=dtype), d)
    for LQ in (1, 30, 100, 128, 129, 300):
        same(tokens(1, LQ, D, dtype=dtype), d)
    same(tokens(50, 32, D, dtype=dtype), packed(lengths(150, 200), D, dtype))


@pytest.mark.parametrize("D", WIDE)
def test_wide_tokens_of_any_form(D):
    q, buffer = tokens(9, 70, D), tokens(3000, D + 8, seed=4)[:, 8:]
    mask = torch.rand(9, 70, generator=torch.Generator().manual_seed(2)).cuda() < 0.5
    mask[3] = False
    d = packed(lengths(150, 150), D)
    same(q, d, mask)
    same(packed([0, 20, 7, 300], D), d)
    kept = torch.rand(len(d.tokens), generator=torch.Generator().manual_seed(3)).cuda() < 0.3
    d.tokens[~kept] = NAN
    assert not torch.isnan(same(q, d, mask, kept)).any()
    same(q, Views(buffer, torch.randint(0, 2900, (60,)), torch.tensor(lengths(60, 90))))
    same(q.permute(1, 0, 2), tokens(40, 80, 2 * D)[:, 5:60, :D])
    same(q.permute(1, 0, 2)[:, :, :1].expand(70, 9, D), tokens(40, 80, D))


def test_wide_queries_in_chunks(monkeypatch):
    from maxsim.kernels import hopper_launch

    d = packed(lengths(50, 200), 520)
    monkeypatch.setattr(hopper_launch, "TILES_BYTES", 3 * 512 * 576)  # six query tiles at once
    monkeypatch.setattr(hopper_launch, "splits_documents", lambda *args: True)
    for q in (tokens(9, 300, 520), tokens(150, 30, 520), packed(lengths(60, 200, 12), 520, seed=13)):
        same(q, d)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("D", [320, 712])
def test_few_long_wide_documents(D):
    for form in ("padded", "ragged"):
        for LQ in (200, 300):
            same(tokens(2, LQ, D), few_documents(7, 900, form, D), winners=False)


@pytest.mark.parametrize("D", [320, 1024])
@pytest.mark.parametrize(("NQ", "LQ"), [(9, 32), (1, 300)])
def test_repeated_wide_calls_and_graphs(NQ, LQ, D):
    q, d = tokens(NQ, LQ, D), tokens(400, 200, D, seed=1)
    want = maxsim.score(q, d, backend="triton")
    for _ in range(3):
        assert torch.equal(maxsim.score(q, d, backend="hopper"), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maxsim.score(q, d, backend="hopper")
    for x, seed in ((q, 3), (d, 2)):
        x.copy_(tokens(*x.shape, seed=seed))
    graph.replay()
    want = maxsim.score(q, d, backend="triton")
    assert torch.equal(got, want)
    assert torch.equal(maxsim.score(q, d, backend="hopper"), want)


@pytest.mark.parametrize(
    ("dtype", "D"),
    [(dtype, D) for dtype in HALVES for D in (48, 128, 136, 256)] + [(torch.float32, D) for D in (64, 128)],
)
@pytest.mark.parametrize("LQ", [1, 32, 50, 100, 129, 300])
def test_candidates(dtype, D, LQ):
    for NQ, K, LD in ((3, 1, 70), (1, 40, 33), (70, 3, 129), (5, 60, 128)):
        same(tokens(NQ, LQ, D, dtype=dtype), tokens(NQ, K, LD, D, dtype=dtype, seed=1))
    assert maxsim.score(tokens(3, LQ, D, dtype=dtype), tokens(3, 0, 20, D, dtype=dtype)).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("LQ", [20, 64, 100, 128, 200, 600])
@pytest.mark.parametrize(("NQ", "K"), [(1, 300), (9, 1), (9, 60), (100, 7)])
def test_ragged_candidates(NQ, K, LQ, dtype):
    """Empty ones too, and masked tokens, and queries of any form; a score has the bits it has among others."""
    d = packed(lengths(NQ * K, 200, LQ), 128, dtype)
    offsets = d.offsets.tolist()
    documents = [d.tokens[low:high] for low, high in pairwise(offsets)]
    documents = [documents[n * K : n * K + K] for n in range(NQ)]
    q = tokens(NQ, LQ, 128, dtype=dtype)
    got = same(q, documents)
    every = maxsim.score(q, d, backend="hopper").view(NQ, NQ, K)
    assert torch.equal(got, every.diagonal().T)
    generator = torch.Generator().manual_seed(2)
    q_mask, kept = torch.rand(NQ, LQ, generator=generator) < 0.5, torch.rand(len(d.tokens), generator=generator) < 0.6
    q_mask[NQ // 2] = False
    same(q, documents, q_mask.cuda())
    d.tokens[~kept.cuda()] = NAN
    for masked in ("exclude", "zero"):
        assert not torch.isnan(same(q, documents, q_mask.cuda(), kept.cuda(), masked=masked)).any()
    sizes = lengths(NQ, LQ, 12)
    same(packed(sizes, 128, dtype), documents, None, kept.cuda())


@pytest.mark.parametrize("LQ", [30, 100, 300])
def test_candidates_wherever_they_lie(LQ):
    whole = tokens(6, 10, 90, 256, seed=5)
    q = tokens(6, LQ, 128, seed=6)
    mask = torch.rand(6, 10, 90, generator=torch.Generator().manual_seed(6)).cuda() < 0.5
    same(q, whole[..., :128].contiguous(), None, mask)
    same(q, whole[..., :128], None, mask, masked="zero")
    for d in (whole[..., 128:], whole[:, :, 7:60, :128], whole[:, :1, :, :128], whole[:, 3:4, 5:, :128]):
        assert torch.equal(same(q, d), maxsim.score(q, d.contiguous(), backend="hopper"))
    same(q[:1], whole[:1, 2:9, :, :128])
    same(q.expand(6, LQ, 128).permute(1, 0, 2).contiguous().permute(1, 0, 2), whole[..., :128])
    for apart in (whole[:, ::3, :, :128], whole[:1, :, :, :128].expand(6, 10, 90, 128)):
        with pytest.raises(UnsupportedError, match="distance"):
            maxsim.score(q, apart, backend="hopper")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("LQ", [30, 100, 300])
def test_pairs_of_one_query_with_one_document(LQ, dtype):
    q, d = tokens(300, LQ, 128, dtype=dtype), tokens(300, 90, 128, dtype=dtype, seed=1)
    want = maxsim.score_pairs(q, d, backend="triton")
    assert torch.equal(maxsim.score_pairs(q, d, backend="hopper"), want)
    assert torch.equal(maxsim.score(q, d[:, None], backend="hopper"), want[:, None])
    ragged = packed(lengths(300, 200), 128, dtype)
    assert torch.equal(maxsim.score_pairs(q, ragged, backend="hopper"), maxsim.score_pairs(q, ragged, backend="triton"))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("LQ", [30, 100, 300])
def test_candidates_that_are_not_finite(LQ, precision):
    torch.set_float32_matmul_precision(precision)
    for dtype in (torch.float16, torch.float32):
        q, d = tokens(7, LQ, 128, dtype=dtype), tokens(7, 30, 90, 128, dtype=dtype, seed=1)
        d[0, 3, 5, 6], d[2, 29, 0, 0], d[6, 0, 89, 127], d[4, :, 7] = NAN, INF, -INF, INF
        same(q, d)
        same(-torch.ones_like(q), torch.full_like(d, INF))
    q[3] *= 1e25
    for _ in range(2):
        same(q, d * 1e25)


def test_gradients_of_candidates():
    for dtype in (torch.bfloat16, torch.float32):
        for LQ in (30, 100, 300):
            q, d = tokens(6, LQ, 128, dtype=dtype), tokens(6, 9, 150, 128, dtype=dtype, seed=1)
            mask = torch.rand(6, 9, 150, generator=torch.Generator().manual_seed(1)).cuda() < 0.7
            upstream = tokens(6, 9, seed=5).float()
            found = []
            for backend in ("hopper", "triton"):
                leaves = [q.clone().requires_grad_(), d.clone().requires_grad_()]
                scores = maxsim.score(*leaves, None, mask, backend=backend)
                found.append(torch.autograd.grad(scores, leaves, upstream))
            for got, want in zip(*found, strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("LQ", [32, 128, 300])
def test_repeated_calls_with_candidates_and_graphs(LQ):
    q, d = tokens(9, LQ, 128), tokens(9, 50, 200, 128, seed=1)
    want = maxsim.score(q, d, backend="triton")
    for _ in range(3):
        assert torch.equal(maxsim.score(q, d, backend="hopper"), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maxsim.score(q, d, backend="hopper")
    for x, seed in ((q, 3), (d, 2)):
        x.copy_(tokens(*x.shape, seed=seed))
    graph.replay()
    assert torch.equal(got, maxsim.score(q, d, backend="triton"))
    assert torch.equal(got, maxsim.score(q, d, backend="hopper"))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_candidates(data):
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
    NQ, K, LQ = (data.draw(st.integers(1, most)) for most in (40, 30, 300))
    sizes = data.draw(st.lists(st.integers(0, 260), min_size=NQ * K, max_size=NQ * K))
    if not sum(sizes):
        sizes[0] = 1
    seed = data.draw(st.integers(0, 2**20))
    q, d = tokens(NQ, LQ, 128, dtype=dtype, seed=seed), packed(sizes, 128, dtype, seed=seed + 1)
    offsets = d.offsets.tolist()
    documents = [d.tokens[low:high] for low, high in pairwise(offsets)]
    mask = None
    if data.draw(st.booleans()):
        mask = torch.rand(len(d.tokens), generator=torch.Generator().manual_seed(seed)).cuda() < 0.5
    same(q, [documents[n * K : n * K + K] for n in range(NQ)], None, mask)


def test_query_masks_and_ragged_queries():
    d = packed(lengths(200, 150), 128)
    mask = torch.rand(30, 70, generator=torch.Generator().manual_seed(2)).cuda() < 0.5
    mask[3] = False
    same(tokens(30, 70, 128), d, mask)
    sizes = lengths(60, 200, 12)
    queries = packed(sizes, 128, seed=13)
    same(packed([0, 20, 7], 128), d)
    same(packed([0, 20, 7], 128), d, torch.rand(27, generator=torch.Generator().manual_seed(3)).cuda() < 0.5)
    same(tokens(2, 50, 128), d, mask[2:4, :50])
    same(queries, d)
    same(queries, d, torch.rand(sum(sizes), generator=torch.Generator().manual_seed(3)).cuda() < 0.5)


def test_not_finite():
    """A NaN in a kept token makes its document's scores NaN, and no other; infinities as IEEE has them."""
    q, d = tokens(4, 40, 128), packed(lengths(200, 150), 128)
    offsets = d.offsets.tolist()
    for row, value in ((offsets[20], NAN), (offsets[60], INF), (offsets[90], -INF)):
        d.tokens[row, 5] = value
    got = same(q, d)
    same(q[:1], d)
    for n in (1, 4):
        same(-torch.ones_like(q[:n]), Packed(torch.full_like(d.tokens, INF), d.offsets))  # −inf everywhere
    found = torch.isnan(got).any(0).nonzero().flatten().tolist()
    document = next(i for i in range(200) if offsets[i] <= offsets[20] < offsets[i + 1])
    assert document in found
    assert len(found) <= 3


def test_integers_are_exact():
    """Many ties, the lowest token of which wins."""
    q, d = integers(1, 7, 40, 96, device="cuda").half(), integers(2, 60, 170, 96, bound=1, device="cuda").half()
    best = torch.einsum("qid,njd->qnij", q.double(), d.double()).max(3)
    first = (torch.einsum("qid,njd->qnij", q.double(), d.double()) == best.values[..., None]).int().argmax(3)
    flat = torch.ones_like(d)
    for n in (1, 7):
        assert torch.equal(maxsim.score(q[:n], d, backend="hopper").double(), best.values.sum(2)[:n])
        assert torch.equal(maxsim.matches(q[:n], d, backend="hopper").index, first[:n])
        assert not maxsim.matches(q[:n], flat, backend="hopper").index.any()


def test_gradients():
    for sizes, masked in (([300] * 40, False), (lengths(60, 300), True)):
        q, d = tokens(6, 50, 128, dtype=torch.bfloat16), packed(sizes, 128, torch.bfloat16)
        mask = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(1)).cuda() < 0.7 if masked else None
        upstream = tokens(6, len(sizes), seed=5).float()
        found = []
        for backend in ("hopper", "triton"):
            leaves = [q.clone().requires_grad_(), d.tokens.clone().requires_grad_()]
            scores = maxsim.score(leaves[0], Packed(leaves[1], d.offsets), None, mask, backend=backend)
            found.append(torch.autograd.grad(scores, leaves, upstream.masked_fill(torch.isinf(scores), 0)))
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_long_queries_in_chunks(monkeypatch):
    from maxsim.kernels import hopper_launch

    padded, ragged = tokens(50, 200, 64, seed=1), packed(lengths(50, 200), 64)
    generator = torch.Generator().manual_seed(5)
    masks = [torch.rand(n, generator=generator).cuda() < 0.5 for n in (50 * 200, len(ragged.tokens))]
    cases = [(padded, None), (padded, masks[0].view(50, 200)), (ragged, None), (ragged, masks[1])]
    monkeypatch.setattr(hopper_launch, "PARTS_BYTES", 4 * 3 * 3 * 7)  # seven documents at once
    for d, mask in cases:
        same(tokens(3, 300, 64), d, None, mask)


@pytest.fixture
def splits(monkeypatch):
    """Programs share documents wherever they can."""
    from maxsim.kernels import hopper_launch

    monkeypatch.setattr(hopper_launch, "splits_documents", lambda *args: True)


def few_documents(count: int, length: int, form: str, D: int = 128) -> torch.Tensor | Packed:
    """Of `length` tokens (padded), or as many on average and some far from it (ragged)."""
    if form == "padded":
        return tokens(count, length, D, seed=1)
    if form == "strided":
        return tokens(count, length + 50, D, seed=1)[:, 20 : 20 + length]
    sizes = lengths(count, 2 * length, count)
    sizes[0] += max(length * count - sum(sizes), 0)
    return packed(sizes, D)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("form", ["padded", "strided", "ragged"])
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 300), (1, 512), (2, 1024), (3, 300)])
@pytest.mark.parametrize("ND", [1, 2, 5, 100])
def test_few_long_documents(form, NQ, LQ, ND):
    """Programs share documents; calls are repeated."""
    q = tokens(NQ, LQ, 128)
    for LD in (130, 511, 512, 1000, 1024, 5000):
        d = few_documents(ND, LD, form)
        want = same(q, d, winners=False)
        for _ in range(2):
            assert torch.equal(maxsim.score(q, d, backend="hopper"), want)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("D", [48, 256])
def test_few_long_documents_of_other_widths(D, dtype):
    for form in ("padded", "ragged"):
        d = few_documents(7, 900, form, D)
        d = Packed(d.tokens.to(dtype), d.offsets) if isinstance(d, Packed) else d.to(dtype)
        same(tokens(2, 200, D, dtype=dtype), d, winners=False)


def test_which_long_documents_are_shared(monkeypatch):
    from maxsim.kernels import hopper_launch

    shared, original = [], hopper_launch.sum_pieces
    monkeypatch.setattr(hopper_launch, "sum_pieces", lambda *args: shared.append(1) or original(*args))
    pages = tokens(50, 777, 128, seed=1)
    mask = torch.rand(50, 777, generator=torch.Generator().manual_seed(1)).cuda() < 0.5
    q = tokens(2, 333, 128)
    for d in (pages, Packed(pages.flatten(0, 1), range(0, 50 * 777 + 1, 777))):
        shared.clear()
        same(q, d, winners=False)
        assert shared
    shared.clear()
    same(q, pages, None, mask)
    same(q[:, :128], pages)
    same(q, pages[:, :300])
    same(q.float(), pages.float(), winners=False)
    maxsim.matches(q, pages, backend="hopper")
    assert shared == []


@pytest.mark.usefixtures("splits")
def test_few_long_documents_and_queries_of_any_form():
    """Empty documents, where a tile of query tokens begins too; empty queries; tokens before and behind documents."""
    q = tokens(3, 300, 128)
    mask = torch.rand(3, 300, generator=torch.Generator().manual_seed(2)).cuda() < 0.5
    mask[1] = False
    ragged = packed([0, 300, 129, 7, 256], 128, seed=3)
    for sizes in ([0, 0, 900, 0, 1500, 0], [3000], [0, 4000], [70, 2000, 0, 0, 0, 1000, 5], [600] * 7):
        d = packed(sizes, 128)
        got = same(q, d, winners=False)
        assert torch.equal(torch.isneginf(got[0]).cpu(), torch.tensor(sizes) == 0)
        same(q, d, mask, winners=False)
        same(ragged, d, winners=False)
        buffer = torch.cat([tokens(400, 128, seed=5), d.tokens, tokens(500, 128, seed=6)])
        same(q, Packed(buffer, (d.offsets + 400).cuda(), max(sizes)), winners=False)


@pytest.mark.usefixtures("splits")
def test_few_long_documents_that_are_not_finite():
    for value in (NAN, INF, -INF):
        for form in ("padded", "ragged"):
            d = few_documents(4, 1500, form)
            (d.tokens if isinstance(d, Packed) else d.view(-1, 128))[2222, 5] = value
            got = same(tokens(2, 300, 128), d, winners=False)
            assert not torch.isfinite(got).all() or value != NAN
    same(-torch.ones(2, 300, 128, device="cuda").half(), torch.full((3, 900, 128), INF, device="cuda").half())


@pytest.mark.usefixtures("splits")
def test_few_long_documents_in_a_graph():
    q, d = tokens(1, 512, 128), few_documents(20, 1000, "ragged")
    maxsim.score(q, d, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maxsim.score(q, d, backend="hopper")
    d.tokens.copy_(tokens(*d.tokens.shape, seed=2))
    graph.replay()
    assert torch.equal(got, maxsim.score(q, d, backend="triton"))


@pytest.mark.usefixtures("splits")
def test_long_wrong_offsets_on_the_device_are_clamped():
    buffer, q = tokens(4000, 64), tokens(1, 300, 64)
    for offsets in ([0, 5000, 20, -7, 4000], [0, 10**12, -(10**12), 3, 10**9], [3000, 2000, 1000, 500, 0]):
        scores = maxsim.score(q, Packed(buffer, torch.tensor(offsets, device="cuda")), backend="hopper")
        torch.cuda.synchronize()
        assert scores.shape == (1, 4)


FLOAT32 = pytest.mark.parametrize("precision", ["highest", "high"])


@FLOAT32
@pytest.mark.parametrize("NQ", [1, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_float32(precision, NQ, masked):
    torch.set_float32_matmul_precision(precision)
    sizes = lengths(300, 300, 3)
    d = packed(sizes, 128, torch.float32)
    mask = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(4)).cuda() < 0.5 if masked else None
    if masked:
        d.tokens[~mask] = NAN
    whole = same(tokens(NQ, 40, 128, dtype=torch.float32), d, None, mask)
    assert not torch.isnan(whole).any()
    for LD in (1, 64, 129):
        same(tokens(NQ, 32, 128, dtype=torch.float32), tokens(200, LD, 128, dtype=torch.float32, seed=2))


@FLOAT32
def test_float32_at_any_magnitude(precision):
    torch.set_float32_matmul_precision(precision)
    generator = torch.Generator().manual_seed(5)
    q, d = (tokens(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(((9, 32, 128), (150, 90, 128))))
    for x, power in ((q, 40), (d, 60)):
        x *= torch.exp2(torch.randint(-power, power, (*x.shape[:2], 1), generator=generator).float()).cuda()
        x *= torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float()).cuda()
    d[:, ::7] = 0
    same(q, d)
    same(q, -d)
    same(q[:2], d)  # few rows
    same(q[:1], -d)


@FLOAT32
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 30), (9, 32), (2, 300)])
def test_float32_not_finite(precision, NQ, LQ, monkeypatch):
    """Infinities have no halves, and products may leave float32's range: these are found again, whoever else is
    empty."""
    from maxsim.kernels import hopper_launch

    torch.set_float32_matmul_precision(precision)
    sizes = [0, 0, *lengths(300, 150), 0]
    d = packed(sizes, 128, torch.float32)
    offsets = d.offsets.tolist()
    for row, value in ((offsets[20], NAN), (offsets[60], INF), (offsets[90], -INF), (offsets[200], 3e38)):
        d.tokens[row, 5] = value
    q = tokens(NQ, LQ, 128, dtype=torch.float32)
    for scale in (1.0, 1e25):
        got = same(q * scale, d)
        assert torch.isneginf(got[:, torch.tensor(sizes) == 0]).all()
    assert not torch.isfinite(got[:, torch.tensor(sizes) > 0]).all()
    same(-torch.ones_like(q), Packed(torch.full_like(d.tokens, INF), d.offsets))  # −inf everywhere
    monkeypatch.setattr(hopper_launch, "PARTS_BYTES", 4 * NQ * 3 * 70)
    same(q, d)


@FLOAT32
@pytest.mark.parametrize(("NQ", "LQ"), [(1, 30), (9, 32), (2, 300)])
def test_float32_what_is_lost(precision, NQ, LQ, monkeypatch):
    """All but empty documents may be, and they are not; many of them are shared out."""
    from maxsim.kernels import hopper_few_launch, hopper_launch

    torch.set_float32_matmul_precision(precision)
    sizes = [0, *lengths(700, 60), 0]
    d = packed(sizes, 128, torch.float32)
    q = tokens(NQ, LQ, 128, dtype=torch.float32)
    every = Packed(torch.full_like(d.tokens, INF), d.offsets)
    same(q, every)
    d.tokens[:: len(d.tokens) // 50] = NAN
    same(q, d)
    for module in (hopper_few_launch, hopper_launch):
        monkeypatch.setattr(module, "score_lost", lambda *args: None)
    empty = torch.tensor(sizes) == 0
    for sign in (1, -1):
        for tokens_ in (every.tokens, torch.full_like(d.tokens, 3e38)):
            got = maxsim.score(sign * 1e10 * torch.ones_like(q), Packed(tokens_, d.offsets), backend="hopper").cpu()
            assert torch.isneginf(got[:, empty]).all()
            assert (torch.isnan(got[:, ~empty]) | torch.isposinf(got[:, ~empty])).all()


@FLOAT32
@pytest.mark.parametrize("NQ", [2, 40])
def test_float32_repeated(precision, NQ):
    """A call like an earlier one finds infinities too."""
    torch.set_float32_matmul_precision(precision)
    q, d = tokens(NQ, 32, 128, dtype=torch.float32), tokens(400, 200, 128, dtype=torch.float32)
    for value in (0.0, INF, NAN):
        d[7, 3, 9] = value
        want = maxsim.score(q, d, backend="triton")
        torch.testing.assert_close(maxsim.score(q, d, backend="hopper"), want, rtol=0, atol=0, equal_nan=True)


def uneven(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 tokens of any width, whose rows begin at multiples of 16 bytes."""
    return tokens(*shape[:-1], -(-shape[-1] // 4) * 4, dtype=torch.float32, seed=seed)[..., : shape[-1]]


def uneven_packed(sizes: list[int], D: int, seed: int = 0) -> Packed:
    return Packed(uneven(sum(sizes), D, seed=seed), torch.tensor([0, *sizes]).cumsum(0))


@FLOAT32
@pytest.mark.parametrize("D", [129, 192, 200, 256, 257, 320, 768, 1000])
def test_wide_float32(precision, D):
    torch.set_float32_matmul_precision(precision)
    d = uneven(37, 140, D, seed=1)
    for NQ, LQ in ((3, 50), (1, 30), (1, 300), (50, 32)):
        same(uneven(NQ, LQ, D), d)
    same(uneven(9, 40, D), uneven_packed(lengths(150, 50), D, seed=2))
    if D % 4:
        with pytest.raises(UnsupportedError, match="16 bytes"):
            maxsim.score(uneven(3, 50, D), d.contiguous(), backend="hopper")


@FLOAT32
@pytest.mark.parametrize("D", [192, 257])
def test_wide_float32_of_any_form(precision, D):
    torch.set_float32_matmul_precision(precision)
    q, buffer = uneven(9, 70, D), uneven(3000, D + 8, seed=4)[:, 8:]
    mask = torch.rand(9, 70, generator=torch.Generator().manual_seed(2)).cuda() < 0.5
    mask[3] = False
    d = uneven_packed(lengths(150, 90), D, seed=5)
    same(q, d, mask)
    same(uneven_packed([0, 20, 7, 300], D), d)
    kept = torch.rand(len(d.tokens), generator=torch.Generator().manual_seed(3)).cuda() < 0.3
    same(q, Views(buffer, torch.randint(0, 2900, (60,)), torch.tensor(lengths(60, 90))))
    d.tokens[~kept] = NAN
    for masked in ("exclude", "zero"):
        assert not torch.isnan(same(q, d, mask, kept, masked=masked)).any()
    same(q.permute(1, 0, 2), uneven(40, 80, D)[:, 5:60])


@FLOAT32
@pytest.mark.parametrize("D", [129, 256, 768])
def test_wide_float32_against_float64(precision, D):
    """What a product of float32 at that precision may err, also where sums grow and are never cancelled."""
    torch.set_float32_matmul_precision(precision)
    whole = torch.ones(2, 300, dtype=torch.bool, device="cuda"), torch.ones(7, 400, dtype=torch.bool, device="cuda")
    for positive in (False, True):
        q, d = uneven(2, 300, D, seed=5), uneven(7, 400, D, seed=6)
        if positive:
            q, d = q.abs_(), d.abs_()  # rows stay where they are
        found = maxsim.score(q, d, backend="hopper")
        check(
            f"scores hopper f32 {precision} wide", found, true_scores(q, d, *whole),
            plain_scores(q, d, *whole, precision), scores_scale(q, d, *whole),
        )  # fmt: skip


@FLOAT32
@pytest.mark.parametrize(("NQ", "LQ"), [(9, 32), (2, 300)])
def test_wide_float32_not_finite(precision, NQ, LQ, monkeypatch):
    """Nor what leaves float32's range between slices, where scaled, and returns: the score is the true one."""
    from maxsim.kernels import hopper_launch

    torch.set_float32_matmul_precision(precision)
    sizes = [0, 0, *lengths(300, 50), 0]
    d = packed(sizes, 200, torch.float32)
    offsets = d.offsets.tolist()
    q = tokens(NQ, LQ, 200, dtype=torch.float32)
    for row, value in ((offsets[20], NAN), (offsets[60], INF), (offsets[90], -INF), (offsets[200], 3e38)):
        d.tokens[row, row % 200] = value
    for scale in (1.0, 1e25, 1e-30):
        got = same(q * scale, d)
        assert torch.isneginf(got[:, torch.tensor(sizes) == 0]).all()
    assert not torch.isfinite(got[:, torch.tensor(sizes) > 0]).all()
    same(-torch.ones_like(q), Packed(torch.full_like(d.tokens, INF), d.offsets))  # −inf everywhere
    far = tokens(3, 40, 200, dtype=torch.float32).abs()
    far[..., :64] *= -1e36
    far[..., 64:] *= 2e36
    small = torch.ones_like(q) * 1e-37
    want = torch.einsum("qid,njd->qnij", small.double(), far.double()).amax(-1).sum(-1)
    torch.testing.assert_close(same(small, far).double(), want, rtol=1e-3, atol=0)
    monkeypatch.setattr(hopper_launch, "PARTS_BYTES", 4 * NQ * 3 * 70)
    monkeypatch.setattr(hopper_launch, "TILES_BYTES", 256 * 256 * 4)
    same(q, d)


@FLOAT32
def test_wide_float32_repeated(precision):
    """In graphs too, where what is lost changes."""
    torch.set_float32_matmul_precision(precision)
    for NQ, LQ in ((9, 32), (1, 300)):
        q, d = tokens(NQ, LQ, 256, dtype=torch.float32), tokens(100, 200, 256, dtype=torch.float32, seed=1)
        maxsim.score(q, d, backend="hopper")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = maxsim.score(q, d, backend="hopper")
        for value in (0.0, INF, NAN):
            q.copy_(tokens(*q.shape, dtype=torch.float32, seed=3))
            d[7, 3, 9] = value
            want = maxsim.score(q, d, backend="triton")
            graph.replay()
            for found in (got, maxsim.score(q, d, backend="hopper")):
                torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_problems(data):
    D = data.draw(st.sampled_from([64, 128]))
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32]))
    NQ, LQ = data.draw(st.integers(1, 2) | st.integers(1, 40)), data.draw(st.integers(1, 150))
    sizes = data.draw(st.lists(st.integers(0, 260), min_size=1, max_size=80))
    if not sum(sizes):
        sizes[0] = 1
    seed = data.draw(st.integers(0, 2**20))
    q, d = tokens(NQ, LQ, D, dtype=dtype, seed=seed), packed(sizes, D, dtype, seed=seed + 1)
    mask = None
    if data.draw(st.booleans()):
        share = data.draw(st.sampled_from([0.02, 0.5, 0.98]))
        mask = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(seed)).cuda() < share
    same(q, d, None, mask)


@pytest.mark.parametrize("NQ", [1, 9])
def test_repeated_calls_and_graphs(NQ):
    q, d = tokens(NQ, 32, 128), tokens(400, 200, 128, seed=1)
    want = maxsim.score(q, d, backend="hopper")
    for _ in range(3):
        assert torch.equal(maxsim.score(q, d, backend="hopper"), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = maxsim.score(q, d, backend="hopper")
    d.copy_(tokens(400, 200, 128, seed=2))
    graph.replay()
    assert torch.equal(got, maxsim.score(q, d, backend="triton"))
    assert torch.equal(got, maxsim.score(q, d, backend="hopper"))


def test_which_backend():
    """Enough documents, in a form it serves; the bits are the same on either side."""
    pages, texts = tokens(200, 1024, 128), tokens(1000, 300, 128)
    assert maxsim.backend_for(tokens(1, 32, 128), texts) == "hopper"
    assert maxsim.backend_for(tokens(2, 32, 128), texts) == "hopper"
    assert maxsim.backend_for(tokens(3, 17, 128), texts) == "triton"
    assert maxsim.backend_for(tokens(1, 32, 128), texts[:100]) == "triton"
    assert maxsim.backend_for(tokens(1, 32, 128), texts.view(10000, 30, 128)) == "triton"
    assert maxsim.backend_for(tokens(1, 32, 128), Packed(texts.flatten(0, 1), range(0, 300001, 30))) == "hopper"
    assert maxsim.backend_for(tokens(1, 32, 128), texts, None, torch.ones(1000, 300, dtype=torch.bool)) == "triton"
    assert torch.equal(maxsim.score(tokens(2, 32, 128), texts)[:1], maxsim.score(tokens(2, 32, 128)[:1], texts))
    assert maxsim.backend_for(tokens(1, 1024, 128), pages) == "hopper"
    assert maxsim.backend_for(tokens(1, 32, 128), pages) == "triton"
    assert maxsim.backend_for(tokens(4, 32, 128), pages[:2]) == "triton"
    assert maxsim.backend_for(tokens(128, 32, 128), pages.float().half()) == "hopper"
    assert maxsim.backend_for(tokens(128, 32, 128).float(), pages.float()) == "hopper"
    assert maxsim.backend_for(tokens(1, 32, 128).float(), pages.float()) == "triton"
    assert maxsim.backend_for(tokens(1, 32, 128).float(), texts.float()) == "hopper"
    assert maxsim.backend_for(tokens(8, 32, 640), tokens(100, 300, 640)) == "hopper"
    assert maxsim.backend_for(tokens(1, 32, 640), tokens(1000, 300, 640)) == "triton"
    for width, count in ((136, 100), (640, 20)):
        q, d = tokens(4, 32, width).float(), tokens(count, 300, width).float()
        assert maxsim.backend_for(q, d.repeat(3, 1, 1)) == "hopper"
        assert maxsim.backend_for(q, d[:5]) == "triton"
        assert maxsim.backend_for(q[:1], d.repeat(30, 1, 1)) == "hopper"
        assert maxsim.backend_for(q[:1], d.repeat(30, 1, 1), None, torch.ones(30 * count, 300) > 0) == "triton"
    assert maxsim.backend_for(tokens(8, 1024, 128), pages.view(8, 25, 1024, 128)) == "hopper"
    assert maxsim.backend_for(tokens(20, 32, 128), texts.view(20, 50, 300, 128)) == "hopper"
    assert maxsim.backend_for(tokens(20, 32, 128).float(), texts.view(20, 50, 300, 128).float()) == "hopper"
    assert maxsim.backend_for(tokens(4, 32, 128), texts[:64].view(4, 16, 300, 128)) == "triton"
    assert maxsim.backend_for(tokens(4, 200, 128), texts[:64].view(4, 16, 300, 128)) == "triton"
    assert maxsim.backend_for(tokens(1000, 32, 128), texts[:, None]) == "triton"
    mask = torch.arange(300) < torch.randint(0, 300, (1000, 1))
    assert maxsim.backend_for(tokens(128, 32, 128), texts, None, mask, "zero") == "hopper"
    leaf = tokens(128, 32, 128).requires_grad_()
    maxsim.score(leaf, pages).sum().backward()
    want = torch.autograd.grad(maxsim.score(leaf, pages, backend="triton").sum(), leaf)[0]
    assert torch.equal(leaf.grad, want)
    batch = maxsim.score(tokens(128, 32, 128), pages)
    assert torch.equal(maxsim.score(tokens(128, 32, 128)[5], pages)[0], batch[5])


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("normalize", "normalise"),
        ("wide candidates", "256"),
        ("wide float32 candidates", "128"),
        ("very many candidates", "at most 5"),
        ("unaligned", "16 bytes"),
        ("columns", "contiguous"),
        ("no rows", "rows"),
        ("no tokens", "rows"),
        ("overlap", "overlap"),
        ("shared rows and a mask", "mask"),
        ("long query", "a query"),
        ("guessed length", "max_length"),
        ("strided mask", "mask"),
    ],
)
def test_what_it_does_not_serve(what, reason, monkeypatch):
    from maxsim.backends import hopper

    q, d = tokens(4, 32, 64), tokens(5, 20, 64)
    options: dict = {}
    if what == "normalize":
        options = {"normalize": True}
    elif what == "wide candidates":
        q, d = tokens(4, 32, 264), tokens(4, 3, 20, 264)
    elif what == "wide float32 candidates":
        q, d = tokens(4, 32, 136).float(), tokens(4, 3, 20, 136).float()
    elif what == "very many candidates":
        q, d = tokens(2, 300, 64), tokens(2, 3, 20, 64)
        monkeypatch.setattr(hopper, "PARTS_BYTES", 80)
    elif what == "unaligned":
        d = tokens(5 * 20 * 64 + 1)[1:].view(5, 20, 64)
    elif what == "columns":
        d = tokens(5, 64, 20).transpose(1, 2)
    elif what == "no rows":
        d = Packed(tokens(1, 64)[:0], [0, 0, 0])
    elif what == "no tokens":
        d = d[:, :0]
    elif what == "overlap":
        d = Packed(tokens(1, 64).expand(9, 64), [0, 4, 9])
    elif what == "shared rows and a mask":
        d, options = d[:1].expand(5, 20, 64), {"document_mask": torch.ones(5, 20, dtype=torch.bool)}
    elif what == "guessed length":
        q = Packed(q.flatten(0, 1), torch.arange(0, 129, 32, device="cuda"))
    elif what == "long query":
        q = tokens(1, 1, 64).expand(1, 2**31, 64)
    elif what == "strided mask":
        options = {"document_mask": torch.ones(20, 5, dtype=torch.bool, device="cuda").T}
    with pytest.raises(UnsupportedError, match=reason):
        maxsim.score(q, d, backend="hopper", **options)
    if what != "long query":
        maxsim.score(q, d, **options)  # another serves it


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["padded", "packed", "masked", "zero"])
@pytest.mark.parametrize("LQ", [30, 100, 300])
def test_chosen_pairs(LQ, form, dtype):
    """In any order, some often, on a GPU clamped; scores and winners."""
    q, d, options = tokens(9, LQ, 128, dtype=dtype), tokens(20, 90, 128, dtype=dtype, seed=1), {}
    if form == "packed":
        d = packed([7, 0, 90, 1, 41] * 4, 128, dtype)
        q = Packed(
            q.flatten(0, 1)[: 8 * LQ + 5], torch.tensor([*range(0, 9 * LQ, LQ), 8 * LQ + 5]).cuda(), max_length=LQ
        )
    elif form != "padded":
        generator = torch.Generator().manual_seed(2)
        draw = [torch.rand(*x.shape[:2], generator=generator).cuda() < 0.6 for x in (q, d)]
        draw[1][3] = False
        options = {"query_mask": draw[0], "document_mask": draw[1], "masked": "zero" if form == "zero" else "exclude"}
    pairs = torch.stack([torch.arange(300) % 9, torch.arange(300) * 7 % 20], 1).cuda()
    pairs[5] = torch.tensor([-3, 99])
    want = maxsim.score_pairs(q, d, pairs, **options, backend="triton")
    assert torch.equal(maxsim.score_pairs(q, d, pairs, **options, backend="hopper"), want)
    if form == "packed":
        return
    leaves = [x.requires_grad_() for x in (q, d)]
    upstream = tokens(300, seed=3, dtype=torch.float32)
    found = [
        torch.autograd.grad(maxsim.score_pairs(q, d, pairs, **options, backend=name), leaves, upstream)
        for name in ("triton", "hopper")
    ]
    assert all(map(torch.equal, *found))


def test_chosen_pairs_that_are_not_served():
    q, pairs = tokens(4, 32, 64), torch.tensor([[0, 1]])
    with pytest.raises(UnsupportedError, match="codes of all documents"):
        maxsim.score_pairs(q, maxsim.quantize(tokens(5, 20, 64), "int8"), pairs, backend="hopper")
    mask = torch.ones(32, 4, dtype=torch.bool, device="cuda").T
    with pytest.raises(UnsupportedError, match="rows of one matrix"):
        maxsim.score_pairs(q, tokens(5, 20, 64), pairs, mask, backend="hopper")


def test_long_documents_have_wide_winners():
    d = packed([70000, 3, 66000], 64)
    d.tokens[69990] = 9
    same(tokens(3, 40, 64), d)
    assert (maxsim.matches(torch.ones_like(tokens(1, 70, 64)), d, backend="hopper").index[0, 0] == 69990).all()


def test_wrong_offsets_on_the_device_are_clamped():
    buffer, q = tokens(400, 64), tokens(5, 32, 64)
    for offsets in ([0, 500, 20, -7, 400], [0, 10**12, -(10**12), 3, 10**9], [300, 200, 100, 50, 0]):
        d = Packed(buffer, torch.tensor(offsets, device="cuda"))
        scores = maxsim.score(q, d, backend="hopper")
        torch.cuda.synchronize()
        assert scores.shape == (5, 4)


@pytest.mark.gpus
def test_another_card_than_the_current():
    q, d = tokens(40, 32, 128), tokens(500, 90, 128)
    want = maxsim.score(q, d, backend="hopper")
    for _ in range(2):
        assert torch.equal(maxsim.score(q.to("cuda:1"), d.to("cuda:1"), backend="hopper").to("cuda:0"), want)
    assert torch.cuda.current_device() == 0


@pytest.mark.slow
def test_past_two_to_the_31_elements():
    T = 2**24 + 64
    buffer = torch.zeros(T, 128, dtype=torch.float16, device="cuda")
    buffer[-1, 0] = 1
    offsets = torch.arange(0, T + 1, 64)
    q = torch.zeros(4, 32, 128, dtype=torch.float16, device="cuda")
    q[:, 0, 0] = 1
    got = maxsim.score(q, Packed(buffer, offsets), backend="hopper")
    assert got[:, -1].tolist() == [1] * 4
    assert not got[:, :-1].any()
