"""The command in this process: results, resuming, errors."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import DIM, WordEncoder
from typer.testing import CliRunner

import maxsim
from maxsim import cli, encode, explaining, indexing, progress
from maxsim.search import Corpus

TEXTS = ["the cat sat", "a dog ran far", "red green blue", "the dog sat"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encode, "load", lambda name="minilm", device=None: WordEncoder(name))
    Path("texts").write_text("\n".join(TEXTS))

    def invoke(*arguments, code=0, input=None):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], input=input)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return result

    return invoke


def test_index_search_info_check(run):
    assert "added 4 documents (0 were there already)" in run("index", "texts", "store").stdout
    result = run("search", "store", "dog sat", "-k", "2")
    assert [line.split()[2] for line in result.stdout.splitlines()] == ["texts:4", "texts:2"]
    assert "the dog sat" in result.stdout
    assert "documents  4" in run("info", "store").stdout
    assert "store is sound" in run("check", "store").stdout


def test_json(run):
    made = json.loads(run("index", "texts", "store", "--json", "--dtype", "bfloat16").stdout)
    assert (made["added"], made["skipped"], made["documents"]) == (4, 0, 4)
    Path("q.jsonl").write_text('{"id": 7, "text": "blue"}\n{"id": "ü", "text": "cat"}')
    found = json.loads(run("search", "store", "dog", "--queries", "q.jsonl", "-k", "1", "--json", "--explain").stdout)
    assert [(r.get("id"), r["query"], r["hits"][0]["id"]) for r in found] == [
        (None, "dog", "texts:2"),
        (7, "blue", "texts:3"),
        ("ü", "cat", "texts:1"),
    ]
    hit = found[1]["hits"][0]
    assert hit["text"] == "red green blue"
    place = {"position": 0, "index": 2}
    assert hit["matches"] == [{"query": "blue", "document": "blue", "similarity": hit["score"], "share": 1.0, **place}]
    assert hit["notes"] == []
    facts = json.loads(run("info", "store", "--json").stdout)
    assert (facts["documents"], facts["dim"], facts["dtype"], facts["encoder"]) == (4, DIM, "bfloat16", "minilm")
    assert json.loads(run("check", "store", "--json").stdout) == {"sound": True, "problems": []}


def test_explain_prints_what_matched(run):
    run("index", "texts", "store")
    for words in (
        ["store", "dog sat", "--explain"],
        ["store", "--explain", "dog sat"],
        ["--explain", "store", "dog sat"],
    ):
        lines = run("search", *words, "-k", "1").stdout.splitlines()
        assert lines[0].split()[2:] == ["texts:4", "the", "dog", "sat"]
        matches = [line.split() for line in lines[1:]]
        assert [(row[0], row[2]) for row in matches] == [("dog", "dog"), ("sat", "sat")]
        assert sum(float(row[3]) for row in matches) == pytest.approx(float(lines[0].split()[1]))
        assert sum(float(row[4]) for row in matches) == pytest.approx(100, abs=0.1)
        assert len(lines) == 3


def test_explain_writes_a_page_for_each_query(run):
    run("index", "texts", "store")
    result = run("search", "store", "dog sat", "--explain", "page.html", "-k", "2")
    assert result.stdout.splitlines()[-1] == "explained in page.html"
    assert len(result.stdout.splitlines()) == 3
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count('class="hit"') == 2
    assert "texts:4" in page
    found = json.loads(run("search", "store", "dog", "blue", "--explain=out.HTML", "--json").stdout)
    assert [row["page"] for row in found] == ["out-1.HTML", "out-2.HTML"]
    assert all(Path(row["page"]).exists() and "matches" not in row["hits"][0] for row in found)
    (nothing,) = json.loads(run("search", "store", "dog", "-k", "0", "--explain", "no.html", "--json").stdout)
    assert "page" not in nothing
    assert not Path("no.html").exists()
    for value, error in (("a.txt", "ends in .html, got 'a.txt'"), ("nowhere/a.html", "no folder nowhere for the page")):
        told = run("search", "store", "x", f"--explain={value}", code=2).output
        assert error in " ".join(told.replace("│", "").split())
    lines = run("search", "store", "-k", "1", "--", "--explain", "dog").stdout.splitlines()  # two queries
    assert lines[0] == "--explain"


def test_explain_without_a_text_explains_the_others_and_says_so(run):
    run("index", "texts", "store")
    corpus, encoder = Corpus.open("store"), WordEncoder()
    corpus.add(["silent", "other"], encoder.documents(["dog sat", "dog dog sat"]), texts=[None, "dog sat"])
    lines = run("search", "store", "dog sat", "-k", "6", "--explain").stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if "silent" in line)
    assert lines[at + 1].strip() == (
        "(The corpus keeps no text of this document: its tokens are called by their numbers.)"
    )
    assert [line.split()[:3] for line in lines[at + 2 : at + 4]] == [["dog", "→", "#0"], ["sat", "→", "#1"]]
    assert any("has 3 embeddings, but its text 2 tokens: another model" in line for line in lines)
    assert sum(line.strip().startswith("dog → dog") for line in lines) == 2
    found = json.loads(run("search", "store", "dog sat", "-k", "6", "--explain", "--json").stdout)
    silent = next(hit for hit in found[0]["hits"] if hit["id"] == "silent")
    assert [(match["query"], match["document"], match["index"]) for match in silent["matches"]] == [
        ("dog", None, 0),
        ("sat", None, 1),
    ]
    run("search", "store", "dog sat", "-k", "6", "--explain", "page.html")
    assert "keeps no text of this document" in Path("page.html").read_text(encoding="utf-8")


def test_nothing_found(run):
    run("index", "texts", "store")
    assert json.loads(run("search", "store", "dog", "-k", "0", "--json").stdout) == [{"query": "dog", "hits": []}]
    assert run("search", "store", "dog", "-k", "0").stdout == "no hits\n"


def test_queries_from_the_standard_input(run):
    run("index", "texts", "store")
    arguments = ["search", "store", "--queries", "-", "-k", "1", "--json"]
    found = json.loads(run(*arguments, input="dog sat\n\nblue\n").stdout)
    assert [(r["id"], r["hits"][0]["id"]) for r in found] == [("stdin:1", "texts:4"), ("stdin:3", "texts:3")]
    assert one_line(run(*arguments, input="\n", code=1)) == "maxsim: stdin: holds no text\n"
    assert "stdin:2: not UTF-8" in one_line(run(*arguments, input=b"x\n\xff", code=1))


def test_version(run):
    assert run("--version").stdout == f"maxsim {maxsim.__version__}\n"


def test_same_command_again_adds_what_is_new(run):
    run("index", "texts", "store")
    assert "added 0 documents (4 were there already)" in run("index", "texts", "store").stdout
    with open("texts", "a") as file:
        file.write("\none more")
    assert "added 1 document (4 were there already)" in run("index", "texts", "store").stdout


def test_changed_text_is_an_error_and_changes_nothing(run):
    run("index", "texts", "store")
    Path("texts").write_text("\n".join(["new first line", *TEXTS]))
    result = run("index", "texts", "store", code=1)
    assert "texts:1: the corpus holds another text under the id 'texts:1'; nothing was changed" in result.stderr
    assert "--replace" in result.stderr
    assert len(Corpus.open("store")) == 4


def test_changed_texts_are_replaced_on_request(run):
    run("index", "texts", "store")
    Path("texts").write_text("\n".join(["a new first line", *TEXTS[1:3]]))
    result = run("index", "texts", "store", "--replace")
    assert result.stdout == "added 0 documents, replaced 1 (2 were there already); store holds 4\n"
    store = Corpus.open("store")
    assert store.texts(["texts:1", "texts:4"]) == {"texts:1": "a new first line", "texts:4": TEXTS[3]}
    assert store.check() == []
    (found,) = json.loads(run("search", "store", "new line", "-k", "1", "--json").stdout)
    assert found["hits"][0]["text"] == "a new first line"
    again = json.loads(run("index", "texts", "store", "--replace", "--json").stdout)
    assert (again["added"], again["replaced"], again["skipped"], again["documents"]) == (0, 0, 3, 4)


def test_changed_metadata_is_a_changed_document(run):
    def index(*more, code=0, **fields):
        Path("one.jsonl").write_text(json.dumps({"id": 3, "text": "red fox", **fields}))
        return run("index", "one.jsonl", "store", *more, code=code)

    index(lang="en", n=1.5)
    assert "added 0" in index(lang="en", n=1.5).stdout
    assert "other metadata under the id 3" in index(code=1, lang="de").stderr
    assert Corpus.open("store").metadata([3]) == {3: {"lang": "en", "n": 1.5}}
    assert "replaced 1" in index("--replace", lang="de").stdout
    assert Corpus.open("store").metadata([3]) == {3: {"lang": "de"}}
    assert "replaced 1" in index("--replace").stdout
    assert not Corpus.open("store").metadata([3])[3]


def test_cut_documents_are_told(run):
    assert "warning" not in run("index", "texts", "store").stderr
    Path("long").write_text("one two three four five six\nred\na b c d e f g\nx y z 1 2")
    result = run("index", "long", "store", "--json")
    warning = "maxsim: warning: 2 documents are longer than 5 tokens; what follows these cannot be found"
    assert result.stderr.splitlines()[-1] == warning
    assert (json.loads(result.stdout)["cut"], json.loads(result.stdout)["limit"]) == (2, 5)
    assert "warning" not in run("index", "long", "store").stderr
    assert json.loads(run("info", "store", "--json").stdout)["cut"] == 2
    assert "cut        2" in run("info", "store").stdout
    Path("long").write_text("one two three\nred\na b c d e f g\nx y z 1 2")
    run("index", "long", "store", "--replace")
    assert Corpus.open("store").info().cut == 1
    assert "300 tokens" in " ".join(run("index", "--help").stdout.split())


def test_help_begins_with_indexing_and_wraps_whole_paragraphs(run):
    lines = run("--help").stdout.splitlines()
    first = next(n for n, line in enumerate(lines) if "Commands" in line) + 1
    assert [line.split()[1] for line in lines[first : first + 2]] == ["index", "search"]
    shown = [line.strip() for line in run("index", "--help").stdout.splitlines()]
    start = next(n for n, line in enumerate(shown) if line.startswith("Documents that the corpus"))
    paragraph = shown[start : shown.index("", start)]
    width = max(map(len, paragraph))
    assert all(len(line) + 1 + len(later.split()[0]) > width for line, later in itertools.pairwise(paragraph))


def test_cut_queries_are_told(run):
    run("index", "texts", "store")
    assert run("search", "store", "one two three four five six").stderr == ""
    result = run("search", "store", "a b c d e f g", "cat", "1 2 3 4 5 6 7 8", "--json")
    assert result.stderr == (
        "maxsim: warning: 2 queries are longer than 6 tokens; what follows these is not searched for\n"
    )
    assert len(json.loads(result.stdout)) == 3


def test_documents_without_text_are_passed_over_and_counted(run):
    Path("notes").mkdir()
    for name, text in {"a.txt": "the cat", "b.txt": " \n", "c.txt": "", "d.jsonl": '{"id": 1, "text": " "}'}.items():
        Path("notes", name).write_text(text)
    said = run("index", "notes", "store").stdout
    told = f"passed over 3 documents without any text: {Path('notes', 'b.txt')} and 2 more"
    assert said == f"added 1 document (0 were there already; {told}); store holds 1\n"
    made = json.loads(run("index", "notes", "store", "--json").stdout)
    assert (made["added"], made["skipped"], made["empty"]) == (0, 1, 3)
    Path("notes", "a.txt").write_text("\t")
    assert "holds no .txt, .jsonl or .ndjson file with text" in one_line(run("index", "notes", "store", code=1))
    Path("q.jsonl").write_text('{"id": 1, "text": ""}\n{"id": 2, "text": "cat"}')
    result = run("search", "store", "--queries", "q.jsonl", "--json")
    assert [found["id"] for found in json.loads(result.stdout)] == [2]
    assert result.stderr == "maxsim: warning: passed over 1 query without any text: q.jsonl:1\n"


def test_ids_and_metadata_come_back_as_they_were_given(run):
    lines = [{"id": 3, "text": "cat", "n": [1]}, {"id": "3", "text": "cat dog"}, {"id": "x", "text": "dog"}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("index", "a.jsonl", "store")
    Path("q.jsonl").write_text('{"id": "7", "text": "cat"}\n{"id": 7, "text": "dog"}')
    found = json.loads(run("search", "store", "--queries", "q.jsonl", "--json").stdout)
    assert [result["id"] for result in found] == ["7", 7]
    hits = {hit["id"]: hit for hit in found[0]["hits"]}
    assert [hits[id]["metadata"] for id in (3, "3", "x")] == [{"n": [1]}, None, None]
    text = run("search", "store", "--queries", "q.jsonl").stdout.splitlines()
    assert (text[0], text[5]) == ('"7"  cat', "7  dog")
    assert sorted(line.split()[2] for line in text[1:4]) == ['"3"', "3", "x"]


def test_another_process_makes_the_corpus_meanwhile(run, monkeypatch):
    def load(name="minilm", device=None):
        Corpus.create("store", DIM, encoder="minilm")
        return WordEncoder(name)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "load", load)
        error = one_line(run("index", "texts", "store", code=1))
    assert error.startswith("maxsim: another process has just made a corpus in store; give the same command again")
    assert "added 4 documents" in run("index", "texts", "store").stdout


def test_an_interrupted_replacement_keeps_old_texts(run, monkeypatch):
    run("index", "texts", "store")
    Path("texts").write_text("\n".join(f"new {text}" for text in TEXTS))
    monkeypatch.setattr(indexing, "BATCH_DOCUMENTS", 1)
    monkeypatch.setattr(indexing, "COMMIT_SECONDS", 0)
    real = WordEncoder.documents

    def stopping(encoder, texts, *arguments):
        if "far" in texts[0]:
            raise KeyboardInterrupt
        return real(encoder, texts, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WordEncoder, "documents", stopping)
        run("index", "texts", "store", "--replace", code=130)
    ids = [f"texts:{n}" for n in range(1, 5)]
    assert list(Corpus.open("store").texts(ids).values()) == [f"new {TEXTS[0]}", *TEXTS[1:]]
    assert "replaced 3 (1 was there already)" in run("index", "texts", "store", "--replace").stdout


def test_batches_are_committed(run, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_DOCUMENTS", 1)
    monkeypatch.setattr(indexing, "COMMIT_SECONDS", 0)
    monkeypatch.setattr(progress.track, "EVERY_SECONDS", 0)
    result = run("index", "texts", "store")
    assert result.stderr.splitlines()[1].startswith("encoding: 2 of 4, ")
    assert Corpus.open("store").info().segments == 4


@pytest.mark.parametrize(("documents", "seconds", "segments"), [(3, 60, 2), (99, 60, 1), (99, 0, 4)])
def test_commits_by_number_and_by_time(run, monkeypatch, documents, seconds, segments):
    monkeypatch.setattr(indexing, "BATCH_DOCUMENTS", 1)
    monkeypatch.setattr(indexing, "COMMIT_DOCUMENTS", documents)
    monkeypatch.setattr(indexing, "COMMIT_SECONDS", seconds)
    run("index", "texts", "store")
    assert Corpus.open("store").info().segments == segments
    assert Corpus.open("store").ids() == [f"texts:{n}" for n in range(1, 5)]


def test_interrupt_in_the_middle(run, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_DOCUMENTS", 1)
    monkeypatch.setattr(indexing, "COMMIT_SECONDS", 0)
    real, calls = WordEncoder.documents, []

    def stopping(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WordEncoder, "documents", stopping)
        result = run("index", "texts", "store", code=130)
    assert "stopped; store holds 2 documents, run the same command to go on" in result.stderr
    assert "added 2 documents (2 were there already)" in run("index", "texts", "store").stdout
    assert Corpus.open("store").ids() == [f"texts:{n}" for n in range(1, 5)]


def test_errors_are_one_line(run, monkeypatch):
    run("index", "texts", "store")
    Corpus.create("plain", DIM)
    Corpus.create("wide", DIM + 1, encoder="minilm")
    Path("bad.jsonl").write_text("{")
    Path("full").mkdir()
    Path("full", "letter").touch()
    cases = [
        (["search", "nowhere", "x"], "nowhere is not a corpus: there is no such folder"),
        (["info", "texts"], "texts is not a corpus: it is a file, and a corpus is a folder"),
        (["index", "texts", "texts"], "texts is not a corpus: it is a file, and a corpus is a folder"),
        (["index", "nothing", "store"], "nothing: no such file"),
        (["index", "bad.jsonl", "store"], "bad.jsonl:1: not JSON"),
        (["index", "texts", "full"], "full is not empty (it holds letter)"),
        (["index", "texts", "store", "--model", "other"], "was made with model minilm, not other"),
        (["index", "texts", "store", "--dtype", "float32"], "was made with dtype float16, not float32"),
        (["search", "store", "x", "--model", "other"], "store was made with model minilm, not other"),
        (["search", "plain", "x"], "does not say which model"),
        (["search", "wide", "x"], f"wide holds {DIM + 1}"),
        (["index", "texts", "wide"], f"wide holds {DIM + 1}"),
    ]
    for arguments, message in cases:
        result = run(*arguments, code=1)
        assert message in result.stderr
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
    next(Path("store", "segments").iterdir()).unlink()
    assert "missing, expected" in run("search", "store", "x", code=1).stderr

    def too_small(*arguments, **more):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Corpus, "open", too_small)
    assert "try --device cpu" in run("search", "store", "x", code=1).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "store", "x", "--device", "cuda"],
        ["search", "store"],
        ["search", "store", ""],
        ["search", "store", "x", " "],
        ["search", "store", "x", "-k", "-1"],
        ["search", "store", "x", "-k", "many"],
        ["search", "store", "x", "--device", "abacus"],
        ["search", "store", "x", "--device", "cuda:99"],
        ["search", "store", "x", "--device", "meta"],
        ["index", "texts"],
        ["index", "texts", "other", "--dtype", "int3"],
        ["index", "texts", "other", "--device", "nonsense"],
        ["index", "some.npz", "other", "--device", "nonsense"],
        ["dance"],
        ["info", "store", "--jso"],
    ],
    ids=" ".join,
)
def test_wrong_usage(run, arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run("index", "texts", "store")
    run(*arguments, code=2)
    assert not Path("other").exists()


@pytest.mark.parametrize("creation", ["folder", "empty catalogue"])
def test_index_recovers_from_an_interrupted_creation(run, creation):
    Path("store", "segments").mkdir(parents=True)
    if creation == "empty catalogue":
        Path("store", "catalogue.sqlite").touch()
        assert "store is not a corpus" in run("search", "store", "x", code=1).stderr
    assert "added 4 documents" in run("index", "texts", "store").stdout


def one_line(result):
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_device_without_a_backend(run, monkeypatch):
    run("index", "texts", "store")

    def unsupported(*arguments, **more):
        raise maxsim.UnsupportedError({"triton": ["needs sm_80"], "cpu": ["needs CPU tensors"]})

    for owner, name in ((explaining, "run"), (Corpus, "search")):
        monkeypatch.setattr(owner, name, unsupported)
        error = one_line(run("search", "store", "cat", "--explain", code=1))
        assert "triton: needs sm_80 cpu: needs CPU tensors; try --device cpu" in error


def test_nan_from_the_encoder(run, monkeypatch):
    run("index", "texts", "store")
    Path("texts").write_text("\n".join([*TEXTS, "one more"]))
    nan = [torch.full((2, DIM), float("nan"))]

    def documents(encoder, *arguments):
        encoder.were_cut = [False]
        return nan

    monkeypatch.setattr(WordEncoder, "documents", documents)
    monkeypatch.setattr(WordEncoder, "queries", lambda *arguments: nan)
    assert "'texts:5' holds NaN" in run("index", "texts", "store", code=1).stderr
    assert "queries hold NaN" in one_line(run("search", "store", "x", code=1))


def test_another_process_changes_the_corpus_meanwhile(run, monkeypatch):
    run("index", "texts", "store")
    Path("texts").write_text("\n".join([*TEXTS, "one more"]))
    with monkeypatch.context() as patch:
        real_documents = WordEncoder.documents

        def taken(*arguments):
            Corpus.open("store").add(["texts:5"], [torch.ones(1, DIM)])
            return real_documents(*arguments)

        patch.setattr(WordEncoder, "documents", taken)
        told = "id 'texts:5' is already in the corpus: another process has added it meanwhile"
        assert told in run("index", "texts", "store", code=1).stderr
    real_search = Corpus.search

    def deleted(corpus, *arguments, **more):
        hits = real_search(corpus, *arguments)
        Corpus.open("store").delete([hits[0][0].id])
        return hits

    monkeypatch.setattr(Corpus, "search", deleted)
    assert one_line(run("search", "store", "cat", "--explain", code=1)) == "maxsim: no document has the id 'texts:1'\n"


def test_a_damaged_corpus_is_not_sound(run):
    run("index", "texts", "store")
    path = next(Path("store", "segments").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "checksum" in run("check", "store", code=1).stdout
    assert json.loads(run("check", "store", "--json", code=1).stdout)["sound"] is False


def test_bench_is_passed_on(run):
    help = run("bench", "--help").output
    assert help.startswith("usage: maxsim bench ")
    assert "--contenders" in help
    run("bench", "no such suite", code=2)


def test_add_delete_compact(run):
    run("index", "texts", "store")
    np.savez("more.npz", tokens=np.ones((5, DIM)), lengths=np.array([2, 3]), ids=np.array([7, 8]))
    assert run("add", "store", "more.npz").stdout == "added 2 documents (0 were there already); store holds 6\n"
    np.savez("more.npz", tokens=np.ones((6, DIM)), lengths=np.array([2, 4]), ids=np.array([7, 8]))
    assert "other embeddings under the id 8" in one_line(run("add", "store", "more.npz", code=1))
    made = json.loads(run("add", "store", "more.npz", "--replace", "--json").stdout)
    assert [made[name] for name in ("added", "replaced", "skipped", "documents")] == [0, 1, 1, 6]
    assert "a pickle runs whatever code" in one_line(run("add", "store", "ids.pkl", code=1))
    assert "no document has the id 'nobody'" in one_line(run("delete", "store", "7", "nobody", code=1))
    assert run("delete", "store", "7", "texts:1").stdout == "deleted 2 documents; store holds 4\n"
    gone = json.loads(run("compact", "store", "--json").stdout)
    assert (gone["freed"] > 0, gone["segments"]) == (True, 1)
    assert "store is sound" in run("check", "store").stdout
    assert Corpus.open("store").ids() == ["texts:2", "texts:3", "texts:4", 8]


def test_search_with_a_filter(run):
    lines = [{"id": i, "text": text, "lang": "de" if i % 2 else "en", "n": i} for i, text in enumerate(TEXTS)]
    Path("some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("index", "some.jsonl", "store", "--dtype", "int8", "--exact", "float16")

    def ids(*filters):
        words = [word for each in filters for word in ("--filter", each)]
        (found,) = json.loads(run("search", "store", "dog", "--json", *words).stdout)
        return sorted(hit["id"] for hit in found["hits"])

    assert ids() == [0, 1, 2, 3]
    assert ids("lang=de") == [1, 3]
    assert ids("lang=de", "n=3", "n=2") == [3]
    assert ids("lang=fr") == []
    assert "expected FIELD=VALUE, got 'lang'" in run("search", "store", "dog", "--filter", "lang", code=2).stderr
    facts = json.loads(run("info", "store", "--json").stdout)
    assert (facts["dtype"], facts["exact"]) == ("int8", "float16")
    run("index", "some.jsonl", "store", "--dtype", "int8")
    assert "was made with exact float16, not float32" in one_line(
        run("index", "some.jsonl", "store", "--exact", "float32", code=1)
    )


def test_a_filter_finds_texts_that_read_as_json(run):
    isbn, huge = "9783161484100", "97831614841009783161484100"
    values = ["2024", 2024, 2025, "true", True, "NaN", "1e999", isbn, huge, "null", None]
    lines = [{"id": i, "text": TEXTS[0], "of": value} for i, value in enumerate(values)]
    Path("some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run("index", "some.jsonl", "store")
    for word, wanted in (
        ("2024", [0, 1]), ('"2024"', [0]), ("2025", [2]), ("true", [3, 4]), ("NaN", [5]), ("1e999", [6]), (isbn, [7]),
        (huge, [8]), ("null", [9, 10]), ("[1]", []),
    ):  # fmt: skip
        (found,) = json.loads(run("search", "store", "dog", "-k", "20", "--json", "--filter", f"of={word}").stdout)
        assert sorted(hit["id"] for hit in found["hits"]) == wanted, word


def test_ids_of_a_command_line_that_are_none(run):
    run("index", "texts", "store")
    for id in ("--5", "99999999999999999999", "9223372036854775808", "-"):
        assert f"no document has the id '{id}'" in one_line(run("delete", "store", "--", id, code=1))


def test_check_of_a_corpus_that_does_not_open(run):
    run("index", "texts", "store")
    next(Path("store/segments").iterdir()).unlink()
    assert "00000001.safetensors: missing" in run("check", "store", code=1).stdout


def test_rerank(run):
    run("index", "texts", "store")
    whole = json.loads(run("search", "store", "dog sat", "--json").stdout)[0]["hits"]
    (found,) = json.loads(run("rerank", "store", "dog sat", "texts:1", "texts:4", "texts:1", "--json").stdout)
    assert found["hits"] == [hit for hit in whole if hit["id"] in ("texts:1", "texts:4")]
    assert found["hits"][0]["text"] == "the dog sat"
    assert [
        line.split()[2]
        for line in run("rerank", "store", "dog sat", "texts:1", "texts:4", "-k", "1").stdout.splitlines()
    ] == ["texts:4"]
    assert "no document has the id 'nobody'" in one_line(run("rerank", "store", "dog", "nobody", code=1))
    assert "must not be empty" in run("rerank", "store", " ", "texts:1", code=2).stderr
