"""Documents of a Parquet file: a column of lists of lists of floats, ids, texts, and other columns as metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .arrays import Row
from .errors import FileError

COLUMNS = ("embeddings", "embedding", "tokens", "vectors", "vector")


def package(path: Path) -> Any:
    """pyarrow with its `parquet`. Raises ImportError where it is not there; `path` is what it is needed for."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: Parquet files need pyarrow: pip install 'maxsim[parquet]'") from None
    return pyarrow


def read(path: Path) -> Iterator[Row]:
    """The documents of a file.

    Raises:
        FileError: of other columns. ImportError: without pyarrow. OSError, ValueError: not Parquet, damaged, or it
            cannot be read.
    """
    pa = package(path)
    with open(path, "rb"):  # where the system's own reason comes from
        pass
    with pa.parquet.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=1024)
        names = file.schema_arrow.names
        found = [each for each in COLUMNS if each in names]
        several = (each for each in found if _of_several(pa, file.schema_arrow.field(each).type))
        column = next(several, next(iter(found), None))  # beside one vector a document there may be several
        if column is None:
            raise FileError(f"{path}: expected a column named {' or '.join(COLUMNS)}, got {names}")
        if _tensors(pa, file.schema_arrow.field(column).type) and _nulls(file.metadata, column):
            # older releases of Arrow do not read them
            raise FileError(f"{path}: column {column!r} holds nulls")
        id_name = next((each for each in ("id", "ids", "_id") if each in names), None)
        others = [each for each in names if each not in (column, id_name, "text")]
        for batch in batches:
            batch.validate(full=True)  # offsets of lists, which nothing else looks at
            beside = batch.select([each for each in names if each != column]).to_pylist()
            for values, document in zip(beside, _lists(path, column, batch.column(column)), strict=True):
                id = None if id_name is None else values[id_name]
                if id_name is not None and id is None:
                    raise FileError(f"{path}: column {id_name!r} holds a null")
                metadata = {each: values[each] for each in others if values[each] is not None}
                yield Row(id, document, values.get("text"), metadata or None)


def _of_several(pa: Any, kind: Any) -> bool:
    """Whether each document has a vector for each of its tokens."""
    lists = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return _tensors(pa, kind) or (any(of(kind) for of in lists) and any(of(kind.value_type) for of in lists))


def _tensors(pa: Any, kind: Any) -> bool:
    """Whether each document is a tensor of two dimensions, all of one shape."""
    return isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 2 and pa.types.is_floating(kind.value_type)


def _nulls(metadata: Any, name: str) -> int:
    """How many nulls a file says that a column holds, at any level."""
    groups = (metadata.row_group(at) for at in range(metadata.num_row_groups))
    chunks = (group.column(at) for group in groups for at in range(group.num_columns))
    of = [chunk.statistics for chunk in chunks if chunk.path_in_schema.split(".")[0] == name]
    return sum(each.null_count or 0 for each in of if each is not None)


def _lists(path: Path, name: str, column: Any) -> Iterator[Any]:
    """Documents of a column of lists of lists of floats."""
    import pyarrow as pa

    kind = column.type
    if _tensors(pa, kind):
        if column.null_count or column.storage.flatten().null_count:
            raise FileError(f"{path}: column {name!r} holds nulls")
        yield from column.to_numpy_ndarray()
        return
    if not _of_several(pa, kind):
        raise FileError(f"{path}: column {name!r} must hold lists of lists of floats, got {kind}")
    if column.null_count:
        raise FileError(f"{path}: column {name!r} holds {column.null_count} nulls: write empty lists")
    tokens = column.flatten()
    if pa.types.is_fixed_size_list(tokens.type):
        width = tokens.type.list_size
    else:
        widths = tokens.value_lengths().unique().to_pylist()
        if len(widths) > 1:
            raise FileError(f"{path}: column {name!r} holds tokens of widths {sorted(widths, key=str)}")
        width = widths[0] if widths else 0
    values = tokens.flatten()
    if tokens.null_count or values.null_count or not pa.types.is_floating(values.type):
        raise FileError(f"{path}: column {name!r} must hold floats without nulls, got {values.type}")
    rows = values.to_numpy(zero_copy_only=False).reshape(-1, width or 1)
    low = 0
    for length in column.value_lengths().to_pylist():
        yield rows[low : low + length, :width]
        low += length
