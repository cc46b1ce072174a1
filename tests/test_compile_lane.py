"""Every kernel compiles for every supported architecture and Triton release, without a card: fits its shared
memory, and does not spill where that would cost. `compile_driver.py` says how."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from compile_limits import HOPPER_QUICK, NEVER_SPILL, SHARED, SPILLS, SPILLS_OF_CASES, cases_for

import maxsim

pytestmark = pytest.mark.needs_triton

TESTS = pathlib.Path(__file__).parent
SOURCES = pathlib.Path(maxsim.__file__).parents[1]
QUICK = ("text", "masked", "train-packed")
MEASURED = (
    "page",
    "short-documents",
    "normalize",
    "matches",
    "wide",
    "float32-highest",
    "train",
    "train-long",
    "train-views",
    "train-views-chunks",
    "train-packed-long",
    "train-pairs",
    "train-pairs-given",
)  # on sm_90
EVERY_KERNEL = {
    "_scores_kernel", "_hopper_scores_kernel", "_hopper_few_kernel", "_hopper_few_decoded_kernel",
    "_hopper_decoded_kernel", "_hopper_product_kernel", "_hopper_product_scores_kernel",
    "_hopper_float32_kernel", "_hopper_wide_kernel",
    "_hopper_wide_float32_kernel", "_query_tiles_kernel", "_query_halves_kernel", "_encode_kernel", "_sum_parts_kernel",
    "_sum_pieces_kernel", "_kept_rows_kernel",
    "_kept_spans_kernel", "_kept_bits_kernel", "_gradient_kernel",
    "_piece_kernel", "_rank_kernel", "_few_won_kernel",
    "_chosen_kernel", "_owners_kernel", "_holders_kernel", "_count_kernel", "_begin_kernel", "_place_kernel",
}  # fmt: skip


def compiled(capability: int, cases, environment, tmp_path, first_on_path=()) -> list[dict]:
    path = [*map(str, first_on_path), str(SOURCES), environment.get("PYTHONPATH", "")]
    settings = {"PYTHONPATH": ":".join(path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(TESTS / "compile_driver.py"), str(capability), *cases],
        env=environment | settings, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(rows: list[dict], capability: int, cases) -> None:
    assert {row["case"] for row in rows} == set(cases)
    for row in rows:
        assert row["shared"] <= SHARED[capability] << 10, row
        assert 0 < row["registers"] <= 255, row
        if row["kernel"] in SPILLS:
            assert row["spilled"] <= max(SPILLS[row["kernel"]], SPILLS_OF_CASES.get(row["case"], 0)), row
        elif row["case"] in NEVER_SPILL or row["kernel"] != "_scores_kernel":
            assert row["spilled"] == 0, row


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_architectures(capability, environment, tmp_path):
    cases = QUICK + MEASURED + HOPPER_QUICK if capability == 90 else QUICK
    rows = compiled(capability, cases, environment, tmp_path)
    check(rows, capability, cases)
    if capability == 90:
        assert {row["kernel"] for row in rows} == EVERY_KERNEL
        assert all(row["spilled"] == 0 for row in rows if row["case"] in ("matches", "train", "train-packed"))


def test_every_kernel_is_compiled_somewhere():
    """A new kernel must be met by some case."""
    import ast

    kernels = set()
    for path in (SOURCES / "maxsim" / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                kernels.add(node.name)
    assert kernels == EVERY_KERNEL


def test_every_case_is_compiled(environment, tmp_path):
    """A new case of the driver must be listed."""
    (known,) = compiled(90, ["--list"], environment, tmp_path)
    assert sorted(known) == sorted(cases_for(90))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "part", "parts"), [(90, part, 4) for part in range(4)] + [(at, 0, 1) for at in SHARED if at != 90]
)
def test_architectures_whole(capability, part, parts, environment, tmp_path):
    cases = cases_for(capability)[part::parts]
    check(compiled(capability, cases, environment, tmp_path), capability, cases)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_triton_releases(release, environment, tmp_path_factory):
    """Every kernel with each release beside the installed torch; the installed release has compiled all cases."""
    if release == installed_release(environment):
        pytest.skip("installed: test_architectures_whole compiles with it")
    folder = tmp_path_factory.getbasetemp() / f"triton-{release}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, f"triton=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            pytest.skip(f"triton {release} cannot be installed here: {done.stderr[-300:]}")
    assert installed_release(environment | {"PYTHONPATH": str(folder)}) == release
    for capability, cases in {80: QUICK, 90: QUICK + MEASURED + HOPPER_QUICK, 120: QUICK}.items():
        rows = compiled(capability, cases, environment, tmp_path_factory.mktemp("cache"), [folder])
        assert {row["case"] for row in rows} == set(cases)
        assert all(row["shared"] <= SHARED[capability] << 10 for row in rows)
        if capability == 90:
            assert {row["kernel"] for row in rows} == EVERY_KERNEL


def installed_release(environment) -> str:
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
