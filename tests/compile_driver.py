"""Compiles what the library launches, for an NVIDIA card that is not there, and prints what ptxas says of it: one
JSON line a kernel.

An active driver that only names the target, and launches that stop after compiling: so a case is an ordinary call on
CPU tensors, and what is compiled is what a card would run.

Usage: python compile_driver.py CAPABILITY [CASE ...], or --list in place of cases for their names.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class CompileOnlyDriver:
    launcher_cls = None

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


def compiled_only(found: list[tuple[str, object]]) -> None:
    """Every launch of this process compiles, is put into `found`, and goes no further."""
    run = JITFunction.run

    def warm(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel))
        return kernel

    JITFunction.run = warm


def ptxas(ptx: str) -> dict[str, int]:
    """Registers a thread, and bytes spilled."""
    arch = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE).group(1)
    tool = get_ptxas(int(re.search(r"\d+", arch).group())).path  # a release carries several, for other versions of PTX
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool, "-v", f"-arch={arch}", source, "-o", source.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said).group(1)),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", said))),
    }


def tokens(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def cases(capability: int) -> dict[str, Callable[[], object]]:
    """One call for each path through the kernels: few and many query rows, wide and odd rows, ragged, masked,
    pairs, gradients."""
    import maxsim
    from maxsim.backends import hopper
    from maxsim.backends import triton as backend

    backend.unsupported = hopper.unsupported = lambda problem: ()
    hopper._card = lambda device: ((9, 0), 132)
    backend.capability = lambda device: divmod(capability, 10)  # tiles depend on the card
    half, brain, single = torch.float16, torch.bfloat16, torch.float32

    def score(q, d, *args, precision="highest", **options):
        torch.set_float32_matmul_precision(precision)
        return maxsim.score(q, d, *args, backend="triton", **options)

    def packed(dtype, count=6, D=128, length=40):
        return maxsim.Packed(tokens(count * length, D, dtype=dtype), range(0, count * length + 1, length))

    def own(dtype):  # documents of two queries
        return [[tokens(40, 128, dtype=dtype)] * 3] * 2

    def train(dtype, q, d, **options):
        def call():
            leaves = [x.requires_grad_() for x in (q(), d())]
            score(*leaves, **options).sum().backward()

        return call

    def train_packed():
        leaf = tokens(240, 128, dtype=brain).requires_grad_()
        documents = maxsim.Packed(leaf, range(0, 241, 40))
        score(
            documents, documents, torch.ones(240, dtype=torch.bool), torch.ones(240, dtype=torch.bool)
        ).sum().backward()

    def train_views():
        leaf = tokens(240, 128).requires_grad_()
        score(tokens(4, 32, 128), maxsim.Views(leaf, [0, 40], [80, 40])).sum().backward()

    def train_packed_long():
        leaf = tokens(240, 128, dtype=brain).requires_grad_()
        score(tokens(6, 1024, 128, dtype=brain), maxsim.Packed(leaf, range(0, 241, 40))).sum().backward()

    def train_pairs(pairs=None):
        q, d = (tokens(4, 20, 128, dtype=brain).requires_grad_() for _ in range(2))
        maxsim.score_pairs(q, d, pairs, backend="triton").sum().backward()

    def in_chunks(call):
        from maxsim.kernels import gradients

        def small():
            kept, gradients.CHUNK_BYTES = gradients.CHUNK_BYTES, 1 << 10
            call()
            gradients.CHUNK_BYTES = kept

        return small

    mask = torch.ones(4, 300, dtype=torch.bool)

    def dense(q, d, *masks, precision="highest", function=maxsim.score, **options):
        def call():
            torch.set_float32_matmul_precision(precision)
            return function(q, d, *masks, backend="hopper", **options)

        return call

    def codes(kernel, q, shape, wrap=None, factors=False, winners=False, code=torch.int8):
        import quantised

        return lambda: quantised.run(kernel, quantised.case(q, quantised.codes_of(shape, code), wrap, factors), winners)

    def train_codes(factors=False, code="int8", **options):
        def call():
            made = maxsim.quantize(tokens(4, 300, 128), code, scale="token" if factors else None, **options)
            score(tokens(4, 32, 128).requires_grad_(), made, **options).sum().backward()

        return call

    def product(q, backend="triton", function=maxsim.score, wrap=None, masks=(), **options):
        def call():
            made = maxsim.quantize(torch.randn(4, 300, q.shape[-1]), "pq", **options)
            found = function(q, made if wrap is None else wrap(made), *masks, backend=backend)
            if q.requires_grad:
                found.sum().backward()

        return call

    def residual(q, d, winners=False, backend="triton", halves=False, **options):
        made = maxsim.quantize(d, "residual", centroids=2, **options)
        if halves:
            tables = {name: getattr(made.parameters, name).half() for name in ("centroids", "weights")}
            made = made._with(parameters=dataclasses.replace(made.parameters, **tables))
        function = maxsim.matches if winners else maxsim.score
        return lambda: function(q, made, backend=backend)

    def train_residual():
        made = maxsim.quantize(tokens(4, 300, 128), "residual", centroids=2, renormalize=True)
        score(tokens(4, 32, 128).requires_grad_(), made).sum().backward()

    def follow(x):
        return maxsim.Packed(x, range(0, len(x) + 1, 40))

    e4m3 = torch.float8_e4m3fn
    known = {
        "codes": codes("triton", tokens(1, 32, 128), (4, 300, 128), None, True),
        "codes-many": codes("triton", tokens(8, 32, 128), (240, 128), follow, winners=True),
        "train-codes": train_codes(True),
        "train-codes-normalize": train_codes(normalize=True),
        "product": product(tokens(1, 32, 128)),
        "product-odd": product(tokens(1, 32, 140, dtype=single), parts=28),
        "train-product": product(tokens(4, 32, 128).requires_grad_()),
        "residual": residual(tokens(1, 32, 128), tokens(4, 300, 128), renormalize=True),
        "residual-many": residual(tokens(8, 32, 128, dtype=brain), packed(brain), True, bits=4),
        "residual-odd": residual(tokens(1, 32, 77), tokens(4, 300, 77), bits=1),
        "residual-wide": residual(tokens(1, 32, 1024), tokens(4, 300, 1024), bits=8),
        "residual-float32": residual(tokens(1, 32, 128, dtype=single), tokens(4, 300, 128)),
        "train-residual": train_residual,
        "codes-wide": codes("triton", tokens(1, 32, 1024), (4, 300, 1024)),
        "text": lambda: score(tokens(1, 32, 128), tokens(4, 300, 128)),
        "page": lambda: score(tokens(1, 1024, 128), tokens(4, 1024, 128)),
        "page-bfloat16": lambda: score(tokens(1, 1024, 128, dtype=brain), tokens(4, 1024, 128, dtype=brain)),
        "queries": lambda: score(tokens(128, 32, 128), tokens(4, 300, 128)),
        "short-documents": lambda: score(tokens(1, 32, 128), tokens(16384, 8, 128)),
        "masked": lambda: score(tokens(2, 32, 128), tokens(4, 300, 128), torch.ones(2, 32, dtype=torch.bool), mask),
        "masked-zero": lambda: score(tokens(2, 32, 128), tokens(4, 300, 128), None, mask, "zero"),
        "normalize": lambda: score(tokens(2, 32, 128), tokens(4, 300, 128), normalize=True),
        "ragged": lambda: score(tokens(1, 32, 128), packed(half)),
        "ragged-both": lambda: score(packed(brain), packed(brain)),
        "matches": lambda: maxsim.matches(tokens(2, 128, 128), tokens(4, 300, 128), backend="triton"),
        "odd": lambda: score(tokens(2, 32, 77), tokens(4, 300, 77)),
        "wide": lambda: score(tokens(2, 128, 1024), tokens(4, 300, 1024)),
        "candidates": lambda: score(tokens(2, 32, 128), tokens(2, 4, 300, 128)),
        "float32-highest": lambda: score(tokens(1, 128, 128, dtype=single), tokens(4, 300, 128, dtype=single)),
        "float32-high": lambda: score(
            tokens(1, 128, 128, dtype=single), tokens(4, 300, 128, dtype=single), precision="high"
        ),
        "float32-wide": lambda: score(tokens(1, 128, 256, dtype=single), tokens(4, 300, 256, dtype=single)),
        "float32-wide-high": lambda: score(
            tokens(1, 32, 200, dtype=single), tokens(4, 300, 200, dtype=single), precision="high"
        ),
        "float32-medium": lambda: score(
            tokens(1, 128, 128, dtype=single), tokens(4, 300, 128, dtype=single), precision="medium"
        ),
        "train": train(brain, lambda: tokens(4, 32, 128, dtype=brain), lambda: tokens(4, 300, 128, dtype=brain)),
        "train-wide-normalize": train(half, lambda: tokens(4, 32, 1024), lambda: tokens(4, 300, 1024), normalize=True),
        "train-long": train(brain, lambda: tokens(6, 1024, 128, dtype=brain), lambda: tokens(4, 300, 128, dtype=brain)),
        "train-float32": train(
            single, lambda: tokens(4, 32, 128, dtype=single), lambda: tokens(4, 300, 128, dtype=single)
        ),
        "train-candidates": train(
            brain, lambda: tokens(4, 32, 128, dtype=brain), lambda: tokens(4, 3, 300, 128, dtype=brain)
        ),
        "train-packed": train_packed,
        "train-views": train_views,
        "train-packed-long": train_packed_long,
        "train-pairs": train_pairs,
        "train-pairs-given": lambda: train_pairs(torch.zeros(300, 2, dtype=torch.int64)),
        "train-views-chunks": in_chunks(train_views),
    }
    if capability == 90:
        known |= {
            "codes-e4m3": codes("triton", tokens(1, 32, 128), (4, 300, 128), code=e4m3),
            "hopper-quantized": lambda: maxsim.score(
                tokens(8, 32, 128).requires_grad_(),
                maxsim.quantize(tokens(4, 300, 128), scale="token")[1:],
                backend="hopper",
            ),
            "hopper-few-quantized": lambda: maxsim.score(
                tokens(1, 32, 128), maxsim.quantize(packed(half), "fp8"), backend="hopper"
            ),
            "hopper-few-residual": residual(tokens(1, 32, 128), tokens(4, 300, 128), backend="hopper", halves=True),
            "hopper-few-residual-matches": residual(
                tokens(1, 32, 128, dtype=brain), packed(brain), True, "hopper", bits=4, renormalize=True
            ),
            "hopper-few-residual-long": residual(tokens(1, 64, 64), packed(half, D=64), backend="hopper", bits=8),
            "hopper-residual": residual(tokens(8, 32, 128), tokens(4, 300, 128), backend="hopper", halves=True),
            "hopper-residual-one-tile": residual(tokens(1, 128, 128), packed(half), backend="hopper", bits=8),
            "hopper-residual-matches": residual(
                tokens(2, 300, 256), tokens(4, 300, 256), True, "hopper", bits=4, renormalize=True
            ),
            "hopper-product": product(tokens(1, 300, 128), "hopper", wrap=lambda made: made.compact()),
            "hopper-product-matches": product(tokens(8, 32, 128), "hopper", maxsim.matches, masks=(None, mask, "zero")),
            "hopper-few-product": product(tokens(1, 32, 128), "hopper"),
            "hopper-few-product-long": product(tokens(1, 64, 128), "hopper"),
            "hopper-few-product-matches": product(
                tokens(1, 32, 128, dtype=brain), "hopper", maxsim.matches, masks=(None, mask)
            ),
            "hopper-few-product-candidates": product(
                tokens(2, 32, 128), "hopper", wrap=lambda made: made[torch.zeros(2, 3, dtype=torch.int64)]
            ),
            "train-codes-e4m3": train_codes(code="fp8"),
            "hopper-codes": codes("hopper", tokens(1, 1024, 128), (4, 300, 128)),
            "hopper-codes-factors": codes("hopper", tokens(8, 32, 128), (240, 128), follow, True),
            "hopper-codes-matches": codes("hopper", tokens(8, 32, 128), (4, 300, 128), winners=True),
            "hopper-codes-e4m3": codes("hopper", tokens(8, 32, 256), (240, 256), follow, code=e4m3),
            "hopper-codes-one-tile": codes("hopper", tokens(1, 128, 128), (4, 300, 128), None, True),
            "hopper-codes-wide": codes("hopper", tokens(8, 32, 320), (4, 300, 320)),
            "hopper-codes-wider": codes("hopper", tokens(8, 32, 1024), (4, 300, 1024), code=e4m3),
            "hopper-few-codes": codes("few", tokens(1, 32, 128), (4, 300, 128), None, True),
            "hopper-few-codes-e4m3": codes("few", tokens(1, 60, 256), (4, 300, 256), code=e4m3),
            "hopper-few-codes-matches": codes("few", tokens(1, 32, 128), (240, 128), follow, winners=True),
            "hopper": dense(tokens(128, 32, 128), tokens(4, 300, 128)),
            "hopper-bfloat16-wide": dense(tokens(2, 300, 256, dtype=brain), tokens(4, 200, 256, dtype=brain)),
            "hopper-unaligned": dense(tokens(8, 32, 132)[..., :128], tokens(4, 300, 128)),
            "hopper-split": dense(tokens(1, 300, 128), tokens(70, 600, 128)),
            "hopper-split-ragged": dense(tokens(2, 300, 256, dtype=brain), packed(brain, 50, 256, 300)),
            "hopper-narrow": dense(tokens(1, 128, 48), tokens(4, 300, 48)),
            "hopper-one-tile": dense(tokens(1, 128, 128), tokens(4, 300, 128)),
            "hopper-few": dense(tokens(1, 32, 128), tokens(4, 300, 128)),
            "hopper-few-ragged": dense(tokens(1, 64, 128), packed(half)),
            "hopper-few-masked": dense(
                tokens(1, 32, 96), tokens(4, 300, 96), torch.ones(1, 32, dtype=torch.bool), mask
            ),
            "hopper-few-matches": lambda: maxsim.matches(
                tokens(1, 32, 128), packed(half), None, torch.ones(240, dtype=torch.bool), backend="hopper"
            ),
            "hopper-few-float32": dense(
                tokens(1, 32, 128, dtype=single), tokens(4, 300, 128, dtype=single), None, mask
            ),
            "hopper-few-float32-high": dense(
                tokens(1, 64, 100, dtype=single), packed(single, 6, 100), precision="high"
            ),
            "hopper-few-float32-matches": dense(
                tokens(1, 64, 128, dtype=single), packed(single), function=maxsim.matches
            ),
            "hopper-masked": dense(tokens(8, 32, 128), tokens(4, 300, 128), torch.ones(8, 32, dtype=torch.bool), mask),
            "hopper-matches": lambda: maxsim.matches(tokens(8, 32, 128), tokens(4, 300, 128), backend="hopper"),
            "hopper-train": lambda: maxsim.score(
                tokens(8, 32, 128, dtype=brain).requires_grad_(),
                packed(brain),
                None,
                torch.ones(240, dtype=torch.bool),
                backend="hopper",
            ),
            "hopper-ragged": dense(packed(half, 9), packed(half), None, torch.ones(240, dtype=torch.bool)),
            "hopper-wide": dense(tokens(1, 300, 1024), tokens(4, 300, 1024)),
            "hopper-wide-resident": dense(packed(brain, 9, 320), packed(brain, 6, 320)),
            "hopper-wide-matches": lambda: maxsim.matches(
                tokens(8, 32, 320),
                packed(half, 6, 320),
                None,
                torch.ones(240, dtype=torch.bool),
                "zero",
                backend="hopper",
            ),
            "hopper-masked-zero": dense(tokens(8, 32, 128), tokens(4, 300, 128), None, mask, masked="zero"),
            "hopper-few-masked-zero": dense(tokens(1, 32, 128), tokens(4, 300, 128), None, mask, masked="zero"),
            "hopper-float32": dense(tokens(8, 32, 128, dtype=single), tokens(4, 300, 128, dtype=single)),
            "hopper-float32-high": dense(
                tokens(8, 32, 128, dtype=single), tokens(4, 300, 128, dtype=single), precision="high"
            ),
            "hopper-float32-ragged": dense(packed(single, 9), packed(single), None, torch.ones(240, dtype=torch.bool)),
            "hopper-float32-one-tile": dense(tokens(1, 32, 64, dtype=single), tokens(4, 300, 64, dtype=single)),
            "hopper-wide-float32": dense(tokens(1, 300, 320, dtype=single), tokens(4, 300, 320, dtype=single)),
            "hopper-wide-float32-high": dense(
                tokens(8, 32, 256, dtype=single),
                packed(single, 6, 256),
                None,
                torch.ones(240, dtype=torch.bool),
                precision="high",
            ),
            "hopper-wide-float32-matches": dense(
                packed(single, 9, 132), packed(single, 6, 132), function=maxsim.matches
            ),
            "hopper-float32-matches": dense(
                tokens(8, 32, 128, dtype=single), tokens(4, 300, 128, dtype=single), function=maxsim.matches
            ),
            "hopper-candidates": dense(tokens(4, 100, 128), tokens(4, 5, 300, 128)),
            "hopper-chosen-pairs": dense(
                tokens(4, 300, 128),
                tokens(4, 300, 128),
                torch.zeros(9, 2, dtype=torch.int64),
                function=maxsim.score_pairs,
            ),
            "hopper-candidates-pages": dense(tokens(4, 300, 128, dtype=brain), tokens(4, 5, 300, 128, dtype=brain)),
            "hopper-candidates-matches": dense(
                tokens(2, 100, 128), own(half), None, torch.ones(240, dtype=torch.bool), function=maxsim.matches
            ),
            "hopper-candidates-float32": dense(tokens(2, 100, 128, dtype=single), own(single)),
            "hopper-few-candidates": dense(tokens(4, 32, 128), tokens(4, 5, 300, 128)),
            "hopper-few-candidates-ragged": dense(tokens(2, 32, 128), own(half)),
            "hopper-few-candidates-float32": dense(
                tokens(4, 64, 128, dtype=single), tokens(4, 5, 300, 128, dtype=single), function=maxsim.matches
            ),
        }
    return known


def main() -> None:
    capability, wanted = int(sys.argv[1]), sys.argv[2:]
    driver.set_active(CompileOnlyDriver(capability))
    found: list[tuple[str, object]] = []
    compiled_only(found)
    known = cases(capability)
    if wanted == ["--list"]:
        print(json.dumps(list(known)))
        return
    for case in wanted or known:
        found.clear()
        known[case]()
        for name, kernel in found:
            row = {"case": case, "kernel": name, "capability": capability, "shared": kernel.metadata.shared}
            print(json.dumps(row | ptxas(kernel.asm["ptx"])), flush=True)


if __name__ == "__main__":
    main()
