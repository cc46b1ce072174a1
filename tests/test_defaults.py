"""What PyTorch is told to take by default (a dtype, a device, autocast) changes nothing of what is made."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import maxsim
from maxsim.corpus import files, opened

CODECS = {
    "int8": {},
    "fp8": {"scale": "token"},
    "residual": {"centroids": 16, "renormalize": True},
    "pq": {"parts": 2},
}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# more tokens than codewords (256), so that k-means works
QUERIES = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.randn(30, 9, 16, generator=torch.Generator().manual_seed(1))


def same(one, other):
    assert one.dtype == other.dtype
    assert torch.equal(one, other)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("codec", CODECS)
def test_codes(codec, default, tmp_path):
    def made():
        codes = maxsim.quantize(list(DOCUMENTS), codec, **CODECS[codec])
        codes.save(tmp_path / "codes")
        read = maxsim.Quantized.load(tmp_path / "codes")
        certified = maxsim.certified_topk(QUERIES, codes, DOCUMENTS, k=3)
        return [
            *codes.parameters.tensors().values(),
            codes.codes.view(torch.uint8),
            read.codes.view(torch.uint8),
            codes[::-2].codes.view(torch.uint8),
            maxsim.error_bound(QUERIES, codes),
            *certified,
        ]

    wanted = made()
    with DEFAULTS[default]():
        found = made()
    for one, other in zip(found, wanted, strict=True):
        same(one, other)


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_corpus(default, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)  # less than a document

    def hits(name, dtype, **options):
        corpus = maxsim.Corpus.create(tmp_path / name, 16, dtype, **options)
        corpus.add(range(30), list(DOCUMENTS))
        corpus.delete([3])
        lacking = corpus.lacking(opened(tmp_path / "others.npz"))
        assert (lacking.added, lacking.skipped) == (2, 1)  # the third as the corpus has it
        corpus.add_lacking(lacking)
        corpus.compact()
        corpus.export(tmp_path / f"{name}.npz")
        found = [*corpus.search(QUERIES, k=5), *corpus.rerank(QUERIES, [7, 8]), *corpus.search(QUERIES, 2, [4, 5, 6])]
        return [(hit.id, hit.score) for each in found for hit in each]

    others = torch.cat([DOCUMENTS[:2] + 1, DOCUMENTS[5:6]]).flatten(0, 1)
    offsets = [0, 9, 18, 27]
    np.savez(tmp_path / "others.npz", tokens=others.half().numpy(), offsets=offsets, ids=np.array([100, 101, 5]))
    forms = {"float16": {}, "int8": {"exact": "float16"}, "residual": {"centroids": 8}}
    wanted = [hits(f"before-{form}", form, **forms[form]) for form in forms]
    with DEFAULTS[default]():
        assert [hits(form, form, **forms[form]) for form in forms] == wanted


@pytest.mark.parametrize("default", DEFAULTS)
def test_scores(default):
    def scored():
        queries, documents = QUERIES.clone().requires_grad_(), DOCUMENTS.clone().requires_grad_()
        scores = maxsim.score(queries, documents)
        grads = torch.autograd.grad(scores.sum(), (queries, documents))
        explained = maxsim.explain(QUERIES[0], DOCUMENTS[0], patches=(3, 3))
        return [
            scores,
            *grads,
            *maxsim.topk(QUERIES, list(DOCUMENTS), 3),
            *maxsim.matches(QUERIES, DOCUMENTS),
            maxsim.score(QUERIES, [DOCUMENTS[0], DOCUMENTS[1][:0]]),
            explained.similarities,
            explained.patches,
            explained.share,
        ]

    wanted = scored()
    with DEFAULTS[default]():
        found = scored()
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
