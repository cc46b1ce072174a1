"""Wrong arguments: the type of the exception, and a message that says what was expected and what came. Nothing is
launched."""

from __future__ import annotations

import pickle
import re
import sys

import numpy as np
import pytest
import torch
from forms import _object_array
from lanes import INTERPRETED

import maxsim
from maxsim import Packed, UnsupportedError, Views, dispatch
from maxsim.layout import make_problem

Q, D = torch.ones(2, 3, 4), torch.ones(5, 6, 4)
TOKENS = torch.ones(9, 4)


def mask(*shape):
    return torch.ones(*shape, dtype=torch.bool)


CASES = {
    # (call, exception, what the message must hold)
    "width": (lambda: maxsim.score(torch.ones(2, 3, 128), torch.ones(2, 3, 96)), ValueError, ["128", "96"]),
    "dtypes": (lambda: maxsim.score(Q, D.half()), TypeError, ["float32", "float16", ".to("]),
    "dtypes bf16": (lambda: maxsim.score(Q.half(), D.bfloat16()), TypeError, ["float16", "bfloat16", ".to("]),
    "int8": (
        lambda: maxsim.score(Q.to(torch.int8), D.to(torch.int8)),
        TypeError,
        ["int8", "float16, bfloat16, float32"],
    ),
    "uint8": (lambda: maxsim.score(Q.to(torch.uint8), D), TypeError, ["uint8", "float16, bfloat16, float32"]),
    "packed bits": (lambda: maxsim.score(Q, np.ones((5, 6, 4), np.uint8)), TypeError, ["uint8"]),
    "int64": (lambda: maxsim.score(Q.long(), D.long()), TypeError, ["int64"]),
    "bool": (lambda: maxsim.score(mask(2, 3, 4), D), TypeError, ["bool"]),
    "complex": (lambda: maxsim.score(Q.to(torch.complex64), D.to(torch.complex64)), TypeError, ["complex64"]),
    "numpy long double": (lambda: maxsim.score(np.ones((2, 3), np.longdouble), D), TypeError, ["float"]),
    "numpy complex": (lambda: maxsim.score(np.ones((2, 3), complex), D), TypeError, ["complex128"]),
    "numpy's masked array": (lambda: maxsim.score(np.ma.masked_array(np.ones((2, 3, 4))), D), TypeError, ["masked"]),
    "normalize": (lambda: maxsim.score(Q, D, normalize="no"), TypeError, ["True or False", "str"]),
    "normalize None": (lambda: maxsim.score(Q, D, normalize=None), TypeError, ["True or False", "NoneType"]),
    "normalize tensor": (lambda: maxsim.score(Q, D, normalize=torch.ones(3)), TypeError, ["True or False", "Tensor"]),
    "list of backends": (lambda: maxsim.score(Q, D, backend=["cpu"]), TypeError, ["'cpu'", "list"]),
    "strings": (lambda: maxsim.score("text", D), TypeError, ["queries", "str", "maxsim.encode"]),
    "bytes": (lambda: maxsim.score(b"text", D), TypeError, ["queries", "bytes"]),
    "dict": (lambda: maxsim.score({}, D), TypeError, ["queries", "dict"]),
    "None": (lambda: maxsim.score(Q, None), TypeError, ["documents", "NoneType"]),
    "number": (lambda: maxsim.score(3, D), TypeError, ["queries", "int"]),
    "list of strings": (lambda: maxsim.score(["a"], D), TypeError, ["queries[0]", "str", "maxsim.encode"]),
    "list of numbers": (lambda: maxsim.score([1.0, 2.0], D), TypeError, ["queries[0]", "float"]),
    "sparse": (lambda: maxsim.score(Q[0].to_sparse(), D), TypeError, ["queries", "sparse"]),
    "0-D": (lambda: maxsim.score(torch.tensor(1.0), D), ValueError, ["[N, L, D]", "[]"]),
    "1-D": (lambda: maxsim.score(torch.ones(4), D), ValueError, ["[N, L, D]", "[4]"]),
    "5-D": (lambda: maxsim.score(Q, torch.ones(1, 1, 1, 1, 4)), ValueError, ["[N, L, D]", "[1, 1, 1, 1, 4]"]),
    "4-D queries": (lambda: maxsim.score(torch.ones(1, 2, 3, 4), D), ValueError, ["queries", "[NQ, LQ, D]"]),
    "no columns": (lambda: maxsim.score(torch.ones(2, 3, 0), torch.ones(2, 3, 0)), ValueError, ["column", "[2, 3, 0]"]),
    "ragged widths": (
        lambda: maxsim.score(Q, [torch.ones(2, 4), torch.ones(2, 5)]),
        ValueError,
        ["documents[1]", "5", "4"],
    ),
    "ragged dtypes": (
        lambda: maxsim.score(Q, [torch.ones(2, 4), torch.ones(2, 4).half()]),
        TypeError,
        ["documents[1]", "float16", "float32"],
    ),
    "1-D in a list": (lambda: maxsim.score(Q, [torch.ones(4)]), ValueError, ["documents[0]", "[L, D]", "[4]"]),
    "3-D among 2-D": (
        lambda: maxsim.score(Q, [torch.ones(2, 4), torch.ones(1, 2, 4)]),
        ValueError,
        ["documents[1]", "[1, 2, 4]"],
    ),
    "nested too deep": (lambda: maxsim.score([[torch.ones(2, 4)]], D), ValueError, ["queries", "one level too many"]),
    "uneven candidates": (
        lambda: maxsim.score(Q, [[TOKENS], [TOKENS, TOKENS]]),
        ValueError,
        ["as many candidates", "[1, 2]"],
    ),
    "candidates of too few": (lambda: maxsim.score(Q, torch.ones(3, 2, 6, 4)), ValueError, ["2 queries", "got 3"]),
    "object scalars": (lambda: maxsim.score(_object_array([1, 2]), D), TypeError, ["queries[0]", "int"]),
    "masked": (lambda: maxsim.score(Q, D, masked="ignore"), ValueError, ["'exclude'", "'zero'", "'ignore'"]),
    "mask of integers": (
        lambda: maxsim.score(Q, D, torch.ones(2, 3)),
        TypeError,
        ["queries mask", "boolean", "float32", "mask == 0 of an additive one", "mask > 0"],
    ),
    "mask of uint8": (
        lambda: maxsim.score(Q, D, None, mask(5, 6).to(torch.uint8)),
        TypeError,
        ["documents mask", "boolean", "uint8", "mask.bool()"],
    ),
    "mask shape": (lambda: maxsim.score(Q, D, None, mask(5, 5)), ValueError, ["documents mask", "[5, 6]", "[5, 5]"]),
    "mask broadcast": (lambda: maxsim.score(Q, D, mask(3)), ValueError, ["queries mask", "[2, 3]", "[3]"]),
    "mask of candidates": (
        lambda: maxsim.score(Q, torch.ones(2, 5, 6, 4), None, mask(5, 6)),
        ValueError,
        ["[2, 5, 6]", "[5, 6]"],
    ),
    "mask of packed": (
        lambda: maxsim.score(Q, Packed(TOKENS, [0, 4, 9]), None, mask(2, 5)),
        ValueError,
        ["[9]", "[2, 5]"],
    ),
    "mask of views": (lambda: maxsim.score(Q, Views(TOKENS, [0], [4]), None, mask(4)), ValueError, ["[9]", "[4]"]),
    "list mask count": (
        lambda: maxsim.score(Q, [TOKENS, TOKENS], None, [mask(9)]),
        ValueError,
        ["2 documents", "got 1"],
    ),
    "list mask length": (lambda: maxsim.score(Q, [TOKENS], None, [mask(8)]), ValueError, ["[9]", "[8]"]),
    "list mask padded": (
        lambda: maxsim.score(Q, [TOKENS, TOKENS[:2]], None, mask(2, 8)),
        ValueError,
        ["[2, 9]", "[8]"],
    ),
    "list mask dtype": (lambda: maxsim.score(Q, [TOKENS], None, [[1] * 9]), TypeError, ["boolean", "int64"]),
    "pairs counts": (lambda: maxsim.score_pairs(Q, D), ValueError, ["2 queries", "5 documents"]),
    "pairs shape": (lambda: maxsim.score_pairs(Q, D, torch.ones(3, 3).long()), ValueError, ["[P, 2]", "[3, 3]"]),
    "pairs 1-D": (lambda: maxsim.score_pairs(Q, D, [0, 1]), ValueError, ["[P, 2]", "[2]"]),
    "pairs dtype": (lambda: maxsim.score_pairs(Q, D, torch.ones(3, 2)), TypeError, ["int64", "float32"]),
    "pairs low": (lambda: maxsim.score_pairs(Q, D, [[0, -1]]), ValueError, ["0..4", "-1"]),
    "pairs high": (lambda: maxsim.score_pairs(Q, D, [[0, 0], [2, 0]]), ValueError, ["0..1", "2"]),
    "pairs of objects": (
        lambda: maxsim.score_pairs(Q, D, np.array([[0, object()]], object)),
        TypeError,
        ["pairs", "whole numbers", "object"],
    ),
    "pairs of None": (lambda: maxsim.score_pairs(Q, D, [[0, None]]), TypeError, ["pairs", "int64", "NoneType"]),
    "pairs of strings": (lambda: maxsim.score_pairs(Q, D, [["a", "b"]]), TypeError, ["pairs", "int64", "str: 'a'"]),
    "pairs of floats": (lambda: maxsim.score_pairs(Q, D, [[0.0, 1.0]]), TypeError, ["pairs", "int64", "float64"]),
    "pairs of booleans": (lambda: maxsim.score_pairs(Q, D, [[True, False]]), TypeError, ["pairs", "int64", "bool"]),
    "pairs beyond 64 bits": (lambda: maxsim.score_pairs(Q, D, [[0, 2**70]]), TypeError, ["pairs", "beyond 64 bits"]),
    "pairs uneven": (lambda: maxsim.score_pairs(Q, D, [[0, 1], [1]]), ValueError, ["pairs", "different lengths"]),
    "pairs in a set": (lambda: maxsim.score_pairs(Q, D, {(0, 1)}), TypeError, ["pairs", "set"]),
    "pairs in an iterator": (lambda: maxsim.score_pairs(Q, D, zip([0], [1])), TypeError, ["pairs", "zip"]),  # noqa: B905
    "pairs meta": (
        lambda: maxsim.score_pairs(Q, D, torch.zeros(1, 2, dtype=torch.long, device="meta")),
        ValueError,
        ["pairs", "meta device"],
    ),
    "queries meta": (lambda: maxsim.score(Q.to("meta"), D), ValueError, ["queries", "meta device", "cpu"]),
    "matches meta": (lambda: maxsim.matches(Q.to("meta"), D), ValueError, ["queries", "meta device"]),
    "mask meta": (lambda: maxsim.score(Q, D, mask(2, 3).to("meta")), ValueError, ["queries mask", "meta device"]),
    "mask of None": (lambda: maxsim.score(Q, D, [[True, None]] * 2), TypeError, ["queries mask", "NoneType"]),
    "mask uneven": (lambda: maxsim.score(Q, D, [[True], [True, False]]), ValueError, ["mask", "different lengths"]),
    "mask string": (lambda: maxsim.score(Q, D, "keep"), TypeError, ["queries mask", "str: 'keep'"]),
    "list mask number": (lambda: maxsim.score(list(Q), D, 5), TypeError, ["queries mask", "one row an item", "int"]),
    "pairs of nothing": (lambda: maxsim.score_pairs(Q[:0], D, [[0, 0]]), ValueError, ["1 pairs", "0 queries"]),
    "pairs candidates": (lambda: maxsim.score_pairs(Q, D[None]), ValueError, ["score_pairs", "candidates"]),
    "topk candidates": (lambda: maxsim.topk(Q, torch.ones(2, 5, 6, 4), 3), ValueError, ["topk", "candidates"]),
    "k no integer": (lambda: maxsim.topk(Q, D, 1.5), TypeError, ["k must be a whole number", "float", "1.5"]),
    "k a bool": (lambda: maxsim.topk(Q, D, True), TypeError, ["k", "whole number", "bool"]),
    "k negative": (lambda: maxsim.topk(Q, D, -1), ValueError, ["k", "-1"]),
    "backend name": (lambda: maxsim.score(Q, D, backend="gpu"), ValueError, ["'hopper'", "'triton'", "'cpu'", "'gpu'"]),
    "backend for": (lambda: maxsim.backend_for(Q, D.half()), TypeError, ["float16"]),
    "matches": (lambda: maxsim.matches(Q, D[..., :3]), ValueError, ["4", "3"]),
    # Packed and Views
    "offsets start": (lambda: Packed(TOKENS, [1, 9]), ValueError, ["start at 0", "1"]),
    "offsets fall": (lambda: Packed(TOKENS, [0, 3, 2, 9]), ValueError, ["offsets[1] = 3", "2"]),
    "offsets end short": (lambda: Packed(TOKENS, [0, 3, 8]), ValueError, ["9", "8"]),
    "offsets end long": (lambda: Packed(TOKENS, [0, 3, 10]), ValueError, ["9", "10"]),
    "offsets empty": (lambda: Packed(TOKENS, []), ValueError, ["N + 1"]),
    "offsets 2-D": (lambda: Packed(TOKENS, [[0, 9]]), ValueError, ["one dimension", "[1, 2]"]),
    "offsets floats": (lambda: Packed(TOKENS, [0.0, 9.0]), TypeError, ["int32 or int64", "float"]),
    "offsets int16": (lambda: Packed(TOKENS, np.array([0, 9], np.int16)), TypeError, ["int32 or int64", "int16"]),
    "offsets None": (lambda: Packed(TOKENS, None), TypeError, ["offsets", "whole numbers", "NoneType"]),
    "offsets string": (lambda: Packed(TOKENS, "0, 9"), TypeError, ["offsets", "int64", "str: '0, 9'"]),
    "offsets with None": (lambda: Packed(TOKENS, [0, None]), TypeError, ["offsets", "NoneType"]),
    "offsets nested": (lambda: Packed(TOKENS, [[0], [1, 9]]), ValueError, ["offsets", "different lengths"]),
    "offsets meta": (lambda: Packed(TOKENS, torch.tensor([0, 9], device="meta")), ValueError, ["offsets", "meta"]),
    "packed bound string": (lambda: Packed(TOKENS, [0, 9], max_length="9"), TypeError, ["max_length", "str: '9'"]),
    "packed bound float": (lambda: Packed(TOKENS, [0, 9], max_length=9.5), TypeError, ["max_length", "float: 9.5"]),
    "views None": (lambda: Views(TOKENS, None, [1]), TypeError, ["starts", "NoneType"]),
    "views lengths None": (lambda: Views(TOKENS, [1], None), TypeError, ["lengths", "NoneType"]),
    "packed 3-D": (lambda: Packed(Q, [0, 2]), ValueError, ["[T, D]", "[2, 3, 4]"]),
    "packed list": (lambda: Packed([[1.0]], [0, 1]), TypeError, ["tokens", "list"]),
    "packed of nothing": (lambda: Packed.from_list([]), ValueError, ["empty list"]),
    "packed bound": (lambda: Packed(TOKENS, [0, 4, 9], max_length=4), ValueError, ["max_length is 4", "5"]),
    "packed bound negative": (lambda: Packed(TOKENS, [0, 4, 9], max_length=-1), ValueError, ["max_length is -1"]),
    "views low": (lambda: Views(TOKENS, [-1], [3]), ValueError, ["0..9", "-1"]),
    "views high": (lambda: Views(TOKENS, [7], [3]), ValueError, ["0..9", "10"]),
    "views negative length": (lambda: Views(TOKENS, [7], [-3]), ValueError, ["negative", "-3"]),
    "views counts": (lambda: Views(TOKENS, [1, 2], [3]), ValueError, ["[2]", "[1]"]),
    "views floats": (lambda: Views(TOKENS, [1.0], [3]), TypeError, ["starts", "int32 or int64", "float"]),
    "views bound": (lambda: Views(TOKENS, [1], [3], max_length=2), ValueError, ["max_length is 2", "3"]),
    "views overflow": (lambda: Views(TOKENS, [2**62], [2**62]), ValueError, ["0..9"]),
    "views int32 overflow": (
        lambda: Views(TOKENS, np.array([2**31 - 1], np.int32), np.array([1], np.int32)),
        ValueError,
        ["0..9"],
    ),
    "packed int32 overflow": (
        lambda: Packed(TOKENS, np.array([0, 2**31 - 1, -(2**31) + 5, 9], np.int32)),
        ValueError,
        ["offsets"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_arguments(case, monkeypatch):
    """Cases 43, 65, 85, 101, 103, 104."""
    from maxsim.backends import cpu

    launched = []
    monkeypatch.setattr(cpu, "forward", lambda *args: launched.append(args))
    call, exception, words = CASES[case]
    with pytest.raises(exception) as caught:
        call()
    assert type(caught.value) is exception
    assert not launched
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} lacks {missing}"


def test_rerank_nestings():
    """Case 101: every nesting that has one meaning is accepted."""
    own = torch.arange(2 * 3 * 2 * 4.0).view(2, 3, 2, 4)
    wanted = maxsim.score(Q, own)
    assert wanted.shape == (2, 3)
    for documents in (
        list(own),
        [list(each) for each in own],
        [[item.numpy() for item in each] for each in own],
        own.numpy(),
    ):
        assert torch.equal(maxsim.score(Q, documents), wanted)
    flat = own.flatten(0, 1)
    for documents in (list(flat), [item.numpy() for item in flat], tuple(flat), iter(flat), flat.numpy()):
        assert torch.equal(maxsim.score(Q, documents), maxsim.score(Q, flat))
    assert maxsim.score(Q, flat[0]).shape == (2, 1)


def test_arrays_of_any_make():
    """Case 46: float16, float32, float64, read-only, reversed, byte-swapped, and tensors that require gradients."""
    values = np.arange(24).reshape(2, 3, 4)
    for dtype in (np.float16, np.float32, np.float64):
        whole = values.astype(dtype)
        wanted = maxsim.score(torch.tensor(whole), torch.tensor(whole))
        frozen = whole.copy()
        frozen.flags.writeable = False
        for same in (frozen, whole[::-1][::-1], whole.astype(whole.dtype.newbyteorder(">")), np.asfortranarray(whole)):
            assert torch.equal(maxsim.score(same, same), wanted)
            assert torch.equal(maxsim.score(list(same), same), wanted)
        records = np.zeros((2, 3), dtype=[("page", "i1"), ("vector", dtype, 4)])  # 4 values are no whole records apart
        records["vector"] = whole
        assert torch.equal(maxsim.score(records["vector"], whole), wanted)
        assert torch.equal(maxsim.score(list(records["vector"]), whole), wanted)
    for dtype in (torch.bfloat16, torch.float16):
        leaf = torch.tensor(values, dtype=dtype).requires_grad_()
        assert torch.equal(
            maxsim.score(leaf, leaf).detach(), maxsim.score(values.astype(np.float32), values.astype(np.float32))
        )
        assert maxsim.topk(leaf, leaf, 1).indices.tolist() == [[1], [1]]


def test_object_array_of_equal_lengths():
    """Case 103: numpy makes it three-dimensional; the items are the same."""
    items = [np.ones((3, 4), np.float32), np.full((3, 4), 2, np.float32)]
    unequal = np.array([items[0], np.ones((2, 4), np.float32)], dtype=object)
    assert torch.equal(maxsim.score(Q, unequal), maxsim.score(Q, list(unequal)))
    assert torch.equal(maxsim.score(Q, np.array(items, dtype=object)), maxsim.score(Q, items))


def test_unsupported_says_every_reason():
    with pytest.raises(UnsupportedError) as caught:
        maxsim.score(Q.to("meta"), D.to("meta"))
    assert set(caught.value.reasons) == {"cpu", "hopper", "triton"}
    assert all(caught.value.reasons.values())
    assert all(re.search(name, str(caught.value)) for name in ("cpu", "triton"))
    assert issubclass(UnsupportedError, RuntimeError)


def test_a_backend_that_is_not_preferred_serves_what_no_other_can(monkeypatch):
    from types import SimpleNamespace

    def backend(name, preferred, why=()):
        return SimpleNamespace(NAME=name, preferred=lambda problem: preferred, unsupported=lambda problem: why)

    known = {"big": backend("big", False), "small": backend("small", True)}
    monkeypatch.setattr(dispatch, "ORDER", tuple(known))
    monkeypatch.setattr(dispatch, "_load", known.__getitem__)
    problem = make_problem(Q, D)
    assert dispatch.select(problem).NAME == "small"
    assert dispatch.select(problem, "big").NAME == "big"
    known["small"] = backend("small", True, ["cannot"])
    assert dispatch.select(problem).NAME == "big"
    known["big"] = backend("big", False, ["neither"])
    with pytest.raises(UnsupportedError) as caught:
        dispatch.select(problem)
    assert caught.value.reasons == {"small": ["cannot"], "big": ["neither"]}


def test_a_forced_backend_that_cannot_raises():
    with pytest.raises(UnsupportedError, match="triton"):
        maxsim.score(Q.double(), D.double(), backend="triton")


def test_arguments_are_left_alone():
    q, d, q_mask, d_mask = Q.clone(), D.clone(), mask(2, 3), mask(5, 6)
    maxsim.score(q, d, q_mask, d_mask, normalize=True), maxsim.topk(q, d, 2, q_mask, d_mask)
    assert torch.equal(q, Q)
    assert torch.equal(d, D)
    assert q_mask.all()
    assert d_mask.all()


def test_how_they_print():
    assert repr(Packed(TOKENS, [0, 4, 9])) == "Packed(2 items, tokens [9, 4] torch.float32 on cpu)"
    assert repr(Views(TOKENS, [0], [4])) == "Views(1 items into [9, 4] torch.float32 on cpu)"
    assert len(Packed(TOKENS, [0, 4, 9])) == 2
    assert len(Views(TOKENS, [0], [4])) == 1


def test_candidates_of_too_few_queries():
    """No candidates at all is no excuse for a wrong number of lists."""
    for documents in ([[], []], torch.zeros(2, 0, 3, 4)):
        with pytest.raises(ValueError, match="each of 3 queries, got 2"):
            maxsim.score(torch.zeros(3, 2, 4), documents)
        assert maxsim.score(torch.zeros(2, 2, 4), documents).shape == (2, 0)


def test_unsupported_survives_pickling():
    error = pickle.loads(pickle.dumps(UnsupportedError({"cpu": ["why"]})))
    assert error.reasons == {"cpu": ["why"]}
    assert "why" in str(error)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_whose_differences_wrap_round(dtype):
    top = np.iinfo(dtype).max
    with pytest.raises(ValueError, match="fall"):
        Packed(torch.zeros(10, 8), np.array([0, top, -top - 1, -1, 10], dtype))


def test_jagged_the_wrong_way_round():
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
    with pytest.raises(ValueError, match="jagged"):
        maxsim.score(torch.zeros(2, 8), nested.transpose(1, 2))


def test_masks_of_lists():
    """A padded mask for a list of lists, and the mask of an empty document in a list."""
    q, candidates = torch.randn(3, 4, 8), torch.randn(3, 2, 6, 8)
    mask = torch.arange(36).view(3, 2, 6) % 4 > 0
    wanted = maxsim.score(q, candidates, document_mask=mask)
    assert torch.equal(maxsim.score(q, [list(x) for x in candidates], document_mask=mask), wanted)
    documents = [candidates[0, 0], candidates[0, 1, :0]]
    masked = maxsim.score(q, documents, document_mask=[[True] * 6, []])
    assert torch.equal(masked, maxsim.score(q, documents))


def test_another_default_device():
    """What is made on the way lies where the given tensors do, not on the default device."""
    q, d = torch.randn(3, 4, 8), torch.randn(3, 6, 8)
    wanted = maxsim.score(q, d)
    with torch.device("meta"):
        assert torch.equal(maxsim.score(list(q), list(d)), wanted)
        assert torch.equal(maxsim.score(q, Packed(d.flatten(0, 1), [0, 6, 12, 18])), wanted)
        assert torch.equal(maxsim.score_pairs(q, d, [[0, 1]]), wanted[0, 1:2])
        assert maxsim.topk(q, d, 2).indices.shape == (3, 2)


@pytest.mark.needs_triton
def test_a_backend_that_cannot_be_imported_is_told_of(monkeypatch, caplog):
    dispatch._load.cache_clear()
    try:
        monkeypatch.delattr(maxsim.backends, "hopper", raising=False)
        monkeypatch.setitem(sys.modules, "maxsim.backends.hopper", None)
        for _ in range(2):
            assert maxsim.score(torch.ones(1, 2, 3), torch.ones(1, 2, 3)).tolist() == [[6.0]]
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith("the hopper backend is left out: its kernels cannot be imported: ")
    finally:
        dispatch._load.cache_clear()


def test_all_documents_of_a_form_are_the_form():
    """Documents that follow one another do so too where a search takes all of them at once."""
    documents = make_problem(torch.ones(1, 2, 3), Packed(torch.ones(7, 3), [0, 3, 7])).documents
    assert documents.slice(0, 2).consecutive
    assert not documents.slice(0, 1).consecutive
    assert not documents.slice(1, 2).consecutive


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED, reason="what Triton's interpreter multiplies wrongly")
def test_bfloat16_in_the_interpreter():
    q, d = Q.bfloat16(), D.bfloat16()
    assert maxsim.backend_for(q, d) == "cpu"
    with pytest.raises(UnsupportedError, match="triton: serves no bfloat16 in Triton's interpreter"):
        maxsim.score(q, d, backend="triton")
    assert torch.equal(maxsim.score(q, maxsim.quantize(D, "int8"), backend="triton"), maxsim.score(Q, D))
