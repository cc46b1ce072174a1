"""A BERT of two layers, made on disk with random weights and a vocabulary of its own: no hub, no download."""

from __future__ import annotations

import pathlib

import torch

WORDS = [
    "a", "the", "cat", "dog", "fruit", "bread", "river", "stone", "is", "was", "of", "in", "on", "under", "good", "bad",
    "healthy", "green", "old", "runs", "sleeps", "eats", "where",
]  # fmt: skip
MARKS = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
QUERIES = ["is the fruit healthy", "where sleeps the old dog ?", "bread", "the green river runs"]
POSITIVES = [
    "the fruit, the bread: is healthy.",
    "the old dog sleeps (under the stone)!",
    "good bread .",
    "river; green",
]
NEGATIVES = ["a cat, a dog.", "bread - bad bread - is on the stone ...", "!", "the cat eats: fruit, bread, stone."]


def make(folder: pathlib.Path, seed: int = 0) -> str:
    """→ the folder's path, with a model and a tokenizer that `transformers` loads by it."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[Q]", "[D]", *MARKS, *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)
