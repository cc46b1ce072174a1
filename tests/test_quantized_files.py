"""Quantised documents on disk: whole or not there, and nothing damaged is believed."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib

import pytest
import torch
from codes import SCALED, SCALES, same_documents
from lanes import random
from safetensors import safe_open
from safetensors.torch import save_file

import maxsim
from maxsim import Packed, Quantized, Views, quantize
from maxsim.quantized import files


def made(form: str, codec: str = "int8", **options) -> Quantized:
    if codec == "pq":
        options.setdefault("parts", 4)
    d = random(1, 6, 4, 8)
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.7
    return {
        "padded": lambda: quantize(d, codec, **options),
        "masked": lambda: quantize(d, codec, mask, **options),
        "list": lambda: quantize([x[:n] for n, x in enumerate(d)], codec, **options),
        "masked list": lambda: quantize(Packed(d.view(-1, 8), torch.arange(7) * 4), codec, mask.view(-1), **options),
        "selected": lambda: quantize(list(d), codec, **options)[[4, 1]],
        "views": lambda: quantize(Views(d.view(-1, 8), [5, 0], [3, 9]), codec, **options),
        "none": lambda: quantize(d[:0], codec, **options),
        "without tokens": lambda: quantize([d[0, :0]], codec, **options),
    }[form]()


FORMS = ("padded", "masked", "list", "masked list", "selected", "views", "none", "without tokens")


OPTIONS = [{"codec": codec, "scale": scale} for codec in SCALED for scale in SCALES]
OPTIONS += [{"codec": "residual", "bits": 4, "renormalize": True}, {"codec": "pq", "parts": 4}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_back_as_it_was(form, options, tmp_path):
    documents = made(form, **options)
    documents.save(tmp_path / "d.safetensors")
    found = Quantized.load(tmp_path / "d.safetensors")
    assert same_documents(found, documents.compact())
    q = random(2, 2, 3, 8)
    assert torch.equal(maxsim.score(q, found), maxsim.score(q, documents))
    assert [path.name for path in tmp_path.iterdir()] == ["d.safetensors"]
    found.save(str(tmp_path / "d.safetensors"))  # over the file that it is mapped from
    assert same_documents(Quantized.load(str(tmp_path / "d.safetensors"), device="cpu"), found)


def test_settings_come_back(tmp_path):
    d = random(1, 3, 4, 8, dtype=torch.bfloat16)
    documents = quantize(d, "fp8", normalize=True, scale=0.001)
    documents.save(tmp_path / "d")
    found = Quantized.load(tmp_path / "d")
    assert documents.saturated > 0
    assert (found.saturated, found.parameters.normalized, found.parameters.source) == (
        documents.saturated, True, torch.bfloat16
    )  # fmt: skip
    assert torch.equal(maxsim.error_bound(d, found, normalize=True), maxsim.error_bound(d, documents, normalize=True))


def test_candidates_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="candidates"):
        made("padded")[torch.zeros(2, 3, dtype=torch.long)].save(tmp_path / "d")
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_of_a_save_that_fails(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        made("padded").save(tmp_path / "no" / "d")
    with pytest.raises(FileNotFoundError):
        Quantized.load(tmp_path / "no")


def changed(path, change, sealed: bool = True) -> None:
    """The file with its tensors and metadata changed. sealed: with the checksums of what it has become."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    about = json.loads(metadata["about"])
    change(tensors, metadata, about)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if sealed:
        about["checksums"] = {name: files.checksum(name, tensor) for name, tensor in tensors.items()}
    if "about" in metadata:
        metadata["about"] = json.dumps(about)
        if sealed:
            metadata["checksum"] = str(zlib.crc32(metadata["about"].encode()))
    save_file(tensors, path, metadata)


def put(name, index, value):
    def change(tensors, metadata, about):
        tensors[name][index] = value

    return change


def replaced(name, make):
    def change(tensors, metadata, about):
        tensors[name] = make(tensors[name])

    return change


def told(**values):
    return lambda tensors, metadata, about: about.update(values)


DAMAGE = {
    "code of int8": ("list", "int8", put("codes", (2, 3), -128), r"token row 2, column 3, is none of int8"),
    "first scale": ("list", "int8", put("scale", 1, float("nan")), r"scale holds nan at \[1\]"),
    "zero scale": ("padded", "int8", put("scale", 0, 0.0), r"scale holds 0\.0 at \[0\]"),
    "negative scale": ("padded", "int8", put("scale", 0, -1.0), "scale holds -1.0"),
    "radius": ("padded", "int8", put("radius", 5, -1.0), r"radius holds -1\.0 at \[5\]"),
    "norm": ("padded", "int8", put("norm", 5, float("nan")), r"norm holds nan at \[5\]"),
    "falling offsets": ("list", "int8", put("offsets", 2, 9), "offsets must not fall"),
    "offsets beyond": ("list", "int8", put("offsets", 6, 99), "offsets must"),
    "first offset": ("list", "int8", put("offsets", 0, 1), "offsets must start at 0"),
    "offsets int32": ("list", "int8", replaced("offsets", lambda x: x.int()), "offsets are torch.int32"),
    "offsets gone": ("list", "int8", lambda t, m, a: [t.pop("offsets")], "without offsets"),
    "scale gone": ("list", "int8", lambda t, m, a: [t.pop("scale")], "is missing"),
    "codes gone": ("list", "int8", lambda t, m, a: [t.pop("codes")], "damaged: .codes."),
    "few scales": ("list", "int8", replaced("scale", lambda x: x[1:]), r"scale: expected torch.float32 \[6\]"),
    "scales of halves": ("list", "int8", replaced("scale", lambda x: x.half()), "got torch.float16"),
    "mask": ("masked", "int8", replaced("mask", lambda x: x.int()), "mask: expected torch.bool"),
    "short mask": ("masked", "int8", replaced("mask", lambda x: x[:, 1:]), "mask: expected"),
    "codes of another dtype": ("list", "int8", replaced("codes", lambda x: x.int()), "codes: expected torch.int8"),
    "narrow codes": ("list", "int8", replaced("codes", lambda x: x[:, 1:]), "codes: expected"),
    "another codec": ("list", "int8", told(codec="fp8"), "codes: expected torch.float8_e4m3fn"),
    "unknown codec": ("list", "int8", told(codec="int3"), "unreadable metadata"),
    "width": ("list", "int8", told(width=9), "codes: expected"),
    "width of another type": ("list", "int8", told(width="8"), "unreadable metadata"),
    "source": ("list", "int8", told(source="float12"), "float12"),
    "another tensor": ("list", "int8", lambda t, m, a: t.update(more=torch.ones(1)), r"unknown tensors \['more'\]"),
    "factor": ("list", "int8", lambda t, m, a: t.update(factor=torch.zeros(14).short()), r"factor holds 0\.0 at \[0\]"),
    "large factor": (
        "list",
        "int8",
        lambda t, m, a: t.update(factor=torch.full((14,), 16643).short()),
        "factor holds 16643",
    ),  # 127 * 127 * 8 * 16643 is beyond int32
    "centroid": ("list", "residual", put("centroid", 3, 99), r"centroid holds 99\.0 at \[3\]"),
    "negative centroid": ("padded", "residual", put("centroid", (1, 2), -1), r"centroid holds -1\.0 at \[1, 2\]"),
    "centroids": ("list", "residual", put("centroids", (0, 1), float("nan")), r"centroids holds nan at \[0, 1\]"),
    "centroids gone": ("list", "residual", lambda t, m, a: [t.pop("centroids")], "centroid"),
    "weights": ("list", "residual", replaced("weights", lambda x: x[1:]), "weights must be 2, 4, 16 or 256, got 3"),
    "weights gone": ("list", "residual", lambda t, m, a: [t.pop("weights")], "weights must be"),
    "cutoffs": ("list", "residual", put("cutoffs", 2, -99.0), r"cutoffs holds -99\.0 at \[2\]"),
    "inverse gone": ("list", "residual", told(renormalize=True), "inverse is missing"),
    "an inverse too": ("list", "residual", lambda t, m, a: t.update(inverse=torch.ones(14)), "inverse means nothing"),
    "zero inverse": (
        "list",
        "residual",
        lambda t, m, a: (a.update(renormalize=True), t.update(inverse=torch.zeros(14))),
        r"inverse holds 0\.0 at \[0\]",
    ),
    "a scale too": ("list", "residual", lambda t, m, a: t.update(scale=torch.ones(6)), "scale means nothing"),
    "code of pq": ("list", "pq", put("codes", (4, 1), 255), "token row 4, column 1, is none of pq"),
    "books": ("list", "pq", put("books", (1, 2, 0), float("inf")), r"books holds inf at \[1, 2, 0\]"),
    "wide books": ("list", "pq", replaced("books", lambda x: torch.cat([x, x], 2)), "do not make tokens of width 8"),
    "books gone": ("list", "pq", lambda t, m, a: [t.pop("books")], "books must have shape"),
    "flat books": ("list", "pq", replaced("books", lambda x: x.flatten()), "books must have shape"),
    "format": ("list", "int8", lambda t, m, a: m.update(format="2"), "format '2', this version .* reads up to 1"),
    "no format": ("list", "int8", lambda t, m, a: m.pop("format") and None, "format ''"),
    "no metadata": ("list", "int8", lambda t, m, a: m.clear(), "not quantised documents of maxsim"),
    "another kind": ("list", "int8", lambda t, m, a: m.update(kind="other"), "not quantised documents of maxsim"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name, tmp_path):
    """Case 85: before anything reads the codes."""
    form, codec, change, message = DAMAGE[name]
    path = tmp_path / "d.safetensors"
    made(form, codec).save(path)
    changed(path, change)
    with pytest.raises(ValueError, match=message) as error:
        Quantized.load(path)
    assert str(path) in str(error.value)
    assert f"{path.stat().st_size} bytes" in str(error.value)


def test_nan_codes_of_fp8_are_refused(tmp_path):
    path = tmp_path / "d"
    made("padded", "fp8").save(path)
    for code in (0x7F, 0xFF):
        changed(path, lambda t, m, a, code=code: t.update(codes=t["codes"].view(torch.uint8).index_fill_(
            2, torch.tensor([5]), code).view(torch.float8_e4m3fn)))  # fmt: skip
        with pytest.raises(ValueError, match="token row 0, column 5, is none of fp8"):
            Quantized.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("codes", (2, 3), 5), "codes has changed since it was written"),  # a code like any other
        (put("scale", 1, 0.5), "scale has changed"),
        (put("mask", (0, 0), True), "mask has changed"),
        (replaced("radius", lambda x: x.flip(0)), "radius has changed"),
        (replaced("codes", lambda x: x.flatten(0, 1)[None]), "codes has changed"),
        (lambda t, m, a: [t.pop("radius")], "radius is missing"),
        (lambda t, m, a: t.update(factor=torch.ones(6, 4).short()), "factor has changed"),
        (told(normalized=True), "the metadata have changed"),
        (lambda t, m, a: [m.pop("checksum")], "checksum"),
        (lambda t, m, a: m.update(checksum="0"), "the metadata have changed"),
    ],
)
def test_checksums(change, message, tmp_path):
    """What no look at the values would show."""
    path = tmp_path / "d"
    quantize(random(1, 6, 4, 8), "int8", torch.arange(24).view(6, 4) % 5 > 0).save(path)
    changed(path, change, sealed=False)
    with pytest.raises(ValueError, match=f"damaged: .*{message}"):
        Quantized.load(path)


@pytest.mark.parametrize("codec", ["int8", "residual"])
def test_every_byte_counts(codec, tmp_path):
    """A file with any one byte changed is refused, or says the same (blanks in its header do)."""
    path = tmp_path / "d"
    documents = made("list", codec)
    documents.save(path)
    whole, same = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x21]) + whole[place + 1 :])
        try:
            found = Quantized.load(path)
        except ValueError:
            continue
        same += 1
        assert same_documents(found, documents)
    assert same < 16


@pytest.mark.parametrize(
    "about", [[], 1, None, {}, {"checksums": None}, {"checksums": [1]}, {"checksums": {"codes": "x"}}]
)
def test_metadata_of_other_kinds(about, tmp_path):
    path, words = tmp_path / "d", json.dumps(about)
    metadata = {"kind": files.KIND, "format": "1", "about": words, "checksum": str(zlib.crc32(words.encode()))}
    save_file({"codes": torch.zeros(2, 3, 8, dtype=torch.int8)}, path, metadata)
    with pytest.raises(ValueError, match="damaged"):
        Quantized.load(path)


@pytest.mark.parametrize("cut", [0, 7, 100, 300])
def test_cut_files_are_refused(cut, tmp_path):
    path = tmp_path / "d"
    made("list").save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: -cut or 0])
    with pytest.raises(ValueError, match=f"{len(path.read_bytes())} bytes: not a whole safetensors file"):
        Quantized.load(path)
    path.write_bytes(b"\x80\x04K*.")  # a pickle
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        Quantized.load(path)


def test_a_folder_is_no_file_of_codes(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"codes are one file; Quantized\.from_index reads an index"):
        Quantized.load(tmp_path)


def test_a_loaded_file_is_mapped(tmp_path):
    """Reading takes no second copy of the codes in anonymous memory."""
    quantize(torch.ones(1, 400_000, 128)).save(tmp_path / "d")
    script = f"""
import maxsim, re
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
import torch, safetensors.torch
maxsim.Quantized.load
before = anonymous()
d = maxsim.Quantized.load({str(tmp_path / "d")!r})
print(anonymous() - before, d.nbytes >> 10)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    grown, size = map(int, done.stdout.split())
    assert grown < size * 0.9, (grown, size)


def test_only_files_are_replaced(tmp_path):
    """Links are followed, neighbours stay, and what is no file is refused; as readable as other new files."""
    documents = maxsim.quantize(torch.randn(3, 4, 16))
    (tmp_path / "d.tmp").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "d")
    for _ in range(2):
        documents.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "d.tmp").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "d.tmp", "link"]
    assert (tmp_path / "d").stat().st_mode == (tmp_path / "d.tmp").stat().st_mode
    assert torch.equal(maxsim.Quantized.load(tmp_path / "link").codes, documents.codes)
    with pytest.raises(ValueError, match="not a regular file"):
        documents.save(tmp_path)


@pytest.mark.parametrize("codec", ["int8", "fp8", "residual", "pq"])
def test_norms_beyond_float32(tmp_path, codec):
    """They are kept as infinite, and so is the bound."""
    x = (torch.rand(6, 5, 64) * 2 - 1) * 1e38
    documents = maxsim.quantize(x, codec)
    documents.save(tmp_path / "d")
    again = maxsim.Quantized.load(tmp_path / "d")
    assert torch.isinf(maxsim.error_bound(torch.ones(1, 2, 64), again)).any()


def test_all_256_codewords_are_codes(tmp_path):
    made = quantize(torch.randn(300, 2, 32, generator=torch.Generator().manual_seed(3)), "pq", parts=4)
    assert made.parameters.books.shape[1] == 256
    assert int(made.codes.max()) == 255
    made.save(tmp_path / "pq")
    assert same_documents(Quantized.load(tmp_path / "pq"), made)
