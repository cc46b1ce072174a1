"""Embeddings that other programs wrote, into a corpus: every form, in bounded memory, and what is refused."""

from __future__ import annotations

import errno
import io
import pickle
import random
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from stores import document
from torch.nn.functional import pad

from maxsim.corpus import FileError, files
from maxsim.search import Corpus

LENGTHS = [3, 0, 2, 5, 0, 0]
DOCUMENTS = [document(i, length) for i, length in enumerate(LENGTHS)]
TOKENS = torch.cat(DOCUMENTS)
OFFSETS = torch.tensor([0, *np.cumsum(LENGTHS)])
IDS = ["a", "b", "ü", "1", "e", "f"]
MASK = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
PADDED = torch.stack([torch.cat([d, torch.full((5 - len(d), 8), 9.0)]) for d in DOCUMENTS])


def npz(path, **arrays):
    np.savez(path, **arrays)


def packed_npz(path):
    np.savez(path, tokens=TOKENS.numpy(), offsets=OFFSETS.numpy(), ids=np.array(IDS))


FORMS = {
    "packed.npz": packed_npz,
    "compressed.npz": lambda path: np.savez_compressed(
        path, embeddings=TOKENS.numpy().astype(np.float16), lengths=np.array(LENGTHS), ids=np.array(IDS)
    ),
    "padded.npz": lambda path: np.savez(path, embeddings=PADDED.numpy(), lengths=np.array(LENGTHS), ids=np.array(IDS)),
    "fortran.npz": lambda path: np.savez(
        path, tokens=np.asfortranarray(TOKENS.numpy()), lengths=np.array(LENGTHS), ids=np.array(IDS)
    ),
    "padded in fortran order.npz": lambda path: np.savez(
        path, embeddings=np.asfortranarray(PADDED.numpy()), mask=MASK.numpy(), ids=np.array(IDS)
    ),
    "named.npz": lambda path: np.savez(path, **{id: d.numpy() for id, d in zip(IDS, DOCUMENTS, strict=True)}),
    "packed.pt": lambda path: torch.save({"tokens": TOKENS, "lengths": torch.tensor(LENGTHS)}, path),
    "list.pt": lambda path: torch.save(DOCUMENTS, path),
    "masked.npz": lambda path: np.savez(path, embeddings=PADDED.numpy(), mask=MASK.numpy(), ids=np.array(IDS)),
    "left.safetensors": lambda path: save_file(
        {"embeddings": pad(PADDED, (0, 0, 2, 0), value=9.0), "attention_mask": pad(MASK.long(), (2, 0))}, path
    ),
    "list of embeddings.pt": lambda path: torch.save({"embeddings": DOCUMENTS, "lengths": LENGTHS}, path),
    "before 1.6.pt": lambda path: torch.save(DOCUMENTS, path, _use_new_zipfile_serialization=False),
    "named.pt": lambda path: torch.save(dict(zip(IDS, DOCUMENTS, strict=True)), path),
    "packed.safetensors": lambda path: save_file({"tokens": TOKENS.bfloat16(), "offsets": OFFSETS}, path),
    "padded.safetensors": lambda path: save_file({"embeddings": PADDED, "lengths": torch.tensor(LENGTHS)}, path),
    "named.safetensors": lambda path: save_file(dict(zip(IDS, DOCUMENTS, strict=True)), path),
}


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(tmp_path, monkeypatch, form, block_bytes):
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    FORMS[form](tmp_path / form)
    corpus = Corpus.create(tmp_path / "store", 8)
    assert corpus.add_file(tmp_path / form) == 6
    named = "named" in form or form.endswith("npz")
    ids = IDS if named else [f"{form}:{number}" for number in range(1, 7)]
    assert set(corpus.ids()) == set(ids)
    for id, tokens in zip(ids, DOCUMENTS, strict=True):
        assert torch.equal(corpus.get(id).embeddings, tokens.half())
    assert corpus.add_file(tmp_path / form, replace=True) == 6
    assert len(corpus) == 6


def test_npy(tmp_path):
    np.save(tmp_path / "x.npy", PADDED.numpy())
    corpus = Corpus.create(tmp_path / "store", 8)
    corpus.add_file(str(tmp_path / "x.npy"))
    assert corpus.ids() == [f"x.npy:{number}" for number in range(1, 7)]
    assert torch.equal(corpus.get("x.npy:4").embeddings, PADDED[3].half())


def test_parquet_of_one_length(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    lists = pa.array(PADDED.tolist(), pa.list_(pa.list_(pa.float32(), 8), 5))
    parquet.write_table(pa.table({"id": IDS, "embeddings": lists}).slice(1), tmp_path / "x.parquet")
    corpus = Corpus.create(tmp_path / "store", 8)
    assert corpus.add_file(tmp_path / "x.parquet") == 5
    assert torch.equal(corpus.get("1").embeddings, PADDED[3].half())
    times = pa.table({"id": IDS, "embeddings": lists, "when": pa.array([0] * 6, pa.timestamp("s"))})
    parquet.write_table(times, tmp_path / "times.parquet")
    with pytest.raises(
        FileError, match=r"times\.parquet: .* of document 'a' is not JSON, at 'when': Object of type datetime"
    ):
        corpus.add_file(tmp_path / "times.parquet")


@pytest.mark.parametrize("kind", ["lists", "fixed", "large"])
def test_parquet(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    inner = pa.list_(pa.float32(), 8) if kind == "fixed" else pa.list_(pa.float32())
    outer = pa.large_list(inner) if kind == "large" else pa.list_(inner)
    table = pa.table(
        {
            "_id" if kind == "large" else "id": pa.array(IDS),
            "embeddings": pa.array([d.tolist() for d in DOCUMENTS], outer),
            "text": pa.array(["x", None, "y", "z", "", "w"]),
            "year": pa.array([1, 2, None, 4, 5, 6]),
        }
    )
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2)
    corpus = Corpus.create(tmp_path / "store", 8)
    assert corpus.add_file(tmp_path / "x.parquet") == 6
    assert corpus.ids() == IDS
    for id, tokens in zip(IDS, DOCUMENTS, strict=True):
        assert torch.equal(corpus.get(id).embeddings, tokens.half())
    assert (corpus.get("a").text, corpus.get("b").text, corpus.get("a").metadata) == ("x", None, {"year": 1})
    assert corpus.get("ü").metadata is None
    bad = pa.table({"id": IDS[:2], "embeddings": pa.array([[[1.0] * 8], [[1.0] * 8, [2.0]]])})
    parquet.write_table(bad, tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad.parquet: column 'embeddings' holds tokens of widths \[1, 8\]"):
        corpus.add_file(tmp_path / "bad.parquet")
    vectors = pa.array([d.tolist() for d in DOCUMENTS], outer)
    beside = pa.table({"id": range(6), "embedding": [[1.0] * 4] * 6, "vectors": vectors})  # a document has one of these
    parquet.write_table(beside, tmp_path / "both.parquet")
    assert corpus.add_file(tmp_path / "both.parquet") == 6
    assert torch.equal(corpus.get(0).embeddings, DOCUMENTS[0].half())
    assert corpus.delete(range(6)) == 6
    parquet.write_table(pa.table({"mean": [[1.0]]}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="expected a column named embeddings or"):
        corpus.add_file(tmp_path / "none.parquet")
    assert len(corpus) == 6


def test_parquet_of_tensors(tmp_path):
    """As Arrow's own type of tensors has them, and LanceDB's tables of several vectors."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    corpus = Corpus.create(tmp_path / "store", 8)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(PADDED.numpy())
    vectors = pa.array([d.tolist() for d in DOCUMENTS], pa.list_(pa.list_(pa.float32(), 8)))
    parquet.write_table(pa.table({"embedding": tensors, "id": range(6)}), tmp_path / "tensors.parquet")
    parquet.write_table(pa.table({"vector": vectors, "id": IDS}), tmp_path / "lance.parquet")
    assert corpus.add_file(tmp_path / "tensors.parquet") == corpus.add_file(tmp_path / "lance.parquet") == 6
    for i, id in enumerate(IDS):
        assert torch.equal(corpus.get(i).embeddings, PADDED[i].half())
        assert torch.equal(corpus.get(id).embeddings, DOCUMENTS[i].half())
    nulls = pa.ExtensionArray.from_storage(tensors.type, pa.array([None] * 2, tensors.type.storage_type))
    for wrong in (nulls, pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 3, 8), np.int32))):
        parquet.write_table(pa.table({"embedding": wrong}), tmp_path / "wrong.parquet")
        with pytest.raises(ValueError, match=r"wrong.parquet: column 'embedding' (holds nulls|must hold lists)"):
            corpus.add_file(tmp_path / "wrong.parquet")


def test_parquet_that_cannot_be_read(tmp_path, monkeypatch):
    """What the system says is told as it is; the file is closed."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"embeddings": [[[1.0] * 8]]}), tmp_path / "x.parquet")
    opened = []

    class Failing(parquet.ParquetFile):
        def iter_batches(self, **options):
            opened.append(self)
            yield from super().iter_batches(**options)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(parquet, "ParquetFile", Failing)
    corpus = Corpus.create(tmp_path / "store", 8)
    with pytest.raises(OSError, match="Input/output error"):
        corpus.add_file(tmp_path / "x.parquet")
    assert [file.closed for file in opened] == [True]


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def evil_npz(path):
    np.savez(path, tokens=TOKENS.numpy(), offsets=OFFSETS.numpy(), ids=np.array([Evil()] * 6, dtype=object))


def cut_npz(path):
    packed_npz(path)
    path.write_bytes(path.read_bytes()[:-40])


def foreign_npz(path):
    packed_npz(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("note.txt", "no array")


def twice_npz(path):
    packed_npz(path)
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("ids.npy", archive.read("ids.npy"))


def trailing_npz(path):
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in (("offsets", OFFSETS.numpy()), ("tokens", TOKENS.numpy())):
            file = io.BytesIO()
            np.save(file, array)
            archive.writestr(f"{name}.npy", file.getvalue() + b"more" * (name == "tokens"))


BAD = {
    "ids.pkl": (lambda p: p.write_bytes(pickle.dumps({0: "a"})), "a pickle runs whatever code .* ids as an array"),
    "objects.npz": (evil_npz, "ids holds objects, which are pickled: save documents packed"),
    "documents.npz": (
        lambda p: npz(p, embeddings=np.array([Evil(), 1], dtype=object), lengths=np.array([1, 1])),
        "embeddings holds objects, which are pickled",
    ),
    "objects.npy": (lambda p: np.save(p, np.array([Evil()], dtype=object)), "holds objects, which are pickled"),
    "evil.pt": (lambda p: torch.save({"a": Evil()}, p), "holds more than tensors, which only unpickling"),
    "empty.pt": (lambda p: p.write_bytes(b""), "0 bytes, damaged"),
    "rows.pt": (lambda p: torch.save({"embeddings": [TOKENS[0]]}, p), r"expected embeddings \[N, L, D\], or tokens"),
    "none.pt": (lambda p: torch.save({"embeddings": [TOKENS, None]}, p), r"embeddings\[1\] must be a torch tensor"),
    "short mask.npz": (
        lambda p: npz(p, embeddings=np.ones((3, 5, 8)), mask=np.ones((2, 5), bool)),
        r"a mask \[2, 5\], and a document 2 of 5 tokens",
    ),
    "long mask.npz": (
        lambda p: npz(p, embeddings=np.ones((1, 5, 8)), mask=np.ones((2, 5), bool)),
        "a mask of 2 documents, 1 documents",
    ),
    "wide mask.npz": (
        lambda p: npz(p, embeddings=np.ones((2, 5, 8)), attention_mask=np.ones((2, 6), int)),
        r"a mask \[2, 6\], and a document 0 of 5 tokens",
    ),
    "lengths for a mask.npz": (
        lambda p: npz(p, embeddings=np.ones((2, 5, 8)), mask=np.array([[5, 3]])),
        r"mask must hold 0 and 1 \[N, L\], got int64 \[1, 2\]",
    ),
    "flat mask.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), lengths=np.array([5]), mask=np.ones((1, 5), bool)),
        "a mask, and lengths or offsets too",
    ),
    "archive.npy": (
        lambda p: npz(p.with_suffix(".npz"), a=np.ones((5, 8))) or p.with_suffix(".npz").rename(p),
        r"archive\.npy: \d+ bytes, damaged: the magic string is not correct",
    ),
    "empty.npy": (lambda p: p.write_bytes(b""), r"empty\.npy: 0 bytes, damaged"),
    "cut.npy": (
        lambda p: np.save(p, np.ones((2, 3, 8))) or p.write_bytes(p.read_bytes()[:-9]),
        r"cut\.npy: 503 bytes, damaged",
    ),
    "flat.npy": (lambda p: np.save(p, np.ones((3, 8))), r"expected \[N, L, D\], got shape \[3, 8\]"),
    "cut.npz": (cut_npz, "bytes, damaged"),
    "cut.safetensors": (lambda p: p.write_bytes(b"\xff" * 30), "bytes, damaged"),
    "text.csv": (lambda p: p.write_text("a,b"), r"expected a folder or one of \.npz, "),
    "short.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 2, 9])),
        "tokens end before the documents do",
    ),
    "long.npz": (lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 2])), "go on for 3 after the last"),
    "falling.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 7, 5])),
        r"offsets must not fall: 7, then 5 at 2",
    ),
    "unsigned.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 7, 5], np.uint64)),
        "offsets must not fall: 7, then 5 at 2",
    ),
    "scalar.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array(5)),
        r"offsets must be whole numbers of one dimension, got int64 \[\]",
    ),
    "table.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([[0, 5]])),
        r"offsets must be whole numbers of one dimension, got int64 \[1, 2\]",
    ),
    "fractions.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 2.5])),
        "offsets must be whole numbers of one dimension, got float64",
    ),
    "late.npz": (lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([1, 5])), r"begin with 0, got \[1\]"),
    "none.npz": (lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.zeros(0, int)), r"begin with 0, got \[\]"),
    "negative.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), lengths=np.array([6, -1])),
        "lengths must not be negative, got -1 at 1",
    ),
    "foreign.npz": (foreign_npz, "foreign.npz: holds 'note.txt', which is no array: expected what numpy.savez writes"),
    "twice.npz": (twice_npz, "twice.npz: holds two arrays of one name"),
    "trailing.npz": (trailing_npz, "trailing.npz: tokens goes on after its array"),
    "scalar.safetensors": (
        lambda p: save_file({"embeddings": torch.ones(())}, p),
        r"expected embeddings \[N, L, D\]",
    ),
    "cut.pt": (lambda p: p.write_bytes(b"PK\x03\x04 and so on"), r"cut\.pt: \d+ bytes, damaged"),
    "ids.pt": (
        lambda p: torch.save({"tokens": TOKENS, "lengths": torch.tensor(LENGTHS), "ids": "abc"}, p),
        "ids must be one array of str or int, got str",
    ),
    "meta.pt": (lambda p: torch.save({"a": torch.ones(2, 8, device="meta")}, p), "must hold values, got a meta tensor"),
    "no.parquet": (lambda p: p.write_bytes(b"PAR1 and so on PAR1"), r"no\.parquet: \d+ bytes, damaged|need pyarrow"),
    "ids.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 5]), ids=np.array(["a", "b"])),
        "1 documents, 2 ids",
    ),
    "floats.npz": (
        lambda p: npz(p, tokens=np.ones((5, 8)), offsets=np.array([0, 5]), ids=np.array([0.5])),
        "ids must be one array of str or int, got float64",
    ),
    "unpacked.npz": (lambda p: npz(p, embeddings=np.ones((5, 8))), r"expected embeddings \[N, L, D\], or tokens"),
    "width.npz": (lambda p: npz(p, a=np.ones((5, 7))), "width 7, the corpus has 8"),
    "nan.npz": (lambda p: npz(p, a=np.full((5, 8), np.nan)), "'a' holds NaN"),
    "ints.npz": (lambda p: npz(p, a=np.ones((5, 8), dtype=int)), "must hold floats"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(tmp_path, capsys, name):
    write, message = BAD[name]
    write(tmp_path / name)
    corpus = Corpus.create(tmp_path / "store", 8)
    with pytest.raises((ValueError, TypeError, ImportError), match=message):
        corpus.add_file(tmp_path / name)
    assert "unpickled" not in capsys.readouterr().out
    assert len(corpus) == 0
    assert list((corpus.path / "segments").iterdir()) == []


def flipped(path, rng):
    """With one to three bits changed."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("form", ["packed.npz", "compressed.npz", "padded.npz", "packed.safetensors", "packed.pt"])
def test_damaged_files_are_told(tmp_path, form):
    """Whatever bit changes: an error that names the file, or one of documents; where a format keeps checksums, no other
    embeddings."""
    FORMS[form](tmp_path / form)
    whole, rng = (tmp_path / form).read_bytes(), random.Random(form)
    for number in range(8):
        (tmp_path / form).write_bytes(whole)
        flipped(tmp_path / form, rng)
        corpus = Corpus.create(tmp_path / f"store{number}", 8)
        try:
            corpus.add_file(tmp_path / form)
        except (ValueError, TypeError, OSError):
            assert len(corpus) == 0
            continue
        assert corpus.check() == []
        if form.endswith("npz"):
            kept = [corpus.get(id).embeddings for id in corpus.ids()]
            assert torch.equal(torch.cat(kept), TOKENS.half())


def test_a_file_that_is_not_there(tmp_path):
    corpus = Corpus.create(tmp_path / "store", 8)
    for name in ("x.npz", "x.npy", "x.safetensors", "x.pt"):
        with pytest.raises(FileNotFoundError):
            corpus.add_file(tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_takes_bounded_memory(tmp_path, environment):
    """240 MB of float32 tokens, compressed and not, through segments of 8 MiB."""
    code = (
        "import sys, numpy as np, torch\n"
        "from maxsim.corpus import segments\nfrom maxsim.search import Corpus\n"
        "torch.set_num_threads(1); segments.SEGMENT_BYTES = 8 << 20\n"
        "tokens = np.ones((10000, 128), dtype=np.float32)\n"
        "def peak(): return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "c = Corpus.create(sys.argv[1], 128)\n"
        "c.add(['warm'], [torch.ones(3, 128)]); before = peak()\n"
        "c.add_file(sys.argv[2]); assert len(c) == 481\n"
        "c.add(range(48), (torch.ones(10000, 128) for _ in range(48)))\n"
        "assert peak() - before < 120_000, (before, peak())\n"
    )
    tokens = np.ones((480_000, 128), dtype=np.float32)
    np.savez(tmp_path / "x.npz", tokens=tokens, lengths=np.full(480, 1000))
    del tokens
    command = [sys.executable, "-c", code, tmp_path / "store", tmp_path / "x.npz"]
    subprocess.run(command, env=environment, check=True)
