"""Documents to int8 and fp8: which codes, which scales, what is refused, what is selected."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from codes import CODECS, SCALED, SCALES, quantised_tokens, same_documents
from forms import DOCUMENT_FORMS, build, make_side
from lanes import random

import maxsim
from maxsim import Packed, Quantized, Views, quantize

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("codec", SCALED)
def test_codes_are_the_oracles(codec, scale):
    """Sizes from underflow to overflow, ties, zero tokens."""
    random_ = np.random.default_rng(5)
    items = [random_.standard_normal((n, 9)).astype(np.float32) * np.float32(s) for n, s in
             ((4, 1), (0, 1), (3, 1e-42), (2, 1e38), (5, 3e-5), (1, 0))]  # fmt: skip
    items[0][1] = 0
    items[0][2] = np.arange(9) - 4.5  # a document's own ties
    items[4][0] *= 1000
    made = quantize(items, codec, scale=scale)
    assert made.saturated == 0
    found = made.dequantize(torch.float64)
    for i, item in enumerate(items):
        own = found.tokens[found.offsets[i] : found.offsets[i + 1]].numpy()
        # scale times code is rounded to float32 where documents are dequantised, never where they are scored
        wanted = quantised_tokens(item.astype(np.float64), codec, scale).astype(np.float32)
        assert np.array_equal(own, wanted)


def test_every_code_of_fp8():
    """All 253 finite codes come back, and what lies between two of them goes to the nearer, ties to even."""
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].double().unique()
    assert len(every) == 253
    between = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, between, between * (1 + 2**-20), between * (1 - 2**-20)])
    values = torch.cat([values, torch.tensor([448.0])])
    made = quantize(values.float()[None, :, None], "fp8")
    assert made.parameters.scale.tolist() == [1]
    assert np.array_equal(
        made.dequantize(torch.float64)[0].numpy(), quantised_tokens(values.numpy()[:, None], "fp8", "document")
    )


@pytest.mark.parametrize("form", DOCUMENT_FORMS)
@pytest.mark.parametrize("masks", ["none", "holes"])
@pytest.mark.parametrize("scale", SCALES)
def test_codes_do_not_depend_on_the_form(form, masks, scale):
    """NaN in padding, gaps and behind masks is never looked at."""
    side = make_side(3, [7, 0, 3, 17, 1, 4], 19, masks)
    built = build(form, side, torch.float32, "cpu", copies=2)
    made = quantize(built.value(), "int8", built.mask, scale=scale)
    assert len(made) == len(side.items) * (2 if made.per_query else 1)
    found = made[:0].dequantize() if not len(made) else made.flat().dequantize(torch.float64)
    seen = built.seen
    for i, (item, keep) in enumerate(
        zip(seen.items, seen.masks or [np.ones(len(x), bool) for x in seen.items], strict=True)
    ):
        wanted = np.zeros_like(item)
        wanted[keep] = quantised_tokens(item[keep], "int8", scale).astype(np.float32)
        own = found.tokens[found.offsets[i] : found.offsets[i + 1]].numpy()
        assert np.array_equal(own, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    d = random(1, 4, 5, 24, dtype=dtype)
    made = quantize(d)
    assert made.parameters.source == dtype
    assert torch.equal(made.codes, quantize(d.float()).codes)


def test_a_number_as_scale_saturates_and_counts():
    d = torch.tensor([[[1.0, -1.0, 0.5, 127.4, -127.4]], [[128.0, -129.0, 1e30, -300.0, 127.0]]])
    made = quantize(d, scale=1.0)
    assert made.codes.tolist() == [[[1, -1, 0, 127, -127]], [[127, -127, 127, -127, 127]]]
    assert made.saturated == 4
    assert quantize(d, "fp8", scale=1).saturated == 1
    for wrong in (0, -1.0, INF, NAN, 1e-40, "tokens", [1.0], True):
        with pytest.raises(ValueError, match="scale must"):
            quantize(d, scale=wrong)


@pytest.mark.parametrize("codec", SCALED)
@pytest.mark.parametrize("scale", SCALES)
def test_zero_and_constant_rows(codec, scale):
    """Case 42: no division of zero by zero; constant rows come back within half a step."""
    d = torch.zeros(3, 2, 8)
    d[0, 1], d[1] = 5, -3e-39
    made = quantize(d, codec, scale=scale)
    back = made.dequantize()
    assert bool(back.isfinite().all())
    assert torch.equal(back[0, 1], torch.full((8,), 5.0))
    assert not back[2].any()
    assert not back[0, 0].any()
    assert maxsim.score(torch.ones(1, 1, 8), made).tolist()[0][::2] == [40, 0]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("form", ["padded", "transposed", "packed", "views"])
def test_not_finite_is_refused_with_its_place(value, form):
    d = random(2, 5, 6, 7)
    d[3, 4, 2] = value
    if form == "transposed":
        d = d.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "packed":
        d = Packed(d.view(-1, 7), torch.arange(6) * 6)
    if form == "views":
        d = Views(d.view(-1, 7), torch.arange(5) * 6, torch.full((5,), 6))
    with pytest.raises(ValueError, match=rf"cannot quantise {value}, in document 3, token 4, column 2"):
        quantize(d)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[3, 4] = False
    kept = quantize(d, "int8", mask if form in ("padded", "transposed") else mask.view(-1))
    assert not kept.flat().codes[22].any()
    big = torch.full((1, 1, 2), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"1e\+300"):  # beyond float32
        quantize(big)


def test_blocks_change_nothing(monkeypatch):
    from maxsim import stream

    forms = [build(form, make_side(9, [7, 0, 3, 17, 1, 4], 19, "holes"), torch.float32, "cpu") for form in
             ("strided", "packed64", "transposed")]  # fmt: skip
    for built in forms:
        whole = {scale: quantize(built.value(), "int8", built.mask, scale=scale) for scale in SCALES}
        for rows in (1, 3, 7, 1000):
            monkeypatch.setattr(stream, "BLOCK", 19 * rows)
            for scale in SCALES:
                assert same_documents(quantize(built.value(), "int8", built.mask, scale=scale), whole[scale])
        monkeypatch.undo()


def test_normalize():
    d = random(3, 4, 5, 16)
    d[1, 2] = 0
    made = quantize(d, normalize=True)
    assert same_documents(
        made[:0], quantize(torch.nn.functional.normalize(d.double(), dim=-1).float(), normalize=True)[:0]
    )
    assert (made.dequantize() - torch.nn.functional.normalize(d, dim=-1)).abs().max() < 0.01
    with pytest.raises(TypeError, match="normalize must be"):
        quantize(d, normalize=1)


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "empty list"),
        (torch.ones(2, 3, 4, dtype=torch.int8), TypeError, "int8"),
        (torch.ones(2, 3, 0), ValueError, "at least one column"),
        (torch.ones(4), ValueError, "shape"),
        (quantize(torch.ones(1, 1, 1)), TypeError, "quantised already"),
        (torch.ones(2, 3, 4, device="meta"), ValueError, "meta"),
        ("text", TypeError, "str"),
        (Packed(torch.ones(3, 2), torch.tensor([0, 3])), ValueError, "mask"),
    ],
)
def test_refused_documents(documents, error, message):
    mask = torch.ones(2, dtype=torch.bool) if isinstance(documents, Packed) else None
    with pytest.raises(error, match=message):
        quantize(documents, "int8", mask)


def test_unknown_codec():
    with pytest.raises(ValueError, match=r"'int8', 'fp8'.*got 'int4'"):
        quantize(torch.ones(1, 1, 4), "int4")


def test_selecting():
    d = [random(n, 1 + n % 4, 8) for n in range(7)]
    padded = random(50, 7, 4, 8)
    q = random(99, 2, 3, 8)
    for documents in (d, padded):
        for scale in SCALES:
            made = quantize(documents, scale=scale)
            scores = maxsim.score(q, made)
            chosen = {
                "slice": (slice(2, 5), [2, 3, 4]),
                "steps": (slice(None, None, 2), [0, 2, 4, 6]),
                "back": (slice(None, None, -3), [6, 3, 0]),
                "one": (3, [3]),
                "last": (-1, [6]),
                "list": ([5, 0, 5], [5, 0, 5]),
                "numpy": (np.array([1, 2]), [1, 2]),
                "mask": (torch.arange(7) > 4, [5, 6]),
                "none": ([], []),
                "empty slice": (slice(5, 2), []),
            }
            for index, wanted in chosen.values():
                some = made[index]
                assert len(some) == len(wanted)
                assert torch.equal(maxsim.score(q, some), scores[:, wanted])
                again = some.compact()
                assert torch.equal(maxsim.score(q, again), scores[:, wanted])
                back = some.dequantize()
                assert len(back) == len(wanted)
                if wanted:
                    assert torch.equal(maxsim.score(q, back), maxsim.score(q, made.dequantize())[:, wanted])
            table = torch.tensor([[1, 2, 3], [6, 6, 0]])
            assert torch.equal(maxsim.score(q, made[table]), scores.gather(1, table))
            with pytest.raises(TypeError, match="candidates"):
                made[table][0]
    made = quantize(padded)
    for wrong in (7, -8, [0, 9], torch.zeros(3, dtype=torch.bool), 1.5, torch.zeros(1, 1, 1, dtype=torch.long)):
        with pytest.raises(IndexError):
            made[wrong]
    with pytest.raises(TypeError):
        made["a"]


def test_slices_read_codes_in_place():
    made = quantize(random(1, 6, 4, 8))
    assert made[2:4].codes.data_ptr() == made.codes[2].data_ptr()
    assert made[[4, 1]].codes.data_ptr() == made.codes.data_ptr()


def test_copies_and_other_processes():
    q, made = random(1, 2, 3, 8), quantize([random(n, 1 + n, 8) for n in range(5)], scale="token")
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert same_documents(again, made)
        assert torch.equal(maxsim.score(q, again), maxsim.score(q, made))
    assert copy.copy(made).codes.data_ptr() == made.codes.data_ptr()


@pytest.mark.parametrize("codec", CODECS)
def test_pickles(codec, tmp_path):
    """By every protocol, and PyTorch's own; whole, selected, candidates, masked, without documents."""
    options = {"parts": 4} if codec == "pq" else {}
    q, d = random(1, 2, 3, 8), random(2, 6, 4, 8)
    whole = quantize(d, codec, torch.arange(24).view(6, 4) % 5 > 0, **options)
    for made in (
        whole,
        whole[1:3],
        whole[::2],
        whole[[[0, 1], [1, 5]]],
        whole[:0],
        quantize(list(d), codec, **options),
    ):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            again = pickle.loads(pickle.dumps(made, protocol))
            assert same_documents(again, made)
            assert again.codes.dtype == made.codes.dtype
            assert torch.equal(maxsim.score(q, again), maxsim.score(q, made))
        torch.save(made, tmp_path / "made")
        assert same_documents(torch.load(tmp_path / "made", weights_only=False), made)
        assert same_documents(copy.deepcopy(made), made)
    for form in (Packed(d.view(-1, 8), torch.arange(7) * 4), Views(d.view(-1, 8), [5, 0], [3, 9])):
        assert torch.equal(maxsim.score(q, pickle.loads(pickle.dumps(form))), maxsim.score(q, form))


SELECTIONS = (
    slice(None), slice(1, 4), slice(None, None, 2), slice(None, None, -1), [5, 0, 5], [3], 2, [], slice(4, 2),
    torch.arange(6) % 2 > 0, [[0, 1, 2], [5, 5, 0]],
)  # fmt: skip


@pytest.mark.parametrize("index", SELECTIONS, ids=str)
@pytest.mark.parametrize("form", ["padded", "list", "views"])
def test_masks_of_selected_documents(index, form):
    """A mask a document, whichever were selected and however often; one kept at quantisation stays."""
    d, q = random(1, 6, 4, 8), random(2, 2, 3, 8)
    kept, more = (torch.rand(6, 4, generator=torch.Generator().manual_seed(n)) < 0.7 for n in (0, 1))
    if form == "padded":
        made, items, masks = quantize(d, "int8", kept), list(d), list(more)
        both = list(kept & more)
    else:
        items, masks = ([x[:n] for x, n in zip(each, [3, 0, 4, 1, 4, 2], strict=True)] for each in (d, more))
        if form == "list":
            made = quantize(items, "int8", [x[: len(y)] for x, y in zip(kept, items, strict=True)])
        else:
            made = quantize(Views(d.view(-1, 8), torch.arange(6) * 4, [len(x) for x in items]), "int8", kept.view(-1))
        both = [x & y[: len(x)] for x, y in zip(masks, kept, strict=True)]
    some = made[index]
    if isinstance(index, slice):
        index = list(range(6)[index])
    chosen = torch.as_tensor(index)
    chosen = chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen.long().reshape(-1, *chosen.shape[1:])
    flat = chosen.reshape(-1).tolist()
    full = torch.stack([maxsim.score(q, made[n], None, [masks[n]])[:, 0] for n in range(6)], 1)
    wanted = full.gather(1, chosen) if chosen.ndim == 2 else full[:, flat]
    single = torch.stack([maxsim.score(q, made[n].dequantize(), None, both[n])[:, 0] for n in range(6)], 1)
    assert torch.equal(full.isinf(), single.isinf())
    assert (full - single)[full.isfinite()].abs().max() < 0.3
    given = [masks[n] for n in flat]
    longest = 4 if form == "padded" else max((len(x) for x in given), default=0)
    padded = torch.zeros(len(given), longest, dtype=torch.bool)
    for row, mask in zip(padded, given, strict=True):
        row[: len(mask)] = mask
    forms = [given, padded, padded.numpy()]
    if chosen.ndim == 2:
        forms = [[given[:3], given[3:]], padded, padded.view(2, 3, -1)]
    elif some.starts is None:
        forms = [padded, padded.numpy()]
    for mask in forms:
        assert torch.equal(maxsim.score(q, some, None, mask), wanted)
        assert maxsim.error_bound(q, some, None, mask).shape == wanted.shape
        if chosen.ndim == 1:
            assert maxsim.matches(q, some, None, mask).index.shape == (2, len(flat), 3)
            assert maxsim.topk(q, some, 2, None, mask).scores.shape == (2, min(2, len(flat)))
    if len(flat) and chosen.ndim == 1 and some.starts is not None:
        longer = [torch.ones(len(x) + 1, dtype=torch.bool) for x in given]
        for wrong in (given[1:], [*given, given[0]], longer, padded[:, 1:]):
            with pytest.raises(ValueError, match="mask must"):
                maxsim.score(q, some, None, wrong)


@pytest.mark.parametrize("index", [slice(None, None, 2), slice(1, 4), [5, 0, 5], [3]], ids=str)
def test_selected_documents_decoded_with_their_mask(index):
    d, q = random(1, 6, 4, 8), random(2, 2, 3, 8)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    chosen = list(range(6)[index]) if isinstance(index, slice) else index
    for made in (quantize(d, "int8", mask), quantize(list(d), "int8", list(mask))):
        wanted = maxsim.score(q, made.dequantize(), None, made.mask)[:, chosen]
        some = made[index]
        assert torch.equal(maxsim.score(q, some.dequantize(), None, some.compact().mask), wanted)


def test_masks_by_rows_of_selected_documents():
    """One entry a row of codes, as the buffer of `Views` has it."""
    d, q = random(1, 6, 4, 8), random(2, 2, 3, 8)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    some = quantize(d)[::2]
    assert torch.equal(maxsim.score(q, some, None, mask.view(-1)), maxsim.score(q, some, None, mask[::2]))


def test_what_it_says_of_itself():
    made = quantize(random(1, 6, 4, 8), scale="token")
    assert (made.codec, made.width, made.bytes_a_token, str(made.device)) == ("int8", 8, 10, "cpu")
    assert made.nbytes == 6 * 4 * 10 + 3 * 6 * 4
    assert "6 documents, int8 [6, 4, 8] for width 8, 10 bytes a token" in repr(made)
    assert made.to("cpu") is made
    assert isinstance(made, Quantized)
    with pytest.raises(TypeError, match=r"dtype must be one of floats, got torch\.int8"):
        made.dequantize(torch.int8)
