"""`python -m benchmarks.catalogue`: what the catalogue of a corpus takes a document; keeps a record.

Documents with ids of ten digits, and texts of 350 characters or none. A row is a number of documents: bytes of the
catalogue a document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import maxsim
from maxsim.bench.records import environment, write

RECORDS = Path(__file__).parent / "records"
AT_ONCE = 100_000


def measured(folder: str, count: int, text: str | None) -> dict[str, Any]:
    corpus = maxsim.Corpus.create(folder, 8)
    for low in range(0, count, AT_ONCE):
        ids = [f"{n:010d}" for n in range(low, min(low + AT_ONCE, count))]
        tokens = torch.ones(len(ids), 1, 8, dtype=torch.float16)
        corpus.add(ids, tokens, texts=None if text is None else [f"{id} {text}" for id in ids])
    return {
        "documents": count,
        "text_bytes": 0 if text is None else len(text) + 11,
        "catalogue_bytes_a_document": Path(folder, "catalogue.sqlite").stat().st_size / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.catalogue", description=__doc__)
    parser.add_argument("--documents", nargs="*", type=int, default=[100_000, 200_000])
    parser.add_argument("--commit", help="instead of what git says")
    parser.add_argument("--out", type=Path, default=RECORDS)
    options = parser.parse_args()
    where, rows = asdict(environment(torch.device("cpu"), options.commit)), []
    for count in options.documents:
        for text in (None, "x" * 350):
            with tempfile.TemporaryDirectory() as folder:
                rows.append({**measured(f"{folder}/store", count, text), **where})
            print(json.dumps(rows[-1]), flush=True)
    print("record:", write(rows, options.out, "catalogue"))


if __name__ == "__main__":
    main()
