"""Residual codes: bits as ColBERT and fast-plaid write them, training, indexes of theirs."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from codes import same_documents, unit
from lanes import random

import maxsim
from maxsim import Packed, Quantized, quantize, reference
from maxsim.quantized import residual

BITS = residual.BITS


def packed_as_published(buckets: np.ndarray, bits: int) -> np.ndarray:
    """ColBERT's words: bit b of each number at place b, then numpy's packbits over all of them."""
    spread = (buckets[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(spread.reshape(len(buckets), -1).astype(np.uint8), axis=1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [8, 24, 128])
def test_bits_as_published(bits, width):
    buckets = np.random.default_rng(bits).integers(0, 1 << bits, (50, width))
    packed = residual.pack(torch.from_numpy(buckets), bits)
    assert np.array_equal(packed.numpy(), packed_as_published(buckets, bits))
    back = residual.unpacked(bits, torch.device("cpu"))[packed.long()].view(50, -1)
    assert np.array_equal(back.numpy(), buckets)


@pytest.mark.parametrize(
    ("bits", "buckets", "byte"),
    [(1, [1, 0, 1, 1, 0, 0, 0, 1], 0b10110001), (2, [0, 1, 2, 3], 0b00100111), (4, [1, 8], 0b10000001), (8, [1], 128)],
)
def test_bytes_by_hand(bits, buckets, byte):
    assert residual.pack(torch.tensor([buckets]), bits).tolist() == [[byte]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("width", [1, 5, 19, 64])
@pytest.mark.parametrize("renormalize", [False, True])
def test_what_is_decoded(bits, width, renormalize):
    """A centroid and the weight of each bucket; the bucket is the one that the residual lies in."""
    d = random(1, 30, 7, width)
    made = quantize(d, "residual", bits=bits, renormalize=renormalize)
    p = made.parameters
    assert made.codes.shape == (30, 7, -(-width * bits // 8))
    assert made.bytes_a_token == made.codes.shape[2] + 4 + 4 * renormalize
    assert p.centroid.shape == (30, 7)
    assert (len(p.weights), len(p.cutoffs), p.bits) == (1 << bits, (1 << bits) - 1, bits)
    tokens, centroids = d.view(-1, width), p.centroids
    near = torch.cdist(tokens.double(), centroids.double())
    own = p.centroid.view(-1).long()
    assert bool((near.gather(1, own[:, None])[:, 0] <= near.amin(1) + 1e-5).all())
    bucket = torch.bucketize(tokens - centroids[own], p.cutoffs)
    wanted = centroids[own].float() + p.weights[bucket].float()
    if renormalize:
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
    back = made.dequantize().view(-1, width)
    assert torch.allclose(back, wanted, rtol=1e-6, atol=1e-7)
    for n in range(0, 210, 30):
        oracle = reference.residual_token(
            made.codes.view(210, -1)[n].numpy(), centroids[own[n]].numpy(), p.weights.numpy(), renormalize
        )
        assert np.allclose(back[n].numpy(), oracle, rtol=1e-5, atol=1e-6)


def test_more_bits_are_nearer():
    d = unit(2, 60, 20, 32)
    errors = [float((quantize(d, "residual", bits=bits, centroids=64).dequantize() - d).norm()) for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < errors[0] / 8


def test_quantiles_are_numpys():
    values, shares = random(3, 1001, 3), torch.tensor([0.0, 0.125, 0.5, 0.875, 1.0], dtype=torch.float64)
    wanted = np.quantile(values.double().numpy(), shares.numpy())
    assert np.allclose(residual.quantiles(values, shares).numpy(), wanted, rtol=1e-6)
    assert residual.quantiles(values[:0], shares).tolist() == [0] * 5


@pytest.mark.slow
def test_quantiles_of_more_than_pytorch_takes():
    """Case 33: 2^24 values and 128 more, and 50,000 vectors of width 768."""
    for rows, width in ((2**24 // 128 + 1, 128), (50_000, 768)):
        values = torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
        found = residual.quantiles(values, torch.tensor([0.25, 0.5], dtype=torch.float64))
        assert (found - torch.tensor([0.25, 0.5])).abs().max() < 1e-3
        ordered = values.view(-1).sort().values
        assert ordered[int(0.5 * (len(ordered) - 1))] <= found[1] <= ordered[int(0.5 * (len(ordered) - 1)) + 1]


@pytest.mark.parametrize("count", [1, 2, 11])
def test_fewer_vectors_than_centroids(count):
    """Case 83."""
    d = random(4, 1, count, 16)
    made = quantize(d, "residual", centroids=32, bits=8)
    assert len(made.parameters.centroids) <= count
    assert bool(made.dequantize().isfinite().all())
    assert torch.allclose(made.dequantize(), d, atol=1e-6)


def test_identical_vectors_decode_exactly():
    d = random(5, 1, 1, 16).expand(100, 10, 16)
    made = quantize(d, "residual", centroids=64)
    assert torch.equal(made.dequantize(), d.float())
    assert bool(made.parameters.centroids.isfinite().all())


def test_without_tokens():
    for d in (torch.empty(0, 4, 8), torch.empty(3, 0, 8), [torch.empty(0, 8)]):
        made = quantize(d, "residual")
        assert maxsim.score(random(1, 2, 3, 8), made).shape == (2, len(made))
    masked = quantize(random(6, 3, 4, 8), "residual", torch.zeros(3, 4, dtype=torch.bool))
    assert maxsim.score(random(1, 2, 3, 8), masked).eq(float("-inf")).all()
    assert not masked.dequantize().any()
    assert not masked.codes.any()


def test_same_result_on_every_run():
    d = unit(7, 40, 15, 24)
    first = quantize(d, "residual", seed=3)
    assert same_documents(first, quantize(d, "residual", seed=3))
    assert not same_documents(first, quantize(d, "residual", seed=4))
    packed = quantize(Packed(d.view(-1, 24), torch.arange(41) * 15), "residual", seed=3)
    assert torch.equal(packed.parameters.centroids, first.parameters.centroids)


def test_like():
    d = unit(8, 40, 15, 24)
    first = quantize(d, "residual", bits=4, renormalize=True)
    again = quantize(d[:7], like=first)
    assert torch.equal(again.codes, first.codes[:7])
    assert again.parameters.renormalize
    assert torch.equal(again.parameters.radius, first.parameters.radius[:7])
    assert quantize(d, like=quantize(d, "fp8", scale="token")).parameters.factor is not None
    found = quantize(3 * d[:7], like=quantize(d, "residual", normalize=True))
    assert found.parameters.normalized
    assert (found.dequantize() - d[:7]).abs().max() < 0.5
    for options, error, message in (
        ({"like": first, "bits": 2}, ValueError, "options are taken, got bits"),
        ({"like": first, "codec": "int8"}, ValueError, "like is residual, not int8"),
        ({"like": d}, TypeError, "like must be Quantized"),
    ):
        with pytest.raises(error, match=message):
            quantize(d, **options)
    with pytest.raises(ValueError, match="width 23, those of like 24"):
        quantize(d[..., :23], like=first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits must be one of 1, 2, 4, 8, got 3"),
        ({"bits": True}, "bits must"),
        ({"centroids": 0}, "at least 1, got 0"),
        ({"centroids": 2.5}, "whole number"),
        ({"scale": "token"}, "scale is an option of int8 and fp8, not of residual"),
        ({"parts": 4}, "parts is an option of pq, not of residual"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(random(1, 2, 3, 8), "residual", **options)


def write_index(folder, kind: str, bits: int, lengths: list[list[int]], D: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """An index of either library; → what its codes mean, divided by its norm, and the lengths of documents."""
    generator = np.random.default_rng(bits)
    centroids = generator.standard_normal((9, D)).astype(np.float16)
    weights = np.sort(generator.standard_normal(1 << bits)).astype(np.float16 if kind == "npy" else np.float32)
    cutoffs = ((weights[1:] + weights[:-1]) / 2).astype(np.float32)
    folder.mkdir()
    about = {"num_chunks": len(lengths), "nbits": bits} if kind == "npy" else {
        "num_chunks": len(lengths), "config": {"nbits": bits, "dim": D}
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(about))
    if kind == "npy":
        np.save(folder / "centroids.npy", centroids)
        np.save(folder / "bucket_weights.npy", weights)
        np.save(folder / "bucket_cutoffs.npy", cutoffs)
    else:
        torch.save(torch.from_numpy(centroids), folder / "centroids.pt")
        torch.save((torch.from_numpy(cutoffs), torch.from_numpy(weights)), folder / "buckets.pt")
    tokens = []
    for n, chunk in enumerate(lengths):
        own, buckets = generator.integers(0, 9, sum(chunk)), generator.integers(0, 1 << bits, (sum(chunk), D))
        packed = packed_as_published(buckets, bits)
        (folder / f"doclens.{n}.json").write_text(json.dumps(chunk))
        if kind == "npy":
            np.save(folder / f"{n}.codes.npy", own)
            np.save(folder / f"{n}.residuals.npy", packed)
        else:
            torch.save(torch.from_numpy(own).int(), folder / f"{n}.codes.pt")
            torch.save(torch.from_numpy(packed), folder / f"{n}.residuals.pt")
        tokens.append(centroids[own].astype(np.float64) + weights[buckets])
    whole = np.concatenate(tokens)
    return whole / np.linalg.norm(whole, axis=1, keepdims=True), np.concatenate(lengths).astype(int)


@pytest.mark.parametrize("kind", ["npy", "pt"])
@pytest.mark.parametrize("bits", BITS)
def test_indexes_of_other_libraries(kind, bits, tmp_path):
    tokens, lengths = write_index(tmp_path / "index", kind, bits, [[3, 0, 5], [7]])
    found = Quantized.from_index(tmp_path / "index")
    assert (len(found), found.codec, found.width, found.parameters.bits) == (4, "residual", 16, bits)
    back = found.dequantize()
    assert back.offsets.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert np.allclose(back.tokens.numpy(), tokens, atol=1e-6)
    q = unit(1, 2, 3, 16)
    assert torch.equal(maxsim.score(q, found), maxsim.score(q, back))
    with pytest.raises(ValueError, match="never seen"):
        maxsim.error_bound(q, found)
    found.save(tmp_path / "d")
    assert same_documents(Quantized.load(tmp_path / "d"), found)
    assert quantize(unit(2, 2, 3, 16), like=found).parameters.renormalize


def test_damaged_indexes(tmp_path):
    def fresh(name, kind="npy"):
        write_index(tmp_path / name, kind, 2, [[3, 4]])
        return tmp_path / name

    with pytest.raises(FileNotFoundError):
        Quantized.from_index(tmp_path)
    index = fresh("centroid")
    np.save(index / "0.codes.npy", np.array([0, 1, 2, 3, 4, 5, 9]))
    with pytest.raises(ValueError, match="numbered 0 to 8, codes name 9"):
        Quantized.from_index(index)
    index = fresh("lengths")
    (index / "doclens.0.json").write_text("[3, 5]")
    with pytest.raises(ValueError, match="offsets must end at the number of tokens, 7, got 8"):
        Quantized.from_index(index)
    index = fresh("fewer")
    np.save(index / "0.codes.npy", np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=r"centroid: expected torch.int32 \[7\]"):
        Quantized.from_index(index)
    index = fresh("narrow")
    np.save(index / "0.residuals.npy", np.zeros((7, 3), np.uint8))
    with pytest.raises(ValueError, match=r"codes: expected torch.uint8 \[7, 4\]"):
        Quantized.from_index(index)
    index = fresh("floats")
    np.save(index / "0.residuals.npy", np.zeros((7, 4)))
    with pytest.raises(ValueError, match=r"residuals.npy must hold torch.uint8"):
        Quantized.from_index(index)
    index = fresh("metadata")
    (index / "metadata.json").write_text("{")
    with pytest.raises(ValueError, match=r"metadata\.json"):
        Quantized.from_index(index)
    (index / "metadata.json").write_text("{}")
    with pytest.raises(ValueError, match="num_chunks"):
        Quantized.from_index(index)
    index = fresh("missing")
    (index / "0.codes.npy").unlink()
    with pytest.raises(FileNotFoundError):
        Quantized.from_index(index)


class Harmful:
    def __reduce__(self):
        return print, ("harm",)


def test_nothing_pickled_is_run(tmp_path, capsys):
    write_index(tmp_path / "npy", "npy", 2, [[3, 4]])
    np.save(tmp_path / "npy" / "0.codes.npy", np.array([Harmful()], object), allow_pickle=True)
    write_index(tmp_path / "pt", "pt", 2, [[3, 4]])
    (tmp_path / "pt" / "0.codes.pt").write_bytes(pickle.dumps(Harmful()))
    for kind in ("npy", "pt"):
        with pytest.raises(ValueError, match="not a whole index"):
            Quantized.from_index(tmp_path / kind)
    assert "harm" not in capsys.readouterr().out
