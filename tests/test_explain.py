"""Explanations as data: the same numbers as `score` and `matches`, tokens as people read them, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from lanes import NAMES, integers

import maxsim
from maxsim import reference
from maxsim.explaining import page
from maxsim.explaining.images import data_uri, patch_grid
from maxsim.explaining.pieces import Cell, pieces_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def same(found, expected):
    """Bits, NaN being NaN."""
    torch.testing.assert_close(found, expected.to(found), rtol=0, atol=0, equal_nan=True)


def check(q, d, lane, **options):
    """An explanation, held to `score`, `matches` and its own maxima."""
    found = maxsim.explain(q, d, backend=lane.backend, **options)
    matches = lane.matches(q, d, **options)
    same(found.index, matches.index.reshape(-1)[: len(found.index)])
    same(found.similarity, matches.similarity.reshape(-1)[: len(found.index)])
    same(torch.tensor(found.score, dtype=torch.float64), lane.score(q, d, **options).reshape(()).double().cpu())
    if found.similarities.shape[1]:
        best = found.similarities.max(1).values
        same(best[found.query_mask], found.similarity[found.query_mask])
    assert found.backend == lane.backend
    assert [match.index for match in found.matches] == found.index.tolist()
    if math.isfinite(found.score) and abs(found.score) > 1e-3:
        assert float(found.share.sum()) == pytest.approx(1, rel=1e-3)
        assert all(match.share is not None for match in found.matches)
    else:
        assert all(match.share is None for match in found.matches)
    found.html()  # a page of anything
    return found


def test_numbers_are_those_of_score_and_matches(lane, dtype):
    q, d = randn(7, 32, dtype=dtype, device=lane.device), randn(40, 32, seed=1, dtype=dtype, device=lane.device)
    found = check(q, d, lane)
    assert found.similarities.shape == (7, 40)
    assert found.similarity.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    index, value = reference.matches(q.double().cpu().numpy(), d.double().cpu().numpy())
    exact = reference.similarities(q.double().cpu().numpy(), d.double().cpu().numpy())
    tolerance = {"f16": 2e-5, "bf16": 2e-5, "f32": 2e-5, "f64": 1e-12}[NAMES[dtype]]
    np.testing.assert_allclose(found.similarities.double().numpy(), exact, atol=tolerance)
    np.testing.assert_allclose(found.similarity.double().numpy(), value, atol=tolerance)
    assert found.index.tolist() == index.tolist()


@pytest.mark.parametrize("masked", ["exclude", "zero"])
@pytest.mark.parametrize("normalize", [False, True])
def test_masks_and_norms(lane, masked, normalize):
    if lane.backend == "hopper" and normalize:
        pytest.skip("Hopper leaves normalize to the portable kernels")
    q, d = randn(6, 32, device=lane.device), randn(30, 32, seed=1, device=lane.device) - 0.4
    q_mask, d_mask = torch.arange(6) % 3 != 1, torch.arange(30) % 4 != 0
    d[4] = math.nan  # behind the mask
    found = check(q, d, lane, query_mask=q_mask, document_mask=d_mask, masked=masked, normalize=normalize)
    assert found.query_mask.tolist() == q_mask.tolist()
    assert found.document_mask.tolist() == d_mask.tolist()
    assert (found.similarities[q_mask][:, ~d_mask] == (0 if masked == "zero" else -math.inf)).all()
    assert found.index[~q_mask].tolist() == [-1, -1]
    assert math.isfinite(found.score)
    clean = d.nan_to_num(0.0).double().cpu().numpy()
    expected = reference.score(q.double().cpu().numpy(), clean, q_mask.numpy(), d_mask.numpy(), masked, normalize)
    assert found.score == pytest.approx(expected, abs=1e-4)


def test_a_masked_zero_that_wins_is_no_token(lane):
    q, d = torch.ones(2, 8, device=lane.device), -torch.ones(3, 8, device=lane.device)
    mask = torch.tensor([True, True, False])
    found = check(q, d, lane, document_mask=mask, masked="zero")
    assert found.index.tolist() == [-1, -1]
    assert found.similarity.tolist() == [0, 0]
    assert "a masked token" in found.html()
    assert check(q, d, lane, document_mask=mask).index.tolist() == [0, 0]


@pytest.mark.parametrize("tokens", [0, 3])
def test_empty_documents(lane, tokens):
    q, d = randn(4, 16, device=lane.device), randn(tokens, 16, device=lane.device)
    found = check(q, d, lane, document_mask=torch.zeros(tokens, dtype=torch.bool))
    assert found.score == -math.inf
    assert found.index.tolist() == [-1] * 4
    assert "its score is −∞" in found.html()


def test_empty_queries(lane):
    d = randn(3, 16, device=lane.device)
    assert check(d[:0], d, lane).score == 0
    assert check(d[:0], d[:0], lane).score == -math.inf
    assert check(d, d, lane, query_mask=torch.zeros(3, dtype=torch.bool)).score == 0


def test_nan_and_infinity(lane):
    q, d = randn(3, 16, device=lane.device), randn(9, 16, seed=1, device=lane.device)
    d[5, 3] = math.nan
    found = check(q, d, lane)
    assert found.index.tolist() == [5, 5, 5]
    assert "The score is not a number" in found.html()
    q, d = torch.ones(2, 16, device=lane.device), torch.ones(4, 16, device=lane.device)
    d[2, 0] = math.inf
    found = check(q, d, lane)
    assert found.index.tolist() == [2, 2]
    assert found.score == math.inf


def test_forms(lane):
    q, d = integers(0, 5, 16, device=lane.device), integers(1, 12, 16, device=lane.device)
    buffer = torch.cat([randn(3, 16, seed=2, device=lane.device), d, randn(4, 16, seed=3, device=lane.device)])
    whole = check(q, d, lane)
    for form in (
        (q[None], d[None]), ([q], [d]), (q, d[None, None]), (q, maxsim.Packed(d, [0, 12])),
        (maxsim.Views(buffer, [3], [5]), d), (q, maxsim.Views(buffer, [3], [12])), (q, [d.cpu().numpy()]),
    ):  # fmt: skip
        if isinstance(form[1], list) and lane.device != "cpu":
            continue
        found = maxsim.explain(*form, backend=lane.backend)
        if isinstance(form[0], maxsim.Views):
            same(found.index, maxsim.matches(d[:5], d, backend=lane.backend).index[0, 0])
            continue
        same(found.index, whole.index)
        same(found.similarities, whole.similarities)
        assert found.score == whole.score
    strided = torch.stack([d, d], 1).flatten(1)[:, :16]
    same(maxsim.explain(q, strided, backend=lane.backend).similarities, whole.similarities)


@pytest.mark.parametrize("codec", ["int8", "fp8", "residual", "pq"])
def test_documents_as_codes(codec):
    documents = [randn(n, 32, seed=n) for n in (5, 40, 9, 300)]
    more = {"residual": {"bits": 2}, "pq": {"parts": 8}}.get(codec, {})
    codes, q = maxsim.quantize(documents, codec, **more), randn(6, 32)
    for n in (1, 2):
        found = maxsim.explain(q, codes[n])
        matches = maxsim.matches(q, codes[n])
        same(found.index, matches.index[0, 0])
        same(found.similarities.max(1).values, matches.similarity[0, 0])
        assert found.score == float(maxsim.score(q, codes[n]))
    tokens = maxsim.quantize(documents[1][None], "int8", scale="token")
    same(maxsim.explain(q, tokens).similarities.max(1).values, maxsim.matches(q, tokens).similarity[0, 0])


def test_nothing_has_a_gradient():
    q, d = randn(3, 8).requires_grad_(), randn(4, 8, seed=1).requires_grad_()
    assert not maxsim.explain(q, d).similarities.requires_grad


def test_matches_by_their_texts():
    q, d = torch.eye(4)[:3], torch.eye(4)[[2, 1, 3]] * 2
    found = maxsim.explain(
        q, d, query_tokens=["a", "b", "c"], document_text="see bee", document_tokens=[(0, 3), (4, 5), (5, 7)]
    )
    assert found.matches[1] == maxsim.explaining.Match("b", "b", 2.0, 0.5, 1, 1)
    assert [(match.query, match.document) for match in found.matches] == [("a", "see"), ("b", "b"), ("c", "see")]
    unnamed = maxsim.explain(q, d).matches
    assert [(match.query, match.document, match.index) for match in unnamed[1:]] == [(None, None, 1), (None, None, 0)]
    assert maxsim.explain(q, d, torch.tensor([True, True, False])).matches[2] == (None, None, 0.0, 0.0, 2, -1)


@pytest.mark.parametrize(
    ("names", "text", "shown"),
    [
        ("[CLS] the un ##believ ##able !", "[CLS] the unbelievable !", "[CLS] the un believ able !"),
        ("<s> ▁the ▁un believable !", "<s> the unbelievable!", "<s> the un believable !"),
        ("<s> The Ġun believable ĠcafÃ© Ċ", "<s>The unbelievable café\n", "<s> The un believable café #5"),
        ("red green ", "red green ", "red green #2"),
    ],
)  # fmt: skip
def test_names_of_tokens(names, text, shown):
    names = names.split(" ")
    pieces = pieces_of(len(names), None, names, "query")
    assert pieces.text == text
    assert [pieces.label(i) for i in range(len(names))] == shown.split(" ")
    assert [i for cell in pieces.cells() for i in cell.tokens] == list(range(len(names)))
    assert all((cell.kind == "special") == (cell.text in ("[CLS]", "<s>", "#2")) for cell in pieces.cells())


def test_bytes_of_one_character_stand_together():
    pieces = pieces_of(4, None, ["Hi", "ĠðŁ", "ĺ", "Ģ"], "query")
    assert pieces.text == "Hi 😀"
    assert pieces.cells() == [Cell("Hi", (0,)), Cell(" "), Cell("😀", (1, 2, 3))]
    assert pieces_of(2, None, ["Ġhi", "Ã"], "query").text  # half a character: names as they are


def test_pieces_in_their_text():
    text = "Unplugging, then ẁ̃ait   beyond the end"
    pieces = pieces_of(4, text, [(0, 2), (2, 6), (6, 10), (12, 16)], "document")
    assert [pieces.word(i) for i in range(4)] == [
        ("", "Un", "plugging"), ("Un", "plug", "ging"), ("Unplug", "ging", ""), ("", "then", "")
    ]  # fmt: skip
    assert "".join(cell.text for cell in pieces.cells()) == text
    assert pieces.cells()[3:5] == [Cell(", "), Cell("then", (3,))]
    assert pieces.cells()[-1].kind == "beyond"
    assert pieces_of(2, "日本語", [(0, 1), (1, 2)], "document").word(0) == ("", "日", "")
    emoji = pieces_of(3, "a😀", [(0, 1), (1, 2), (1, 2)], "document")
    assert emoji.cells() == [Cell("a", (0,)), Cell("😀", (1, 2))]
    assert len(pieces_of(1, "a" * 10**6, [(0, 1)], "document").cells()[-1].text) == 5001
    mixed = pieces_of(4, "ab c", ["[Q]", (0, 2), (3, 4), "[MASK]"], "query")
    assert mixed.cells() == [
        Cell("[Q]", (0,), "special"), Cell("ab", (1,)), Cell(" "), Cell("c", (2,)), Cell("[MASK]", (3,), "special")
    ]  # fmt: skip
    assert [mixed.token(i) for i in range(4)] == ["[Q]", "ab", "c", "[MASK]"]
    assert mixed.word(0) == ("", "[Q]", "")
    marks = pieces_of(2, "ab", [(0, 0), (0, 2)], "document")
    assert marks.cells() == [Cell("#0", (0,), "special"), Cell("ab", (1,))]


def test_images():
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert data_uri(PNG) == data_uri(bytearray(PNG)) == data_uri(uri) == uri
    assert data_uri(b"\xff\xd8\xff\xe0").startswith("data:image/jpeg;base64,")
    assert data_uri(b"RIFF0000WEBPVP8 ").startswith("data:image/webp;base64,")

    class Saves:
        def save(self, file, kind):
            assert isinstance(file, io.BytesIO)
            assert kind == "PNG"
            file.write(PNG)

    assert data_uri(Saves()) == uri
    for wrong, error in (
        (b"<svg onload='x'>", "must be PNG, JPEG, GIF or WebP, got bytes that begins with b'<svg onl'"),
        ("data:text/html;base64,PHNjcmlwdD4=", "must be PNG"),
        ("data:image/png,abc", "must be a data URI of PNG"),
        ("data:image/png;base64,a!", "must be a data URI of PNG"),
    ):
        with pytest.raises(ValueError, match=re.escape(error)):
            data_uri(wrong)
    with pytest.raises(TypeError, match=r"PIL\.Image\.fromarray"):
        data_uri(np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(OSError, match="gone"):
        data_uri("gone.png")


def test_images_of_modes_that_png_has_not():
    """A scan may be CMYK: what PIL cannot save it shows in RGB."""

    class Scan:
        def __init__(self, mode):
            self.mode = mode

        def convert(self, mode):
            return Scan(mode)

        def save(self, file, kind):
            file.write(b"half")
            if self.mode != "RGB":
                raise OSError(f"cannot write mode {self.mode} as {kind}")
            file.seek(0)
            file.truncate()
            file.write(PNG)

    assert data_uri(Scan("CMYK")) == data_uri(Scan("RGB")) == data_uri(PNG)


def test_patches():
    assert patch_grid((2, 3), 6).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert patch_grid([2, 2, 1], 6).tolist() == [[1, 2], [3, 4]]
    assert patch_grid(np.array([[4, -1], [0, 2]]), 6).tolist() == [[4, -1], [0, 2]]
    assert patch_grid([[1, 1], [0, 0]], 2).tolist() == [[1, 1], [0, 0]]
    table = np.arange(4).reshape(2, 2)
    frozen = table.copy()
    frozen.flags.writeable = False
    for same in (frozen, table.astype(">i8"), table[::-1][::-1], torch.tensor(table)):
        assert patch_grid(same, 4).tolist() == [[0, 1], [2, 3]]
    assert patch_grid(table[::-1], 4).tolist() == [[2, 3], [0, 1]]
    for wrong, error in (
        ((2, 4), "2 × 4 do not lie in a document of 6 tokens"),
        ((2, 3, 1), "2 × 3 from token 1 on do not lie"),
        ((0, 3), "0 × 3 do not lie"),
        ([[0, 6]], "must be tokens 0 to 5, or -1 for none, got 0 to 6"),
        ([[0, -2]], "got -2 to 0"),
        ([1], r"got shape \[1\]"),
        ([[0, 1], [2]], "rows of different lengths"),
    ):
        with pytest.raises(ValueError, match=error):
            patch_grid(wrong, 6)
    for wrong in ("3x3", (1.5, 2.0), [[True, False]], None):
        with pytest.raises(TypeError, match=r"patches must (be|hold) whole numbers"):
            patch_grid(wrong, 6)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"query": torch.ones(2, 3, 4)}, "explain takes one query, got 2"),
        ({"document": torch.ones(2, 3, 4)}, "explain takes one document, got 2"),
        ({"query_tokens": ["a"]}, "query_tokens must have one entry a token, 3, got 1"),
        ({"query_text": "a b c"}, r"query_text needs query_tokens, the place \(start, end\)"),
        ({"document_tokens": [(0, 1)] * 3}, r"places \(start, end\): give document_text too"),
        ({"document_tokens": ["a"] * 3, "document_text": "a"}, "must be places"),
        ({"document_tokens": [(0, 1), (0, 2), (1, 9)], "document_text": "abc"}, r"tokens\[2\] must lie in a text of 3"),
        ({"image": PNG}, "an image needs patches"),
        ({"masked": "none"}, "masked must be"),
    ],
)  # fmt: skip
def test_what_is_refused(options, error):
    with pytest.raises(ValueError, match=error):
        maxsim.explain(**{"query": torch.ones(3, 4), "document": torch.ones(3, 4), **options})
    for tokens in (["a", (0, 1, 2)], ["a", (0.5, 1)]):
        with pytest.raises(TypeError, match="must be places"):
            maxsim.explain(torch.ones(2, 4), torch.ones(2, 4), query_tokens=tokens, query_text="abc")
    for tokens in ([7, 8], [None, "a"], [b"a", b"b"], torch.tensor([7, 8])):
        with pytest.raises(TypeError, match=r"query_tokens must be names \(str\) or places .* got .* at 0"):
            maxsim.explain(torch.ones(2, 4), torch.ones(2, 4), query_tokens=tokens)
    with pytest.raises(ValueError, match="at least one explanation"):
        page([])


def test_a_page_is_of_one_query():
    a, b = (
        maxsim.explain(torch.ones(1, 2), torch.ones(1, 2), query_tokens=["a"]),
        maxsim.explain(torch.ones(1, 2), torch.ones(1, 2)),
    )
    assert page([a, a]).count('class="hit"') == 2
    with pytest.raises(ValueError, match="of one query"):
        page([a, b])


def test_half_a_character(tmp_path):
    """Of names that are no Unicode text the page shows what there is."""
    found = maxsim.explain(randn(2, 8), randn(2, 8), query_tokens=["\ud83d", "a"], document_tokens=["Ġb", "\udc00"])
    found.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").count("\N{REPLACEMENT CHARACTER}") >= 2
    assert found.matches[0].query == "\ud83d"


def test_a_page_escapes_and_loads_nothing(tmp_path):
    bad = "</script><script>alert(1)</script><img src=http://x.test/a.png onerror='x'>\"&"
    q, d = randn(2, 8), randn(3, 8, seed=1)
    found = maxsim.explain(
        q, d, query_text=bad, query_tokens=[(0, 9), (9, 40)], document_tokens=[bad, "<b>", "&amp;"], name=bad,
        notes=[bad], patches=[[0, 1]],
    )  # fmt: skip
    found.save(tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html == found.html()
    assert html.lower().count("<script") == html.lower().count("</script") == 2
    assert "<img" not in html
    assert not re.search(r"<(link|script|img|iframe)[^>]*(src|href)=(?!\"data:)", html)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S).group(1))
    assert data["query"][0] == "</script>"
    assert len(base64.b64decode(data["hits"][0]["shades"])) == 6
