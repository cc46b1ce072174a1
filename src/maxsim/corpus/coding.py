"""What a corpus keeps of an embedding: floats as they are, or codes of `maxsim.quantize`, perhaps with a float copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packed import Packed, Views
from ..quantized import Codes, Quantized, product, residual, scaled
from ..quantized.codes import CODECS, SHARED
from ..quantizing import quantize

FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NAMES = (*FLOATS, *CODECS)
OPTIONS = ("scale", "bits", "centroids", "renormalize", "parts", "seed")
TRAINED = ("residual", "pq")
BLOCK = 1 << 20  # tokens looked at in one go

Shape = tuple[torch.dtype, tuple[int, ...]]  # of a tensor's entries


def float_name(dtype: str | torch.dtype, what: str) -> str:
    """Raises ValueError for anything that is not one of FLOATS."""
    name = str(dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise ValueError(f"{what} must be one of {', '.join(FLOATS)}, got {dtype}")
    return name


@dataclass(frozen=True)
class Coding:
    """`name`: a float dtype or a codec. `exact`: the dtype of the copy beside codes, or None. `options`: of the codec,
    as `quantize` takes them. `tables`: what "residual" and "pq" are decoded by, None until they are trained."""

    dim: int
    name: str
    exact: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    tables: Codes | None = None

    @classmethod
    def make(
        cls, dim: int, name: str | torch.dtype, exact: Any, options: Mapping[str, Any], like: Quantized | None
    ) -> Coding:
        """Of what `create` was given.

        Raises:
            ValueError: an unknown dtype, options that are wrong or of another codec, a `like` that does not fit.
        """
        name = {"float8_e4m3fn": "fp8"}.get(str(name).removeprefix("torch."), str(name).removeprefix("torch."))
        if name not in NAMES:
            raise ValueError(f"dtype must be one of {', '.join(NAMES)}, got {name}")
        given = {
            key: value.item() if isinstance(value, np.generic) else value
            for key, value in options.items()
            if value is not None
        }
        if name in FLOATS:
            wrong = [*given, *(["exact"] if exact is not None else []), *(["like"] if like is not None else [])]
            if wrong:
                raise ValueError(f"{wrong[0]} is for codes, and dtype {name} keeps floats")
            return cls(dim, name)
        if like is None:
            quantize(torch.zeros(1, 1, dim, dtype=torch.float32, device="cpu"), name, **given)  # refuses what is wrong
            tables = None
        else:
            tables = _tables(like, dim, name, given)
        return cls(dim, name, None if exact is None else float_name(exact, "exact"), given, tables)

    @property
    def dtype(self) -> torch.dtype:
        """What documents are converted to before anything is made of them, and queries before they are scored."""
        return FLOATS[self.name if self.name in FLOATS else self.exact or "float32"]

    @property
    def quantised(self) -> bool:
        return self.name not in FLOATS

    @property
    def trained(self) -> bool:
        """Whether there is what codes are made by."""
        return self.name not in TRAINED or self.tables is not None

    def of_tokens(self) -> dict[str, Shape]:
        """The tensors of a segment that have a row a token."""
        if not self.quantised:
            return {"tokens": (self.dtype, (self.dim,))}
        copy: dict[str, Shape] = {} if self.exact is None else {"exact": (self.dtype, (self.dim,))}
        if self.name in scaled.LIMIT:
            factor: dict[str, Shape] = {"factor": (torch.int16, ())} if self.options.get("scale") == "token" else {}
            return {"codes": (scaled.STORED[self.name], (self.dim,)), **factor, **copy}
        tables = self._known()
        if tables.books is not None:
            return {"codes": (torch.uint8, (len(tables.books),)), **copy}
        width = residual.bytes_a_row(self.dim, tables.bits)
        inverse: dict[str, Shape] = {"inverse": (torch.float32, ())} if tables.renormalize else {}
        return {"codes": (torch.uint8, (width,)), "centroid": (torch.int32, ()), **inverse, **copy}

    def of_documents(self) -> tuple[str, ...]:
        """The tensors of a segment that have a float32 entry a document."""
        if not self.quantised:
            return ()
        return ("scale", "radius", "norm") if self.name in scaled.LIMIT else ("radius", "norm")

    def beyond(self, tensors: Mapping[str, Tensor]) -> str | None:
        """What is wrong with codes of a segment that name what the tables do not have; None for sound ones."""
        tables = self.tables
        if tables is not None and tables.centroids is not None:
            named, count, what = tensors["centroid"], len(tables.centroids), "centroid"
        elif tables is not None and tables.books is not None and tables.books.shape[1] < 256:
            named, count, what = tensors["codes"], tables.books.shape[1], "codeword"
        else:
            return None
        for low in range(0, len(named), BLOCK):
            part = named[low : low + BLOCK].int()
            wrong = (part < 0) | (part >= count)
            if bool(wrong.any()):
                at = wrong.nonzero()[0]
                return (
                    f"token {low + int(at[0])} names {what} {int(part[tuple(at)])}, they are numbered 0 to {count - 1}"
                )
        return None

    def train(self, tokens: Tensor, offsets: Tensor) -> Coding:
        """With tables made of these documents, where the codec has any and they are not there."""
        if self.trained:
            return self
        made = quantize(Packed(tokens, offsets), self.name, **self.options)
        return dataclasses.replace(self, tables=_shared(made.parameters))

    def adopt(self, codes: Codes) -> Coding | None:
        """Such that documents by these parameters can be kept as they are, with their tables where there were none;
        None where another codec is kept, or floats are.

        Raises:
            ValueError: another width, other tables, or not what the options ask for.
        """
        if codes.width != self.dim:
            raise ValueError(f"width {codes.width}, the corpus has {self.dim}")
        if self.name != codes.codec or self.exact is not None:
            return None
        if codes.scaled:
            found: dict[str, Any] = {"scale": "document" if codes.factor is None else "token"}
            asked: Mapping[str, Any] = {"scale": "token" if self.options.get("scale") == "token" else "document"}
        elif codes.books is not None:
            found, asked = {"parts": len(codes.books)}, self.options
        else:
            assert codes.centroids is not None
            found, asked = {"bits": codes.bits, "centroids": len(codes.centroids)}, self.options
            found["renormalize"] = codes.renormalize
        wrong = [name for name, value in found.items() if asked.get(name, value) != value]
        if wrong and self.tables is None:
            raise ValueError(f"{codes.codec} codes with {wrong[0]} {found[wrong[0]]}, the corpus has {asked[wrong[0]]}")
        if self.tables is not None and not same_tables(self.tables, codes):
            raise ValueError(
                f"{codes.codec} codes by other tables than the corpus has: make another corpus for them, or one of "
                "floats, which takes what they decode to"
            )
        return self if self.trained else dataclasses.replace(self, tables=_shared(codes))

    def encode(self, tokens: Tensor, offsets: Tensor) -> dict[str, Tensor]:
        """Documents in `dtype`, finite and packed, `[T, D]` and int64 `[N + 1]` → the tensors of a segment."""
        if not self.quantised:
            return {"tokens": tokens}
        packed = Packed(tokens, offsets)
        if self.tables is None:
            made = quantize(packed, self.name, **self.options)
        else:
            made = quantize(packed, like=self.like())
        kept = {**made.parameters.of_tokens(), **{name: getattr(made.parameters, name) for name in self.of_documents()}}
        return {"codes": made.codes, **kept, **({} if self.exact is None else {"exact": tokens})}

    def agree(self, kept: Mapping[str, Tensor], tokens: Tensor, offsets: Tensor) -> Tensor:
        """Documents as for `encode` beside the codes of as many documents of these lengths, tensors of a segment (their
        `as_bytes`) → of each token whether these are its codes, bool `[T]`. How the nearest of equally near ones was
        chosen does not count; of residual not even whether another centroid is nearer, since finding that is most of
        encoding."""
        tables = self.tables
        if not len(tokens):
            return torch.ones(0, dtype=torch.bool, device="cpu")
        if tables is not None and tables.books is not None:
            return product.agree(tokens.float(), kept["codes"], tables.books)
        if tables is not None and tables.centroids is not None and tables.cutoffs is not None:
            own = residual.buckets(tokens.float(), kept["centroid"], tables.centroids, tables.cutoffs)
            return (own == kept["codes"]).all(1)
        if not self.trained or tables is not None:  # nothing can be encoded as it was
            return torch.zeros(len(tokens), dtype=torch.bool, device="cpu")
        made = as_bytes(self.encode(tokens, offsets))
        same = (made["codes"] == kept["codes"]).all(1)
        if "factor" in made:
            same &= made["factor"] == kept["factor"]
        return same & (made["scale"] == kept["scale"]).repeat_interleave(offsets.diff())

    def documents(
        self,
        tensors: Mapping[str, Tensor],
        offsets: Tensor,
        longest: int,
        rows: Tensor | None = None,
    ) -> Packed | Views | Quantized:
        """Documents of a segment's tensors, wherever they lie, for scoring: codes where there are any; offsets: int64
        `[N + 1]` on the same device, from 0 to all tokens. `rows`: some of the documents, int64 there too."""
        starts, ends = offsets[:-1], offsets[1:]
        if rows is not None:
            starts, ends = starts[rows], ends[rows]
        if not self.quantised and rows is None:  # that they follow one another is what some kernels need
            return Packed(tensors["tokens"], offsets, max_length=longest)
        if not self.quantised:
            return Views(tensors["tokens"], starts, ends - starts, max_length=longest)
        beside: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in ("codes", "exact")}
        parameters = dataclasses.replace(self.parameters(), **beside)
        if rows is not None:
            parameters = parameters.select(rows)
        return Quantized(tensors["codes"], parameters, longest, starts, ends, rows is None)

    def like(self) -> Quantized:
        """No documents, and the tables: what `quantize(like=)` takes and `Quantized.save` writes."""
        nothing: dict[str, Any] = {
            name: torch.empty(0, *shape, dtype=dtype, device="cpu") for name, (dtype, shape) in self.of_tokens().items()
        }
        nothing |= {name: torch.empty(0, dtype=torch.float32, device="cpu") for name in self.of_documents()}
        nothing.pop("exact", None)
        codes, place = nothing.pop("codes"), torch.empty(0, dtype=torch.int64, device="cpu")
        return Quantized(codes, dataclasses.replace(self._known(), **nothing), 0, place, place, consecutive=True)

    def parameters(self) -> Codes:
        """What decodes, without what documents and tokens have of their own."""
        known = Codes(self.name, self.dim) if self.tables is None else self.tables
        return dataclasses.replace(known, source=self.dtype)

    def shared(self) -> dict[str, Tensor]:
        """The tables by name, {} where the codec has none."""
        return {} if self.tables is None else self.tables.tensors()

    def _known(self) -> Codes:
        assert self.tables is not None
        return self.tables


def as_bytes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Such that codes of every codec can be indexed and compared, which not every PyTorch can do with fp8's."""
    fp8 = torch.float8_e4m3fn
    return {name: each.view(torch.uint8) if each.dtype == fp8 else each for name, each in tensors.items()}


def _shared(parameters: Codes) -> Codes:
    """Tables alone, as copies: those of a mapped file lie anywhere, and are read all the time."""
    shared = {name: tensor for name, tensor in parameters.tensors().items() if name in SHARED}
    tables: dict[str, Any] = {name: tensor.to("cpu", copy=True) for name, tensor in shared.items()}
    return Codes(parameters.codec, parameters.width, renormalize=parameters.renormalize, **tables)


def _tables(like: object, dim: int, name: str, given: Mapping[str, Any]) -> Codes:
    if not isinstance(like, Quantized):
        raise TypeError(f"like must be Quantized, got {type(like).__name__}")
    if name not in TRAINED:
        raise ValueError(f"like gives tables of {' or '.join(TRAINED)}; {name} has none")
    if given:
        raise ValueError(f"with like its own options are taken, got {', '.join(given)}")
    if like.codec != name or like.width != dim:
        raise ValueError(f"like is {like.codec} of width {like.width}, the corpus {name} of width {dim}")
    if like.parameters.normalized and not like.parameters.renormalize:  # whose documents are decoded as unit vectors
        raise ValueError("like was made of unit vectors (normalize=True), which a corpus does not make")
    if name == "residual" and like.parameters.cutoffs is None:
        raise ValueError("like does not say where its buckets end, so nothing can be quantised as it was")
    return _shared(like.parameters)


def same_tables(one: Codes, other: Codes) -> bool:
    """Whether codes mean the same by both."""
    if one.renormalize != other.renormalize:
        return False
    for name in ("centroids", "weights", "books"):
        first, second = getattr(one, name), getattr(other, name)
        if (first is None) != (second is None) or (first is not None and not torch.equal(first, second)):
            return False
    return True


def tables_of(codebook: Quantized) -> Codes:
    """The tables that `Coding.like` wrote."""
    return _shared(codebook.parameters)
