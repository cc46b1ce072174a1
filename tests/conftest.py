"""Lanes and dtypes for the tests that ask for them, poisoned memory, and the record of a run."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import gpus  # noqa: F401 - before CUDA is looked at: it says which GPU comes first here
import pytest
import torch
from lanes import CUDA, INTERPRETED, NAMES, TRITON, lanes

MARKS = {
    "slow": "too slow for the quick lane; `make ci` runs it",
    "gpu": "needs a CUDA GPU",
    "gpus": "needs two CUDA GPUs",
    "needs_triton": "needs the package triton",
    "interpreter": "part of the quick lane under TRITON_INTERPRET=1",
    "interpreter_when": "the same, where the function given, called with the test's parameters, says so",
    "dtypes": "the dtypes to run in, of those that a lane has",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FOLDER", help="keep counts, versions and the kernels' hash there (JSON)")
    parser.addoption("--commit", help="for the record, where the tree has no history")


def pytest_configure(config: pytest.Config) -> None:
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    config.addinivalue_line("filterwarnings", "error")
    config.addinivalue_line(
        "filterwarnings", "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"
    )
    # PyTorch 2.11's own, where it imports torch._dynamo
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
    if INTERPRETED:  # the interpreter's own: numpy scalars made of arrays, and what numpy says of IEEE arithmetic
        config.addinivalue_line(
            "filterwarnings", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
        )
        config.addinivalue_line(
            "filterwarnings", "ignore:(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"
        )
    if config.getoption("--record") and not hasattr(
        config, "workerinput"
    ):  # with pytest-xdist only the main process writes
        from record import Recorder

        recorder = Recorder(config.getoption("--record"), config.getoption("--commit"))
        config.pluginmanager.register(recorder, "record")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`lane` and `dtype` of a test: every dtype of every lane."""
    if "lane" not in metafunc.fixturenames:
        return
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("lane", lanes(), ids=str)
        return
    marker = metafunc.definition.get_closest_marker("dtypes")
    wanted = marker.args if marker else tuple(NAMES)
    both = [(lane, dtype) for lane in lanes() for dtype in lane.dtypes if dtype in wanted]
    metafunc.parametrize(("lane", "dtype"), both, ids=[f"{lane}-{NAMES[dtype]}" for lane, dtype in both])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        when = item.get_closest_marker("interpreter_when")
        if when and INTERPRETED and when.args[0](**item.callspec.params):
            item.add_marker(pytest.mark.interpreter)
        if item.get_closest_marker("gpu") and not CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("gpus") and not (CUDA and torch.cuda.device_count() > 1):
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
        if item.get_closest_marker("needs_triton") and not TRITON:
            item.add_marker(pytest.mark.skip(reason="needs triton"))


@pytest.fixture(autouse=True)
def _settings_restored() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or for integers the largest value: what a kernel forgets to write, or reads too
    early, shows."""

    def fill(result: torch.Tensor) -> torch.Tensor:
        if result.is_floating_point():
            return result.fill_(float("nan"))
        return result if result.dtype == torch.bool else result.fill_(torch.iinfo(result.dtype).max)

    def wrapped(make):
        @functools.wraps(make)
        def poison(*args, **options):
            return fill(make(*args, **options))

        return poison

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    if CUDA:  # and so does memory that a kernel may get back from the allocator
        torch.full((64 << 20,), float("nan"), device="cuda")


@pytest.fixture
def environment() -> dict[str, str]:
    """For subprocesses: this process's, without the interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the rounding budget was used: what the constant in `budget.py` is chosen by."""
    from budget import BUDGET, WORST

    if WORST:
        terminalreporter.write_sep("-", f"shares used of the error budget ({BUDGET})")
        for what, share in sorted(WORST.items(), key=lambda pair: -pair[1])[:8]:
            terminalreporter.write_line(f"{share:.3f}  {what}")
