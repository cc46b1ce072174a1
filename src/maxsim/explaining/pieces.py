"""Tokens as people read them: in the text that they stand for, or put together from the names that tokenizers give."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SPECIAL = re.compile(r"\[[A-Z]+[0-9]*\]|<[^<>\s]+>")  # [CLS], <s>, <|im_end|>
CONTEXT = 12  # characters of a word that are shown on either side of a piece of it
BEYOND = 5000  # characters that are shown of a text behind its last token


class Cell(NamedTuple):
    """A piece of what is shown. `tokens` are those that stand there: none between tokens, several where a character has
    more than one. kind: "text"; "special", a token that is no piece of a text; "beyond", what follows the last
    token."""

    text: str
    tokens: tuple[int, ...] = ()
    kind: str = "text"


@dataclass(frozen=True)
class Pieces:
    """Token i is `text[start:end]` of `spans[i]`; `special` are those that are no pieces of a text, and `names` what
    they are called where they do not stand in it. `known`: what the tokens are, not only how many."""

    text: str
    spans: Sequence[tuple[int, int]]
    special: frozenset[int] = frozenset()
    known: bool = True
    names: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.spans)

    def token(self, i: int) -> str | None:
        """The text of a token, None where it is not known."""
        return self.names.get(i, self.text[slice(*self.spans[i])]) if self.known else None

    def label(self, i: int) -> str:
        """The text or name of a token, or its number where it has none."""
        return self.names.get(i) or self.text[slice(*self.spans[i])].strip() or f"#{i}"

    def word(self, i: int) -> tuple[str, str, str]:
        """A token with what its word has before and after it. (Scripts written without spaces have no such words.)"""
        start, end = self.spans[i]
        low, high = start, end
        if i not in self.special and self.text[start:end].strip():
            while low > max(start - CONTEXT, 0) and self._joined_at(low):
                low -= 1
            while high < min(end + CONTEXT, len(self.text)) and self._joined_at(high):
                high += 1
        return self.text[low:start], self.label(i), self.text[end:high]

    def _joined_at(self, place: int) -> bool:
        return _of_word(self.text[place - 1]) and _of_word(self.text[place])

    def cells(self) -> list[Cell]:
        """The text, cut at tokens."""
        cells: list[Cell] = []
        shown = 0
        for i, (start, end) in enumerate(self.spans):
            kind = "special" if i in self.special else "text"
            if start == end:
                cells.append(Cell(self.label(i), (i,), "special"))
            elif end <= shown and cells and cells[-1].tokens:  # another byte of a character, say
                cells[-1] = cells[-1]._replace(tokens=(*cells[-1].tokens, i))
            elif end <= shown:
                cells.append(Cell(self.text[start:end], (i,), kind))
            else:
                if start > shown:
                    cells.append(Cell(self.text[shown:start]))
                cells.append(Cell(self.text[max(start, shown) : end], (i,), kind))
                shown = end
        rest = self.text[shown : shown + BEYOND] + ("…" if len(self.text) > shown + BEYOND else "")
        return [*cells, Cell(rest, kind="beyond" if rest.strip() else "text")] if rest else cells


def pieces_of(count: int, text: str | None, tokens: Sequence[Any] | None, side: str) -> Pieces:
    """What `explain` was given of one side.

    Args:
        count: how many tokens there are.
        text, tokens: `[count]` names and no text, or the text and `[count]` places (start, end) in it, for special
            tokens names; neither: numbers.
        side: "query" or "document", for messages.

    Raises:
        ValueError: another number of tokens, a text without places in it, places outside it or without a text.
        TypeError: tokens that are neither names nor places.
    """
    if tokens is None:
        if text is not None:
            raise ValueError(
                f"{side}_text needs {side}_tokens, the place (start, end) of every token in it: what tokenizers call "
                "their offset mapping"
            )
        return _joined([f"#{i}" for i in range(count)], known=False)
    given = [_name_or_place(token, i, side) for i, token in enumerate(tokens)]
    if len(given) != count:
        raise ValueError(f"{side}_tokens must have one entry a token, {count}, got {len(given)}")
    if text is None:
        if not all(isinstance(token, str) for token in given):
            raise ValueError(f"{side}_tokens are places (start, end): give {side}_text too")
        return _joined(given)
    spans, names = list[tuple[int, int]](), dict[int, str]()
    for i, token in enumerate(given):
        if isinstance(token, str):
            names[i] = token
            spans.append((spans[-1][1], spans[-1][1]) if spans else (0, 0))
            continue
        if len(token) != 2 or not all(hasattr(place, "__index__") for place in token):
            raise TypeError(f"{side}_tokens must be places (start, end) or names, got {token!r} at {i}")
        start, end = int(token[0]), int(token[1])
        if not 0 <= start <= end <= len(text):
            raise ValueError(f"{side}_tokens[{i}] must lie in a text of {len(text)} characters, got {token}")
        spans.append((start, end))
    if given and len(names) == len(given):
        raise ValueError(f"with {side}_text, {side}_tokens must be places (start, end) in it, got names alone")
    return Pieces(text, spans, names=names)


def _name_or_place(token: Any, i: int, side: str) -> Any:
    if isinstance(token, str):
        return token
    try:
        if isinstance(token, bytes):
            raise TypeError
        return tuple(token)
    except TypeError:
        raise TypeError(
            f"{side}_tokens must be names (str) or places (start, end), got {type(token).__name__}: {token!r} at {i}; "
            "tokenizers make names of numbers: convert_ids_to_tokens"
        ) from None


def _joined(names: Sequence[str], known: bool = True) -> Pieces:
    """A text put together from names of tokens, by the mark that a tokenizer puts before a piece ("##") or a word
    ("▁" of SentencePiece, "Ġ" of byte-level BPE)."""
    special = frozenset(i for i, name in enumerate(names) if not known or SPECIAL.fullmatch(name))
    plain = [name for i, name in enumerate(names) if i not in special]
    if any(name[:1] in ("Ġ", "Ċ") for name in plain) and (found := _of_bytes(names)):
        return Pieces(*found, special, known)
    glued = any("▁" in name for name in plain)
    text, spans = "", list[tuple[int, int]]()
    for i, name in enumerate(names):
        piece, space = name, True
        if i in special:
            pass
        elif glued:
            piece, space = name.replace("▁", " "), False
        elif name.startswith("##") and len(name) > 2:
            piece, space = name[2:], False
        text += " " if space and text else ""
        blank = len(piece) - len(piece.lstrip()) if piece.strip() else 0
        text += piece
        spans.append((len(text) - len(piece) + blank, len(text)))
    return Pieces(text, spans, special, known)


def _of_bytes(names: Sequence[str]) -> tuple[str, list[tuple[int, int]]] | None:
    """Names of byte-level BPE, in which a character stands for a byte (Radford et al., GPT-2, `bytes_to_unicode`): its
    own where it can be seen, else the next from 256 on. None where they are no UTF-8."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    byte_of = {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(others)}
    parts = [
        b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode(errors="surrogatepass") for c in name)
        for name in names
    ]
    try:
        text = b"".join(parts).decode()
    except UnicodeDecodeError:
        return None
    owner = [n for n, character in enumerate(text) for _ in character.encode()]  # of each byte, its character
    spans, at = [], 0
    for part in parts:
        start, end = (owner[at], owner[at + len(part) - 1] + 1) if part else (0, 0)
        at += len(part)
        spans.append((start + (end - start > 1 and text[start] == " "), end))
    return text, spans


def _of_word(character: str) -> bool:
    """Whether a character is one of a word: not of scripts that are written without spaces."""
    spaceless = "\u0e00" <= character <= "\u0eff" or "\u3040" <= character <= "\ua4cf"  # Thai, Lao; Japanese, Chinese
    return not spaceless and (character.isalnum() or unicodedata.category(character) == "Mn")
