"""An encoder without a model: a word is a fixed vector of whole numbers. As a script: the command with that encoder."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Sequence

import torch

DIM = 16


class WordEncoder:
    def __init__(self, name: str = "minilm", pause: float = 0.0) -> None:
        self.name, self.dim, self.pause = name, DIM, pause
        self.limit, self.cut, self.were_cut = 5, 0, list[bool]()
        self.query_limit, self.cut_queries = 6, 0

    def documents(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        result = []
        self.were_cut = []
        for text in texts:
            words = text.lower().split()
            self.were_cut.append(len(words) > self.limit)
            self.cut += len(words) > self.limit
            result.append(torch.tensor([vector(word) for word in words[: self.limit]]).reshape(-1, DIM))
            time.sleep(self.pause)
            if progress:
                progress(1)
        return result

    def queries(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> list[torch.Tensor]:
        words = [text.lower().split() for text in texts]
        self.cut_queries += sum(len(each) > self.query_limit for each in words)
        return [torch.tensor([vector(word) for word in each[: self.query_limit]]).reshape(-1, DIM) for each in words]

    def document_spans(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        return text, [word.span() for word in re.finditer(r"\S+", text)][: self.limit]

    def query_spans(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        return text, [word.span() for word in re.finditer(r"\S+", text)][: self.query_limit]


def vector(word: str) -> list[float]:
    rng = random.Random(word)
    return [float(rng.randint(-3, 3)) for _ in range(DIM)]


if __name__ == "__main__":
    from maxsim import cli, encode, indexing
    from maxsim.corpus import adding, segments

    pause = float(sys.argv.pop(1))
    encode.load = lambda name="minilm", device=None: WordEncoder(name, pause)
    indexing.BATCH_DOCUMENTS, indexing.COMMIT_SECONDS = 8, 0
    segments.SEGMENT_BYTES, write = 256, segments.write_segment

    def write_slowly(*args, **kwargs):
        time.sleep(pause)
        return write(*args, **kwargs)

    adding.write_segment = write_slowly
    cli.main()
