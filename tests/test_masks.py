"""Boolean masks of any pattern, on both sides, and what a masked document token means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lanes import integers

import maxsim

INF = float("inf")


@pytest.mark.interpreter
def test_padding_never_beats_a_negative(lane):
    """Case 1: -0.5 however it is padded; 0 is the fault."""
    q, d = lane.tensor([[1.0, 0.0]]), lane.tensor([[[-0.5, -0.5], [0, 0], [0, 0]]])
    mask = torch.tensor([[True, False, False]])
    assert lane.score(q, d, None, mask).tolist() == [[-0.5]]
    assert lane.score(q, [d[0, :1]]).tolist() == [[-0.5]]
    assert lane.score(q, maxsim.Views(d[0], [0], [1])).tolist() == [[-0.5]]
    assert lane.score(q, d).tolist() == [[0]]  # without a mask every row counts, all-zero rows too


@pytest.mark.interpreter
def test_masked_rows_are_left_out_not_multiplied(lane):
    """Case 2: -1; 0 is a mask that multiplies, 5 a mask ignored."""
    q, d, mask = lane.tensor([[1.0, 0.0]]), lane.tensor([[[-1.0, 0], [5, 0]]]), torch.tensor([[True, False]])
    assert lane.score(q, d, None, mask).tolist() == [[-1]]
    assert lane.score(q, d, None, mask, masked="zero").tolist() == [[0]]


@pytest.mark.interpreter
def test_masked_query_tokens_add_nothing(lane):
    """Case 3: 2; 20 is the fault."""
    e0, e1 = [1.0, 0.0], [0.0, 1.0]
    q, d = lane.tensor([e0, e1, [9.0, 0.0], [0.0, 9.0]]), lane.tensor([e0, e1])
    assert lane.score(q, d, torch.tensor([True, True, False, False])).tolist() == [[2]]
    found = lane.matches(q, d, torch.tensor([True, False, False, True]))
    assert found.index.tolist() == [[[0, -1, -1, 1]]]
    assert found.similarity.tolist() == [[[1, 0, 0, 9]]]


@pytest.mark.interpreter
def test_one_item_takes_a_mask_of_one_dimension(lane):
    """Case 102: two bare items with 1-D masks are a batch of one."""
    q, d = integers(0, 4, 6, device=lane.device), integers(1, 5, 6, device=lane.device)
    q_mask, d_mask = torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([0, 1, 1, 0, 1]).bool()
    bare = lane.score(q, d, q_mask, d_mask)
    assert bare.shape == (1, 1)
    assert torch.equal(bare, lane.score(q[None], d[None], q_mask[None], d_mask[None]))
    assert torch.equal(bare, lane.score(q[q_mask.to(q.device)], d[d_mask.to(d.device)]))


@pytest.mark.interpreter
@pytest.mark.parametrize("masked", ["exclude", "zero"])
def test_everything_masked(lane, masked):
    q, d = integers(2, 2, 3, 8, device=lane.device), integers(3, 3, 4, 8, device=lane.device)
    d_mask, q_mask = torch.ones(3, 4, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    d_mask[1], q_mask[0] = False, False
    found = lane.score(q, d, q_mask, d_mask, masked)
    blank = -INF if masked == "exclude" else 0.0
    assert found[0].tolist() == [0, blank, 0]
    assert float(found[1, 1]) == blank
    assert torch.equal(found[1, [0, 2]], lane.score(q[1], d[[0, 2]])[0])


@pytest.mark.interpreter
def test_a_masked_zero_that_wins_is_nobody(lane):
    q = lane.tensor([[1.0, 0.0], [0.0, 1.0]]).requires_grad_()
    d = lane.tensor([[[-3.0, 2.0], [7.0, 7.0]]]).requires_grad_()
    mask = torch.tensor([[True, False]])
    found = lane.matches(q, d, None, mask, masked="zero")
    assert found.index.tolist() == [[[-1, 0]]]
    assert found.similarity.tolist() == [[[0, 2]]]
    lane.score(q, d, None, mask, masked="zero").backward()
    assert q.grad.tolist() == [[0, 0], [-3, 2]]
    assert d.grad.tolist() == [[[0, 1], [0, 0]]]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("row", "kept", "winner"),
    [
        ([0, 5, -1], [True, False, True], 0),
        ([-1, 5, 0], [True, False, True], -1),
        ([5, 0, 0], [False, True, True], -1),
        ([-1, 0, 5, 0], [True, True, False, True], 1),
    ],
)
def test_a_kept_zero_against_a_masked_one(lane, row, kept, winner):
    """A tie like any other: the lower position wins, and a masked one is nobody."""
    q, d = lane.tensor([[1.0]]), lane.tensor(row)[None, :, None]
    found = lane.matches(q, d, None, [kept], masked="zero")
    assert found.index.tolist() == [[[winner]]]
    assert found.similarity.tolist() == [[[0]]]


@pytest.mark.interpreter
def test_masked_zero_is_padding_with_zero_vectors(lane):
    """What PyLate's torch path and colpali-engine compute, bit for bit."""
    q, d = integers(4, 2, 3, 8, device=lane.device), integers(5, 5, 6, 8, device=lane.device)
    mask = integers(6, 5, 6, device=lane.device) > -1
    assert torch.equal(lane.score(q, d, None, mask, masked="zero"), lane.score(q, d * mask[..., None]))


def test_masks_of_any_make(lane):
    """Strided, expanded, numpy, a list of lists of bools, and on the CPU whatever the device."""
    q, d = integers(7, 2, 3, 8, device=lane.device), integers(8, 4, 6, 8, device=lane.device)
    row = torch.tensor([True, False, True, True, False, True], device=lane.device)
    wanted = lane.score(q, d[:, row])
    whole = row.expand(4, 6)
    wide = torch.zeros(4, 13, dtype=torch.bool, device=lane.device)
    wide[:, 1::2] = row
    for mask in (whole, whole.contiguous(), wide[:, 1::2], whole.cpu(), whole.cpu().numpy(), whole.tolist()):
        assert torch.equal(lane.score(q, d, None, mask), wanted)
    items = list(d)
    for mask in ([row] * 4, [row.tolist()] * 4, [row.cpu().numpy()] * 4, whole, whole.flatten()):
        assert torch.equal(lane.score(q, items, None, mask), wanted)
    packed = maxsim.Packed.from_list(items)
    flat = torch.zeros(48, dtype=torch.bool, device=lane.device)
    flat[::2] = whole.flatten()
    for mask in (flat[::2], whole.flatten().cpu().numpy()):
        assert torch.equal(lane.score(q, packed, None, mask), wanted)


@pytest.mark.interpreter
def test_a_padded_mask_on_a_ragged_list(lane):
    q, items = integers(9, 3, 8, device=lane.device), [integers(n, n, 8, device=lane.device) for n in (2, 5, 1)]
    mask = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]).bool()
    kept = [item[row[: len(item)].to(item.device)] for item, row in zip(items, mask, strict=True)]
    assert torch.equal(lane.score(q, items, None, mask), lane.score(q, kept))
    assert torch.equal(lane.score(q, items, None, mask.numpy()), lane.score(q, kept))
    mask[0] = torch.tensor([0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"documents\[0\] has 2 tokens.* padded on the left give one mask an item"):
        lane.score(q, items, None, mask)


@pytest.mark.interpreter
def test_all_kept_is_no_mask(lane):
    q, d = integers(10, 2, 3, 8, device=lane.device), integers(11, 4, 6, 8, device=lane.device)
    ones = np.ones((4, 6), bool), np.ones((2, 3), bool)
    for masked in ("exclude", "zero"):
        assert torch.equal(lane.score(q, d, ones[1], ones[0], masked), lane.score(q, d))


def test_mask_of_a_long_document_with_one_kept_token(lane, dtype):
    """Tiles without a kept token are skipped, not scored."""
    d = torch.full((1, 3000, 16), float("nan"), dtype=dtype, device=lane.device)
    q, at = integers(12, 5, 16, dtype=dtype, device=lane.device), 2047
    d[0, at] = integers(13, 16, dtype=dtype, device=lane.device)
    mask = torch.zeros(1, 3000, dtype=torch.bool)
    mask[0, at] = True
    assert torch.equal(lane.score(q, d, None, mask), lane.score(q, d[:, at : at + 1]))
    assert lane.matches(q, d, None, mask).index.unique().tolist() == [at]
