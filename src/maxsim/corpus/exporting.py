"""Out of a corpus into files of other programs, with bounded memory: embeddings as `.safetensors`, `.npz` or
`.parquet`, and beside them ids, texts and metadata as JSON lines, which `add_file` reads together with them.

Documents come in the order of adding, floats as they are kept; bfloat16, which only safetensors has, as float32. Of a
corpus that keeps codes alone a `.safetensors` has these codes (as `Quantized.save` writes them), other files what they
decode to.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..packed import Packed
from ..quantized import Quantized
from ..quantized.files import metadata_of, name_beside
from . import lines, parquet
from . import rows as sql
from .catalogue import Catalogue
from .coding import Shape
from .documents import Id
from .gathering import Lot, gathered
from .reading import Snapshot
from .streamed import SafetensorsWriter

KINDS = (".safetensors", ".npz", ".parquet", ".jsonl")


class Exported(NamedTuple):
    """The number of documents, and the files that were written: of embeddings, if any, and of lines."""

    documents: int
    files: tuple[Path, ...]


def export(path: Path, catalogue: Catalogue, refresh: Callable[..., Snapshot]) -> Exported:
    """As `Corpus.export`: what is read is one state of the corpus."""
    kind = path.suffix.lower()
    if kind not in KINDS:
        raise ValueError(f"{path}: expected one of {', '.join(KINDS)}")
    files = (path,) if kind == ".jsonl" else (path, lines.beside(path))
    for each in files:
        if each.exists():
            raise FileExistsError(f"{each} is there already")
    if kind == ".parquet":
        parquet.package(path)
    made = {each: name_beside(each) for each in files}
    placed = list[Path]()
    try:
        with catalogue.reading() as db:
            snapshot = refresh(db)
            for segment in snapshot.segments:
                segment.open()
            rows = sql.checked(db, catalogue.path, "deleted = 0 ORDER BY position")()
            ids, positions = _write_lines((sql.held(catalogue.path, row) for row in rows), made[files[-1]])
        if kind != ".jsonl":
            _write_embeddings(made[path], kind, snapshot, ids, positions)
        for target, temporary in made.items():
            os.replace(temporary, target)
            placed.append(target)
    except BaseException:
        for each in placed:
            each.unlink()
        raise
    finally:
        for temporary in made.values():
            temporary.unlink(missing_ok=True)
    return Exported(len(ids), files)


def _write_lines(documents: Iterator[sql.Held], path: Path) -> tuple[list[Id], Tensor]:
    """→ the ids and positions, int64, rising."""
    ids, positions = list[Id](), list[int]()
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for position, id, text, metadata in documents:
            file.write(lines.line(id, text, metadata))
            ids.append(id)
            positions.append(position)
    return ids, torch.tensor(positions, dtype=torch.int64, device="cpu")


def _write_embeddings(path: Path, kind: str, snapshot: Snapshot, ids: list[Id], positions: Tensor) -> None:
    """The documents of these positions as a file of that kind."""
    if kind == ".parquet":
        _parquet(path, snapshot, ids, positions)
        return
    lengths = [segment.lengths[rows] for segment, rows in snapshot.places(positions)]
    offsets = torch.cat([positions.new_zeros(1), *lengths]).cumsum(0)
    if kind == ".npz":
        _npz(path, snapshot, ids, positions, offsets)
    else:
        _safetensors(path, snapshot, positions, offsets)


def _safetensors(path: Path, snapshot: Snapshot, positions: Tensor, offsets: Tensor) -> None:
    coding, N, T = snapshot.coding, len(positions), int(offsets[-1])
    codes = coding.quantised and coding.exact is None and coding.trained
    shapes: dict[str, Shape] = {"offsets": (torch.int64, (N + 1,))}
    for name, (dtype, shape) in coding.of_tokens().items() if codes else [("tokens", (coding.dtype, (coding.dim,)))]:
        shapes[name] = (dtype, (T, *shape))
    tables = coding.shared() if codes else {}
    if codes:
        shapes |= dict.fromkeys(coding.of_documents(), (torch.float32, (N,)))
        shapes |= {name: (each.dtype, tuple(each.shape)) for name, each in tables.items()}
    with SafetensorsWriter(path, shapes) as file:
        for name, tensor in {"offsets": offsets, **tables}.items():
            file.write(name, tensor)
        for lot in gathered(snapshot, positions, exact=True):
            for name, tensor in lot.tensors.items():
                file.write("tokens" if name == "exact" else name, tensor)
        if codes:
            file.metadata = metadata_of(coding.parameters(), 0, file.checksums)


def _floats(snapshot: Snapshot, lot: Lot) -> Tensor:
    """Tokens of documents, as numpy and Parquet have them."""
    kept = lot.tensors.get("tokens", lot.tensors.get("exact"))
    if kept is None:
        codes = snapshot.coding.documents(lot.tensors, lot.offsets, lot.longest)
        assert isinstance(codes, Quantized)
        decoded = codes.dequantize()
        assert isinstance(decoded, Packed)
        kept = decoded.tokens
    return kept.float() if kept.dtype == torch.bfloat16 else kept


def _npz(path: Path, snapshot: Snapshot, ids: list[Id], positions: Tensor, offsets: Tensor) -> None:
    npy: Any = np.lib.format
    with zipfile.ZipFile(path, "w") as archive:

        def put(name: str, dtype: Any, shape: tuple[int, ...], blocks: Iterator[Any]) -> None:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(file, header)
                for block in blocks:
                    file.write(np.ascontiguousarray(block).data.cast("B") if block.size else b"")

        half = snapshot.coding.dtype == torch.float16
        lots = gathered(snapshot, positions, exact=True)
        blocks = (_floats(snapshot, lot).numpy() for lot in lots)
        put("tokens", np.float16 if half else np.float32, (int(offsets[-1]), snapshot.coding.dim), blocks)
        put("offsets", np.int64, (len(offsets),), iter([offsets.numpy()]))
        if ids and len({type(id) for id in ids}) == 1:
            named = np.array(ids)
            if named.tolist() == ids:  # numpy's strings end before characters 0
                put("ids", named.dtype, named.shape, iter([named]))


def _parquet(path: Path, snapshot: Snapshot, ids: list[Id], positions: Tensor) -> None:
    pa = parquet.package(path)
    value = pa.float16() if snapshot.coding.dtype == torch.float16 else pa.float32()
    kind = pa.large_list(pa.list_(value, snapshot.coding.dim))
    fields = {"embeddings": kind}
    types = {type(id) for id in ids}
    if len(types) == 1:
        fields = {"id": pa.int64() if types == {int} else pa.string(), **fields}
    done = 0
    with ExitStack() as stack:
        file = stack.enter_context(pa.parquet.ParquetWriter(path, pa.schema(list(fields.items()))))
        for lot in gathered(snapshot, positions, exact=True):
            count = len(lot.positions)
            values = pa.array(_floats(snapshot, lot).reshape(-1).numpy(), value)
            tokens = pa.FixedSizeListArray.from_arrays(values, snapshot.coding.dim)
            columns = {"embeddings": pa.LargeListArray.from_arrays(pa.array(lot.offsets.numpy()), tokens)}
            if "id" in fields:
                columns["id"] = pa.array(ids[done : done + count], fields["id"])
            file.write_table(pa.table({name: columns[name].cast(fields[name]) for name in fields}))
            done += count
