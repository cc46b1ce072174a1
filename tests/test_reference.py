"""The oracle against numbers worked by hand. Everything else is tested against the oracle."""

from __future__ import annotations

import ast
import inspect
import math

import numpy as np
import pytest

from maxsim import reference

E0, E1, E2, E3 = np.eye(4)
NAN, INF = math.nan, math.inf


def array(*rows):
    return np.array(rows, dtype=np.float64)


def test_imports_nothing_of_ours():
    tree = ast.parse(inspect.getsource(reference))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "math", "numpy"}


def test_two_query_tokens_with_different_winners():
    """Case 10: 1 + 2; the maximum over all is 2, the mean 1.5."""
    assert reference.score(array([1, 0], [0, 1]), array([1, 0], [0, 2])) == 3
    index, value = reference.matches(array([1, 0], [0, 1]), array([1, 0], [0, 2]))
    assert index.tolist() == [0, 1]
    assert value.tolist() == [1, 2]


def test_sum_not_mean_nor_pooled():
    """Cases 11 and 12."""
    assert reference.score(array(E0, E1, E2, E3), array(E0)) == 1
    assert reference.score(array(E0, E1), array(E0, E1)) == 2


def test_by_hand():
    query, document = array([1, 2], [-1, 3]), array([2, 1], [0, -1], [-3, 1])
    # similarities: [4, -2, -1] and [1, -3, 6]
    assert reference.similarities(query, document).tolist() == [[4, -2, -1], [1, -3, 6]]
    assert reference.score(query, document) == 10


@pytest.mark.parametrize(
    ("row", "mask", "masked", "value", "where"),
    [
        ([1.0, 3.0, 3.0], None, "exclude", 3, 1),  # the first of equals
        ([-1.0, -3.0], None, "exclude", -1, 0),
        ([1.0, 5.0], [True, False], "exclude", 1, 0),
        ([-1.0, 5.0], [True, False], "zero", 0, -1),  # a masked zero wins and is nobody
        ([1.0, 5.0], [True, False], "zero", 1, 0),
        ([0.0, 5.0], [True, False], "zero", 0, 0),  # a tie of a kept 0 and a later masked zero
        ([5.0, 0.0], [False, True], "zero", 0, -1),  # and of an earlier one
        ([5.0], [False], "exclude", -INF, -1),
        ([5.0], [False], "zero", 0, -1),
        ([], None, "exclude", -INF, -1),
        ([2.0, NAN, 3.0, NAN], None, "exclude", NAN, 1),
        ([2.0, NAN], [True, False], "exclude", 2, 0),
        ([-2.0, NAN], [True, False], "zero", 0, -1),
        ([-INF, -INF], None, "exclude", -INF, 0),
        ([INF, 1.0], None, "exclude", INF, 0),
    ],
)
def test_best(row, mask, masked, value, where):
    found = reference.best(np.array(row), None if mask is None else np.array(mask), masked)
    np.testing.assert_equal(found, (value, where))


def test_masks():
    """Cases 1, 2, 3."""
    assert reference.score(array([1, 0]), array([-0.5, -0.5])) == -0.5
    assert reference.score(array([1, 0]), array([-1, 0], [5, 0]), None, np.array([True, False])) == -1
    assert reference.score(array([1, 0]), array([-1, 0], [5, 0]), None, np.array([True, False]), "zero") == 0
    query, kept = array(E0, E1, 9 * E0, 9 * E1), np.array([True, True, False, False])
    assert reference.score(query, array(E0, E1), kept) == 2
    index, value = reference.matches(query, array(E0, E1), kept)
    assert index.tolist() == [0, 1, -1, -1]
    assert value.tolist() == [1, 1, 0, 0]


def test_empty():
    none, one = np.zeros((0, 2)), array([1, 0])
    hidden = np.array([False])
    assert reference.score(one, none) == -INF
    assert reference.score(one, one, None, hidden) == -INF
    assert reference.score(one, one, None, hidden, "zero") == 0
    assert reference.score(none, one) == 0
    assert reference.score(one, one, hidden) == 0
    assert reference.score(none, none) == -INF
    assert reference.score(one, none, hidden) == -INF


def test_nan_spreads_to_its_own_score_only():
    assert math.isnan(reference.score(array([1, 0], [0, 1]), array([1, NAN])))
    assert math.isnan(reference.score(array([NAN, 0]), array([1, 1])))
    assert reference.score(array([1, 0]), array([0.5, 0], [NAN, NAN]), None, np.array([True, False])) == 0.5


def test_normalize():
    assert reference.score(array([3, 0], [0, 0]), array([3, 4], [0, -2]), normalize=True) == pytest.approx(
        0.6, rel=1e-15
    )
    index, value = reference.matches(array([0, 5]), array([0, 7], [0, 9]), normalize=True)
    assert index.tolist() == [0]
    assert value.tolist() == [1]


def test_gradients_by_hand():
    query, document = array([1, 2], [-1, 3], [7, 7]), array([2, 1], [0, -1], [-3, 1])
    of_query, of_document = reference.gradients(query, document, np.array([0, 0, -1]), upstream=2)
    assert of_query.tolist() == [[4, 2], [4, 2], [0, 0]]
    assert of_document.tolist() == [[0, 10], [0, 0], [0, 0]]


def test_gradient_of_a_tie_goes_to_the_first():
    """Case 60."""
    index, _ = reference.matches(array(E0), array(E0, E0))
    assert reference.gradients(array(E0), array(E0, E0), index)[1].tolist() == [E0.tolist(), [0] * 4]


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_the_slope(normalize):
    """Central differences; the only approximate check of this file, its bound is the differences' own error."""
    random = np.random.default_rng(0)
    query, document, step = random.normal(size=(3, 5)), random.normal(size=(4, 5)), 1e-6
    index, _ = reference.matches(query, document, normalize=normalize)
    grads = reference.gradients(query, document, index, normalize=normalize)
    for which, grad in enumerate(grads):
        for at in np.ndindex(grad.shape):
            moved = [query.copy(), document.copy()]
            moved[which][at] += step
            high = reference.score(*moved, normalize=normalize)
            moved[which][at] -= 2 * step
            low = reference.score(*moved, normalize=normalize)
            assert abs((high - low) / (2 * step) - grad[at]) < 1e-8
