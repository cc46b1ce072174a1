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
    return np.packbits(spread.reshape(len(buckets), buckets.shape[1] * bits).astype(np.uint8), axis=1)


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


def test_centroids_in_halves():
    """Where it changes nothing next to residuals; not where these are 0 or halves have no room."""
    d = unit(9, 60, 20, 32)
    p = quantize(d, "residual", centroids=64).parameters
    assert p.centroids.dtype == p.weights.dtype == torch.float16
    assert p.cutoffs.dtype == torch.float32
    for other in (1e6 * d, d[:1].expand(60, 20, 32)):
        p = quantize(other, "residual", centroids=64).parameters
        assert p.centroids.dtype == p.weights.dtype == torch.float32


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
    with pytest.raises(ValueError, match=r"0\.codes\.npy names centroid 9, they are numbered 0 to 8"):
        Quantized.from_index(index)
    index = fresh("lengths")
    (index / "doclens.0.json").write_text("[3, 5]")
    with pytest.raises(ValueError, match=r"doclens\.0\.json holds 8 tokens, 0\.residuals\.npy 7 and"):
        Quantized.from_index(index)
    index = fresh("fewer")
    np.save(index / "0.codes.npy", np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=r"0\.codes\.npy 6"):
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


def put(name, value, kind="npy"):
    """An array, a tensor, JSON or bytes in place of a file."""

    def change(folder):
        path = folder / name.replace("KIND", kind)
        if isinstance(value, bytes):
            path.write_bytes(value)
        elif path.suffix == ".json":
            path.write_text(json.dumps(value))
        elif path.suffix == ".npy":
            np.save(path, value)
        else:
            torch.save(value if not isinstance(value, np.ndarray) else torch.from_numpy(value), path)

    return change


WRONG = {
    "fractional lengths": ("doclens.0.json", [3.0, 4.0], r"doclens\.0\.json must hold whole numbers .* 3\.0 at 0"),
    "half a token": ("doclens.0.json", [2.5, 4.5], r"doclens\.0\.json .* 2\.5 at 0"),
    "negative lengths": ("doclens.0.json", [8, -1], r"doclens\.0\.json .* -1 at 1"),
    "lengths true": ("doclens.0.json", [True, 6], r"doclens\.0\.json .* True at 0"),
    "lengths text": ("doclens.0.json", ["3", 4], r"doclens\.0\.json .* '3' at 0"),
    "lengths none": ("doclens.0.json", [None], r"doclens\.0\.json .* None at 0"),
    "lengths nested": ("doclens.0.json", [[3, 4]], r"doclens\.0\.json .* \[3, 4\] at 0"),
    "lengths table": ("doclens.0.json", {"3": 4}, r"doclens\.0\.json must hold a list of whole numbers, got dict"),
    "lengths number": ("doclens.0.json", 7, r"doclens\.0\.json must hold a list of whole numbers, got int"),
    "lengths huge": ("doclens.0.json", [10**30], r"doclens\.0\.json must hold whole numbers"),
    "lengths cut": ("doclens.0.json", b"[3, 4", r"doclens\.0\.json: Expecting"),
    "lengths binary": ("doclens.0.json", b"\xff\xfe", r"doclens\.0\.json: .*codec"),
    "lengths deep": ("doclens.0.json", b"[" * 200_000, r"doclens\.0\.json: "),
    "chunks fractional": ("metadata.json", {"num_chunks": 1.5}, r"metadata\.json: num_chunks must .* got 1\.5"),
    "chunks text": ("metadata.json", {"num_chunks": "1"}, r"metadata\.json: num_chunks must .* got '1'"),
    "chunks true": ("metadata.json", {"num_chunks": True}, r"metadata\.json: num_chunks must .* got True"),
    "no chunks": ("metadata.json", {"num_chunks": 0}, r"metadata\.json: num_chunks must .* got 0"),
    "chunks missing": ("metadata.json", {}, r"metadata\.json: num_chunks must .* got None"),
    "metadata list": ("metadata.json", [1], r"metadata\.json: num_chunks"),
    "codes of halves": ("0.codes.KIND", np.zeros(7, np.float16), r"0\.codes\.\w+ must hold torch\.int32 or"),
    "codes of bytes": ("0.codes.KIND", np.zeros(7, np.uint8), r"0\.codes\.\w+ must hold torch\.int32 or"),
    "codes of two dimensions": ("0.codes.KIND", np.zeros((7, 1), np.int64), r"0\.codes\.\w+ must have 1 dimension"),
    "one code": ("0.codes.KIND", np.array(3), r"0\.codes\.\w+ must have 1 dimension, got shape \[\]"),
    "negative codes": ("0.codes.KIND", np.full(7, -2), r"0\.codes\.\w+ names centroid -2"),
    "codes beyond int32": ("0.codes.KIND", np.full(7, 1 << 40), r"0\.codes\.\w+ names centroid 1099511627776"),
    "residuals of int8": ("0.residuals.KIND", np.zeros((7, 4), np.int8), r"0\.residuals\.\w+ must hold torch\.uint8"),
    "flat residuals": ("0.residuals.KIND", np.zeros(28, np.uint8), r"0\.residuals\.\w+ must have 2 dimensions, got"),
    "few residuals": ("0.residuals.KIND", np.zeros((6, 4), np.uint8), r"json holds 7 .* 0\.residuals\.\w+ 6"),
    "narrow residuals": ("0.residuals.KIND", np.zeros((7, 3), np.uint8), r"codes: expected torch\.uint8 \[7, 4\]"),
    "whole centroids": ("centroids.KIND", np.ones((9, 16), np.int64), r"centroids\.\w+ must hold torch\.float16 or"),
    "flat centroids": ("centroids.KIND", np.ones(9, np.float32), r"centroids\.\w+ must have 2 dimensions"),
    "centroids NaN": ("centroids.KIND", np.full((9, 16), np.nan), r"centroids\.\w+ holds NaN or infinity"),
    "centroids beyond": ("centroids.KIND", np.full((9, 16), 1e300), r"centroids\.\w+ holds NaN or infinity"),
    "no width": ("centroids.KIND", np.ones((9, 0), np.float32), r"centroids\.\w+ has shape \[9, 0\]"),
    "no centroids": ("centroids.KIND", np.ones((0, 16), np.float32), r"0\.codes\.\w+ names centroid"),
    "empty file": ("0.codes.KIND", b"", r"0\.codes\.\w+: "),
    "text": ("0.codes.KIND", b"text", r"0\.codes\.\w+: "),
    "cut": ("0.residuals.KIND", b"\x93NUMPY\x01\x00", r"0\.residuals\.\w+: "),
    "an archive": ("0.residuals.KIND", b"PK\x03\x04", r"0\.residuals\.\w+: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["npy", "pt"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_names_its_file(name, kind, tmp_path):
    """A plain ValueError for whatever a file holds."""
    file, value, message = WRONG[name]
    index = tmp_path / "index"
    write_index(index, kind, 2, [[3, 4]])
    put(file, value, kind)(index)
    with pytest.raises(ValueError, match=f"not a whole index of ColBERT or fast-plaid: .*{message}") as error:
        Quantized.from_index(index)
    assert str(index) in str(error.value)


@pytest.mark.parametrize("kind", ["npy", "pt"])
def test_missing_files(kind, tmp_path):
    write_index(tmp_path / "whole", kind, 2, [[3, 4], [5]])
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in names:
        index = tmp_path / f"without {name}"
        write_index(index, kind, 2, [[3, 4], [5]])
        (index / name).unlink()
        with pytest.raises(FileNotFoundError) as error:
            Quantized.from_index(index)
        assert name.split(".")[0] in str(error.value)
        (index / name).mkdir()
        with pytest.raises((OSError, ValueError)) as error:
            Quantized.from_index(index)
        assert name.split(".")[0] in str(error.value)
    with pytest.raises(OSError, match="metadata"):
        Quantized.from_index(tmp_path / "whole" / "metadata.json")


BUCKETS = {
    "one tensor": (torch.zeros(2, 3), r"buckets\.pt: expected two tensors"),
    "three": ((torch.zeros(3), torch.zeros(4), torch.zeros(1)), r"buckets\.pt: expected two tensors"),
    "table": ({"cutoffs": torch.zeros(3)}, r"buckets\.pt: expected two tensors"),
    "lists": (([0.0], [0.0, 1.0]), r"buckets .* must hold torch\.float16 or .* got list"),
    "whole": ((torch.zeros(3, dtype=torch.int32), torch.zeros(4)), r"buckets .* must hold torch\.float16"),
    "flat": ((torch.zeros(3, 1), torch.zeros(4)), r"buckets .* must have 1 dimension"),
    "NaN": ((torch.zeros(3), torch.full((4,), float("nan"))), r"buckets .* holds NaN or infinity"),
    "few": ((torch.zeros(3), torch.zeros(3)), "weights must be 2, 4, 16 or 256, got 3"),
    "many cutoffs": ((torch.zeros(4), torch.zeros(4)), r"cutoffs: expected torch\.float32 \[3\]"),
    "falling": ((torch.tensor([0.0, 2.0, 1.0]), torch.zeros(4)), "cutoffs holds 1.0 at"),
    "sparse": ((torch.zeros(3).to_sparse(), torch.zeros(4)), r"buckets.*[sS]parse"),  # PyTorch's own warning too
}


@pytest.mark.parametrize("name", BUCKETS)
def test_wrong_buckets_of_colbert(name, tmp_path):
    value, message = BUCKETS[name]
    write_index(tmp_path / "index", "pt", 2, [[3, 4]])
    torch.save(value, tmp_path / "index" / "buckets.pt")
    with pytest.raises(ValueError, match=f"not a whole index of ColBERT or fast-plaid: .*{message}"):
        Quantized.from_index(tmp_path / "index")


def test_chunks_that_make_up_for_each_other(tmp_path):
    """Lengths of one chunk are not those of another, though their sums agree; nor are widths."""
    write_index(tmp_path / "index", "npy", 2, [[3, 4], [5]])
    put("doclens.0.json", [3, 5])(tmp_path / "index")
    put("doclens.1.json", [4])(tmp_path / "index")
    with pytest.raises(ValueError, match=r"doclens\.0\.json holds 8 tokens, 0\.residuals\.npy 7 and 0\.codes\.npy 7"):
        Quantized.from_index(tmp_path / "index")
    write_index(tmp_path / "wide", "npy", 2, [[3, 4], [5]])
    put("1.residuals.npy", np.zeros((5, 5), np.uint8))(tmp_path / "wide")
    with pytest.raises(ValueError, match=r"1\.residuals\.npy holds 5 bytes a token, 0\.residuals 4"):
        Quantized.from_index(tmp_path / "wide")


def test_arrays_in_other_orders(tmp_path):
    """Columns first, or as parameters that ask for gradients."""
    for kind in ("npy", "pt"):
        write_index(tmp_path / kind, kind, 2, [[3, 4]])
        wanted = Quantized.from_index(tmp_path / kind)
        codes, centroids = wanted.codes.numpy(), wanted.parameters.centroids
        if kind == "npy":
            np.save(tmp_path / kind / "0.residuals.npy", np.asfortranarray(codes))
            np.save(tmp_path / kind / "centroids.npy", np.asfortranarray(centroids.numpy()))
        else:
            torch.save(torch.from_numpy(np.asfortranarray(codes)), tmp_path / kind / "0.residuals.pt")
            torch.save(torch.nn.Parameter(centroids), tmp_path / kind / "centroids.pt")
        found = Quantized.from_index(tmp_path / kind)
        assert same_documents(found, wanted)
        assert found.codes.is_contiguous()
        assert not found.parameters.centroids.requires_grad
