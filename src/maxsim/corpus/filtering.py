"""What a filter of metadata asks for: `{field: value or list of values}`, checked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Wanted(NamedTuple):
    """Values of a field, any of which will do. `constants`: of True, False and None."""

    texts: list[str]
    numbers: list[int | float]
    constants: list[bool | None]


Filter: TypeAlias = dict[str, Wanted]


def check_filter(filter: Mapping[str, Any]) -> Filter:
    """The filter by kinds of values.

    Raises:
        TypeError: no dict, a field that is no str, a value that is no str, number, bool or None, nor a list of them.
        ValueError: a number that JSON does not have, or an int beyond 64 bits.
    """
    if not isinstance(filter, Mapping):
        raise TypeError(f"filter must be a dict of fields and values, got {type(filter).__name__}")
    return {_name(field): _wanted(field, value) for field, value in filter.items()}


def _name(field: object) -> str:
    if not isinstance(field, str):
        raise TypeError(f"a field of a filter must be a str, got {type(field).__name__}: {field!r}")
    return field


def _wanted(field: str, value: object) -> Wanted:
    if hasattr(value, "tolist"):  # of numpy and torch
        value = value.tolist()
    several = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
    values: Collection[Any] = value if several else [value]  # type: ignore[assignment]
    wanted = Wanted([], [], [])
    for each in values:
        if isinstance(each, np.generic):  # of a list of Python
            each = each.item()
        if each is None or isinstance(each, bool):
            wanted.constants.append(each)
        elif isinstance(each, str):
            wanted.texts.append(each)
        elif isinstance(each, (int, float)):
            if not math.isfinite(each) or (isinstance(each, int) and not -(2**63) <= each < 2**63):
                raise ValueError(f"filter {field!r}: numbers are finite, and whole ones fit in 64 bits, got {each}")
            wanted.numbers.append(each)
        else:
            raise TypeError(
                f"filter {field!r}: a value must be a str, a number, True, False or None, or a list of these, got "
                f"{type(each).__name__}"
            )
    return wanted
