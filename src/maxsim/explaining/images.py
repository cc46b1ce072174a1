"""Page images: a file as a data URI, and which document token is which patch."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..packed import numbers

KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
KNOWN = "PNG, JPEG, GIF or WebP"


def data_uri(image: Any) -> str:
    """An image as it stands in a page that loads nothing.

    Args:
        image: a path; the bytes of a file (PNG, JPEG, GIF or WebP); a data URI of such; or an object that saves itself
            as a PIL image does.

    Raises:
        ValueError: another kind of image. TypeError: another object. OSError: a file that cannot be read.
    """
    if isinstance(image, str) and image.startswith("data:"):
        head, _, body = image.partition(",")
        try:
            if not head.endswith(";base64"):
                raise ValueError("not base64")
            image = base64.b64decode(body, validate=True)
        except ValueError:
            raise ValueError(f"image must be a data URI of {KNOWN} in base64, got {image[:40]!r}") from None
        where = "a data URI"
    elif isinstance(image, (str, os.PathLike)):
        where = str(os.fspath(image))
        image = Path(image).read_bytes()
    elif isinstance(image, (bytes, bytearray, memoryview)):
        where, image = "bytes", bytes(image)
    elif callable(getattr(image, "save", None)):
        where, image = "an image", _png(image)
    else:
        raise TypeError(
            f"image must be a path, bytes, a data URI or an image of PIL, got {type(image).__name__}; arrays: "
            "PIL.Image.fromarray(array)"
        )
    kind = next((name for mark, name in KINDS.items() if image.startswith(mark)), None)
    if image[:4] == b"RIFF" and image[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise ValueError(f"image must be {KNOWN}, got {where} that begins with {image[:8]!r}")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _png(image: Any) -> bytes:
    """What an image of PIL saves; of modes that PNG lacks, such as CMYK of scans, in RGB, as models take it."""
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except OSError:
        if not callable(getattr(image, "convert", None)):
            raise
        file = io.BytesIO()
        image.convert("RGB").save(file, "PNG")
    return file.getvalue()


def patch_grid(patches: Any, count: int) -> Tensor:
    """Which of `count` document tokens each patch is, int64 `[rows, columns]`, −1 for none.

    Args:
        patches: (rows, columns), of which the first token is the upper left one and rows follow one another; (rows,
            columns, first), where they begin with another token; or such a table, in which a token may fill several
            places.

    Raises:
        ValueError: more patches than tokens, a token that is not there, another form.
        TypeError: no whole numbers.
    """
    given = numbers(patches, "patches", "whole numbers: (rows, columns), (rows, columns, first) or a table")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"patches must be whole numbers, got {given.dtype}")
    grid = given.long().cpu()
    if grid.ndim == 1 and len(grid) in (2, 3):
        rows, columns, *more = grid.tolist()
        first = more[0] if more else 0
        if rows < 1 or columns < 1 or first < 0 or first + rows * columns > count:
            begin = f" from token {first} on" if more else ""
            raise ValueError(f"patches: {rows} × {columns}{begin} do not lie in a document of {count} tokens")
        return torch.arange(first, first + rows * columns, device="cpu").view(rows, columns)
    if grid.ndim != 2 or 0 in grid.shape:
        raise ValueError(
            f"patches must be (rows, columns), (rows, columns, first) or [rows, columns], got shape {list(grid.shape)}"
        )
    low, high = int(grid.min()), int(grid.max())
    if low < -1 or high >= count:
        raise ValueError(f"patches must be tokens 0 to {count - 1}, or -1 for none, got {low} to {high}")
    return grid
