"""Reading texts: every form, and every fault with its file and line."""

from __future__ import annotations

import io
import os

import pytest

from maxsim.sources import SourceError, Text, read, read_stream


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_one_document_a_line(tmp_path):
    path = write(tmp_path / "notes.md", "\ufefffirst\r\n \t\n  second\x0bü\u2028still second \n\nlast")
    assert list(read(path)) == [
        Text("notes.md:1", "first", None, f"{path}:1"),
        Text("notes.md:3", "second\x0bü\u2028still second", None, f"{path}:3"),
        Text("notes.md:5", "last", None, f"{path}:5"),
    ]


def test_stream():
    assert list(read_stream(io.BytesIO("\ufeffone\n\n ü ".encode()), "stdin")) == [
        Text("stdin:1", "one", None, "stdin:1"),
        Text("stdin:3", "ü", None, "stdin:3"),
    ]
    for data, message in ((b"\n", "stdin: holds no text"), (b"x\n\xff", "stdin:2: not UTF-8: .* at offset 2")):
        with pytest.raises(SourceError, match=message):
            list(read_stream(io.BytesIO(data), "stdin"))


def test_json_lines(tmp_path):
    path = write(
        tmp_path / "a.jsonl", '{"id": "x", "text": "one\\ntwo"}\n\n{"id": 5, "text": "ü", "lang": "de", "n": [1]}\n'
    )
    assert list(read(path)) == [
        Text("x", "one\ntwo", None, f"{path}:1"),
        Text(5, "ü", {"lang": "de", "n": [1]}, f"{path}:3"),
    ]


def test_files_of_public_collections(tmp_path):
    beir = write(
        tmp_path / "corpus.jsonl", '{"_id": "7", "title": "t", "text": "x"}\n{"id": 1, "_id": 2, "text": "y"}\n'
    )
    assert list(read(beir)) == [
        Text("7", "x", {"title": "t"}, f"{beir}:1"),
        Text(1, "y", {"_id": 2}, f"{beir}:2"),
    ]
    colbert, empty = write(tmp_path / "collection.TSV", "\ufeff0\t ü x \r\n\n1\t\tt\n2\ty\tthe title\n"), []
    assert list(read(colbert, empty)) == [
        Text("0", "ü x", None, f"{colbert}:1"),
        Text("2", "y", {"title": "the title"}, f"{colbert}:4"),
    ]
    dpr = write(tmp_path / "passages.tsv", "id\ttext\ttitle\n1\tx\tt\nid\ty\tt\n")
    assert [(text.id, text.text) for text in read(dpr)] == [("1", "x"), ("id", "y")]
    assert empty == [f"{colbert}:3"]


def test_folder(tmp_path):
    write(tmp_path / "b.txt", "second\nline\n")
    write(tmp_path / "a" / "deep.TXT", "first")
    write(tmp_path / "c.ndjson", '{"id": "j", "text": "third"}')
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "readme.md", "not read")
    assert [(text.id, text.text) for text in read(tmp_path)] == [
        ("a/deep.TXT", "first"),
        ("b.txt", "second\nline"),
        ("j", "third"),
    ]


def test_documents_without_text_are_passed_over(tmp_path):
    for name, text in {"a.txt": "\n", "b.txt": "x", "c.jsonl": '{"id": 1, "text": ""}\n{"id": 2, "text": "y"}'}.items():
        write(tmp_path / name, text)
    empty = []
    assert [text.id for text in read(tmp_path, empty)] == ["b.txt", 2]
    assert empty == [str(tmp_path / "a.txt"), f"{tmp_path / 'c.jsonl'}:1"]


FAULTS = {
    "empty file": ({"a.md": ""}, "a.md", "a.md: holds no text"),
    "only white space": ({"a.md": " \n\t\n"}, "a.md", "a.md: holds no text"),
    "only empty .txt in a folder": ({"d/a.txt": "", "d/b.txt": "\n"}, "d", "d: holds no .txt, .* file with text"),
    "empty folder": ({"d/a.png": ""}, "d", "no .txt, .jsonl or .ndjson"),
    "missing": ({}, "nothing", "nothing: no such file"),
    "Latin-1": ({"a.md": "good\nna\u00efve".encode("latin-1")}, "a.md", r"a.md:2: not UTF-8: byte 0xef at offset 7"),
    "UTF-16": ({"a.md": "x".encode("utf-16")}, "a.md", "a.md:1: not UTF-8: byte 0xff at offset 0"),
    "cut inside a character": ({"d/a.txt": "ü".encode()[:1]}, "d", "a.txt:1: not UTF-8: byte 0xc3 at offset 0"),
    "not JSON": ({"a.jsonl": '{"id": 1, "text": "x"}\n{id: 2}'}, "a.jsonl", "a.jsonl:2: not JSON"),
    "NaN": ({"a.jsonl": '{"id": 1, "text": "x", "n": NaN}'}, "a.jsonl", "a.jsonl:1: not JSON: NaN"),
    "very deep": ({"a.jsonl": "[" * 100_000}, "a.jsonl", "a.jsonl:1: not JSON"),
    "no object": ({"a.jsonl": '["x"]'}, "a.jsonl", "a.jsonl:1: expected an object .* got list"),
    "no id": ({"a.jsonl": '{"docid": 1, "text": "x"}'}, "a.jsonl", 'a.jsonl:1: no "id"; the line has docid, text'),
    "JSON": ({"a.json": '[{"id": 1, "text": "x"}]'}, "a.json", "a.json: JSON is read by lines: .* a .jsonl file"),
    "no tab": ({"a.tsv": "1\tx\n2 y\n"}, "a.tsv", "a.tsv:2: expected an id, a tab and a text, .* got 0 tabs"),
    "many tabs": ({"a.tsv": "1\tu\tt\tb\n"}, "a.tsv", "a.tsv:1: expected .* got 3 tabs"),
    "same id twice, with tabs": ({"a.tsv": "1\tx\n1\ty\n"}, "a.tsv", "a.tsv:2: id '1' was already used at .*a.tsv:1"),
    "only tabs": ({"a.tsv": "1\t \n"}, "a.tsv", "a.tsv: holds no text"),
    "no text": ({"a.jsonl": '{"id": 1}'}, "a.jsonl", 'a.jsonl:1: no "text"'),
    "id of another type": ({"a.jsonl": '{"id": 1.5, "text": "x"}'}, "a.jsonl", "a.jsonl:1: an id must be .* got 1.5"),
    "bool id": ({"a.jsonl": '{"id": true, "text": "x"}'}, "a.jsonl", "a.jsonl:1: an id must be .* got true"),
    "huge id": ({"a.jsonl": '{"id": 9223372036854775808, "text": "x"}'}, "a.jsonl", "a.jsonl:1: .* 64 bits"),
    "only empty texts": ({"a.jsonl": '{"id": 1, "text": " "}'}, "a.jsonl", "a.jsonl: holds no text"),
    "text of another type": ({"a.jsonl": '{"id": 1, "text": 5}'}, "a.jsonl", "a.jsonl:1: the text of id 1 .* got 5"),
    "cut off": (
        {"a.jsonl": '{"id": 1, "text": "x"}\n{"id": 2, "te'},
        "a.jsonl",
        "a.jsonl:2: not JSON: Unterm.* at .column 11 of 13.; the file ends in this line, .* and may be cut",
    ),
    "not JSON in the middle": ({"a.jsonl": '{"id": 1,\n{}'}, "a.jsonl", r"a.jsonl:1: not JSON: .* .column \d+.$"),
    "surrogate": ({"a.jsonl": '{"id": 1, "text": "\\ud800"}'}, "a.jsonl", "a.jsonl:1: half a surrogate"),
    "same id twice": (
        {"a.jsonl": '{"id": "i", "text": "x"}\n{"id": "j", "text": "x"}\n{"id": "i", "text": "y"}'},
        "a.jsonl",
        "a.jsonl:3: id 'i' was already used at .*a.jsonl:1",
    ),
    "same id in two files": (
        {"d/a.jsonl": '{"id": "b.txt", "text": "x"}', "d/b.txt": "y"},
        "d",
        "b.txt: id 'b.txt' was already used at .*a.jsonl:1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_its_place(tmp_path, fault):
    files, source, message = FAULTS[fault]
    for name, data in files.items():
        write(tmp_path / name, data)
    with pytest.raises(SourceError, match=message) as caught:
        list(read(tmp_path / source))
    assert "\n" not in str(caught.value)


def test_good_documents_before_a_fault_are_yielded(tmp_path):
    path = write(tmp_path / "a.md", b"one\n\xff")
    texts = read(path)
    assert next(texts).text == "one"
    with pytest.raises(SourceError):
        next(texts)


def test_an_id_and_its_digits_differ(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"id": 1, "text": "x"}\n{"id": "1", "text": "y"}')
    assert [text.id for text in read(path)] == [1, "1"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_refused(tmp_path):
    """It could be read only once."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceError, match="save it to a file"):
        list(read(tmp_path / "pipe"))
