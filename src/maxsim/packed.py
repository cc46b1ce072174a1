"""Ragged tokens without padding: `Packed` (items follow one another) and `Views` (items anywhere in a buffer)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(tensor: Tensor, what: str) -> None:
    """NotImplementedError for a tensor inside a transform of torch.func, or one with a forward-mode tangent, or where
    torch.jit traces."""
    if torch.compiler.is_compiling():
        return
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{what} are traced by torch.jit, which maxsim does not take: use torch.compile or torch.export"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{what} are inside a transform of torch.func (vmap, grad, jvp, ...), which maxsim does not take: for "
            "gradients call backward() or torch.autograd.grad; instead of vmap give all queries and documents in one "
            "call, [NQ, K, LD, D] for documents of each query, or take score_pairs; there is no forward mode"
        )
    unpack: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and unpack(tensor).tangent is not None:
        raise NotImplementedError(
            f"{what} have a forward-mode tangent, and maxsim has no forward mode: call backward() or "
            "torch.autograd.grad, or give detached tensors"
        )


def _plain(tensor: Tensor, what: str) -> Tensor:
    """A tensor whose values are in its memory, where kernels read them. One that a collective has yet to bring is
    waited for, and one that PyTorch has negated by a flag alone (`is_neg`) is copied.

    Raises:
        NotImplementedError: as `refuse_transforms`. TypeError: a subclass that holds its values in other tensors, or
            none.
    """
    refuse_transforms(tensor, what)
    of: Any = type(tensor)
    plain: Any = Tensor
    if torch.compiler.is_compiling() or tensor.is_nested:
        return tensor
    if of.__torch_dispatch__ is plain.__torch_dispatch__:
        return tensor.resolve_neg()
    if of.__name__ == "AsyncCollectiveTensor":  # of torch.distributed's functional collectives; keeps its gradient
        waited: Tensor = of.wait(tensor)
        return waited
    instead = ": give its to_local() or full_tensor()" if of.__name__ == "DTensor" else ""
    raise TypeError(
        f"{what} must be a plain tensor, got {of.__name__}, which has no memory that a kernel could read{instead}"
    )


def refuse_batches(grad: Tensor) -> None:
    """NotImplementedError for gradients that a vectorised call brings many at once."""
    if torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_functorch_wrapped_tensor(grad):
        raise NotImplementedError(
            "gradients of scores come in batches (is_grads_batched=True, jacobian(vectorize=True), vmap), which maxsim "
            "does not take: call torch.autograd.grad once for each, or jacobian without vectorize"
        )


def numbers(value: Any, what: str, kind: str) -> Tensor:
    """A tensor of numbers or booleans: a tensor as it is, arrays and nested lists copied. `kind`: what errors ask for.

    Raises:
        TypeError: anything else. ValueError: rows of different lengths, a tensor without data.
    """
    if isinstance(value, Tensor):
        tensor = _plain(value, what)
        if tensor.is_meta:
            raise ValueError(f"{what} must hold {kind}, got a tensor on the meta device, which holds no values")
        if tensor.layout != torch.strided:
            raise TypeError(f"{what} must be a dense tensor, got layout {tensor.layout}")
        return tensor
    if torch.compiler.is_compiling():  # which traces an array's values, not its dtype
        return torch.from_numpy(np.array(value))
    try:
        array = np.array(value)
    except ValueError:
        raise ValueError(f"{what} must hold {kind}, got rows of different lengths") from None
    if array.dtype.kind not in "iufb":
        got = f"numpy {array.dtype}" if isinstance(value, np.ndarray) else _elements(value)
        raise TypeError(f"{what} must hold {kind}, got {got}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))  # which torch wants


def _elements(value: Any) -> str:
    """What is wrong with a value that is not numbers: the first thing in its lists that is none."""
    while isinstance(value, (list, tuple)):
        wrong = [each for each in value if not isinstance(each, (int, float, np.number, np.bool_))]
        if not wrong:
            return "numbers beyond 64 bits"
        value = wrong[0]
    shown = repr(value)
    return f"{type(value).__name__}: {shown}" if value is not None and len(shown) <= 40 else type(value).__name__


def kind_of(value: object) -> str:
    """What came in place of tokens, for a message."""
    return f"{type(value).__name__}{' (maxsim.encode makes tokens of texts)' if isinstance(value, str) else ''}"


def as_tensor(value: Any, what: str) -> Tensor:
    """A tensor as it is; a numpy array without a copy where it can be shared, bfloat16 of ml_dtypes included."""
    if isinstance(value, Tensor):
        tensor = _plain(value, what)
        if tensor.layout not in (torch.strided, torch.jagged):
            raise TypeError(f"{what} must be a dense tensor, got layout {tensor.layout}")
        return tensor
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{what} must be a torch tensor or a numpy array, got {kind_of(value)}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} must be a plain array, got a masked one of numpy: pass its data, and its mask apart")
    if value.dtype.name == "bfloat16":
        return as_tensor(value.view(np.uint16), what).view(torch.bfloat16)
    if value.dtype.kind not in "fiub" or value.dtype.itemsize > 8:  # torch has no long double
        raise TypeError(f"{what} must hold floats, got numpy {value.dtype}")
    odd = any(stride < 0 or stride % value.itemsize for stride in value.strides)  # a record's field: no whole steps
    if not value.flags.writeable or odd or not value.dtype.isnative:
        value = np.array(
            value, dtype=value.dtype.newbyteorder("=")
        )  # torch takes only writable, forward, native arrays
    return torch.from_numpy(value)


def _index(value: Any, what: str) -> Tensor:
    tensor = numbers(value, what, "whole numbers, int32 or int64")
    if tensor.ndim != 1:
        raise ValueError(f"{what} must have one dimension, got shape {list(tensor.shape)}")
    if tensor.dtype not in (torch.int32, torch.int64):
        if tensor.numel():
            raise TypeError(f"{what} must be int32 or int64, got {tensor.dtype}")
        tensor = tensor.long()
    return tensor


def _matrix(tokens: Any) -> Tensor:
    tensor = as_tensor(tokens, "tokens")
    if tensor.ndim != 2:
        raise ValueError(f"tokens must have shape [T, D], got {list(tensor.shape)}")
    return tensor


class Packed:
    """Items one after another: item i is `tokens[offsets[i]:offsets[i + 1]]`.

    Args:
        tokens: `[T, D]`, torch or numpy.
        offsets: `[N + 1]`, int32 or int64, from 0 to T, never falling. Best given on the CPU: it is then checked, the
            longest item is known, and it moves to the tokens' device once, here.
        max_length: a bound on the tokens of one item. Worth giving where the offsets are on a GPU, since reading them
            would wait for the device; without it T is assumed, which costs memory where winners are kept.
        validate: check offsets that live on a GPU (waits for the device). Unchecked, they are clamped, never read out
            of bounds.

    Raises:
        ValueError: wrong shapes; offsets that do not start at 0, fall, or do not end at T; an item longer than
            `max_length`.
        TypeError: offsets that are not int32 or int64.
    """

    __slots__ = ("__weakref__", "ends", "max_length", "offsets", "starts", "tokens")

    def __init__(self, tokens: Any, offsets: Any, max_length: int | None = None, *, validate: bool = False):
        self.tokens = _matrix(tokens)
        T = self.tokens.shape[0]
        given = _index(offsets, "offsets")
        if given.numel() == 0:
            raise ValueError("offsets must have N + 1 entries, at least the 0 they start with")
        longest = T
        checked = _checked(given, validate)
        if checked:
            lengths = given.long().clamp(-1, T + 1).diff()  # clamped, so that differences do not wrap round
            first, last = int(given[0]), int(given[-1])
            if first != 0:
                raise ValueError(f"offsets must start at 0, got {first}")
            if lengths.numel() and int(lengths.min()) < 0:
                at = int((lengths < 0).nonzero()[0])
                raise ValueError(f"offsets must not fall: offsets[{at}] = {int(given[at])}, then {int(given[at + 1])}")
            if last != T:
                raise ValueError(f"offsets must end at the number of tokens, {T}, got {last}")
            longest = int(lengths.max()) if lengths.numel() else 0
        self.max_length = _bound(max_length, longest, checked)
        self.offsets = given.to(self.tokens.device, non_blocking=True).contiguous()
        self.starts = self.offsets[:-1]
        self.ends = self.offsets[1:]

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> Packed:
        """Packs a list (one copy; gradients flow back to the items).

        Args:
            items: `[L_i, D]` each, torch or numpy, all of one width and device. Of several dtypes they get the one that
                `torch.cat` gives.

        Raises:
            TypeError: an item that is neither a tensor nor an array of floats.
            ValueError: no items, whose width would be unknown; an item without two dimensions.
            RuntimeError: widths or devices that differ.
        """
        tensors = [as_tensor(item, f"items[{i}]") for i, item in enumerate(items)]
        if not tensors:
            raise ValueError("cannot pack an empty list: its width is unknown")
        lengths = [item.shape[0] for item in tensors]
        return cls(torch.cat(tensors), torch.tensor([0, *accumulate(lengths)], device="cpu"), max(lengths))

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    def __repr__(self) -> str:
        return (
            f"Packed({len(self)} items, tokens {list(self.tokens.shape)} {self.tokens.dtype} on {self.tokens.device})"
        )


class Views:
    """Items anywhere in a resident buffer, in any order, overlapping or not: item i is `tokens[starts[i]:starts[i] +
    lengths[i]]`.

    Args:
        tokens: `[T, D]`, torch or numpy; never copied or moved.
        starts: `[N]`, int32 or int64.
        lengths: `[N]`, int32 or int64.
        max_length: as for `Packed`.
        validate: as for `Packed`.

    Raises:
        ValueError: wrong shapes, a negative length, an item that leaves the buffer.
        TypeError: starts or lengths that are not int32 or int64.
    """

    __slots__ = ("__weakref__", "ends", "max_length", "starts", "tokens")

    def __init__(
        self, tokens: Any, starts: Any, lengths: Any, max_length: int | None = None, *, validate: bool = False
    ):
        self.tokens = _matrix(tokens)
        T = self.tokens.shape[0]
        first, count = _index(starts, "starts"), _index(lengths, "lengths")
        if first.shape != count.shape:
            raise ValueError(f"starts and lengths must agree, got {list(first.shape)} and {list(count.shape)}")
        if first.device != count.device:
            raise ValueError(f"starts are on {first.device}, lengths on {count.device}")
        checked = _checked(first, validate)
        longest = 0 if checked else T
        if checked and first.numel():
            shortest, longest = int(count.min()), int(count.max())
            if shortest < 0:
                raise ValueError(f"lengths must not be negative, got {shortest}")
            wrong = (first < 0) | (first > T) | (count > T) | (first.long() + count > T)
            if bool(wrong.any()):
                i = int(wrong.nonzero()[0])
                raise ValueError(
                    f"items must lie in 0..{T}, item {i} goes from {int(first[i])} to {int(first[i]) + int(count[i])}"
                )
        ends = first.long() + count
        self.max_length = _bound(max_length, longest, checked)
        self.starts = first.long().to(self.tokens.device, non_blocking=True).contiguous()
        self.ends = ends.to(self.tokens.device, non_blocking=True).contiguous()

    def __len__(self) -> int:
        return self.starts.shape[0]

    def __repr__(self) -> str:
        return f"Views({len(self)} items into {list(self.tokens.shape)} {self.tokens.dtype} on {self.tokens.device})"


def _checked(index: Tensor, validate: bool) -> bool:
    """Whether values are looked at: where that waits for no device; never in a graph that is being traced."""
    return validate or (index.device.type == "cpu" and not torch.compiler.is_compiling())


def _bound(max_length: int | None, longest: int, checked: bool) -> int:
    if max_length is None:
        return longest
    if isinstance(max_length, bool) or not isinstance(max_length, (int, np.integer, torch.SymInt)):
        raise TypeError(f"max_length must be a whole number, got {type(max_length).__name__}: {max_length!r}")
    if max_length < 0 or (checked and max_length < longest):
        raise ValueError(f"max_length is {max_length}, the longest item has {longest} tokens")
    return min(max_length, longest)
