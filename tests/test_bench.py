"""The benchmark itself: names, records, clocks, and that a wrong answer has no time."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import maxsim
from maxsim.bench import cases, ceilings, cli, contenders, plain, records, run, table, timer, truth
from maxsim.bench.inputs import make, work

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = "2x3-5x7-d16-float32"


@pytest.fixture(scope="module")
def limits():
    tiny = ceilings.Ceilings(CPU)
    tiny.left, tiny.right, tiny.product = torch.rand(3, 64, 64)
    tiny.source, tiny.target = torch.zeros(2, 1024, dtype=torch.int8)
    return tiny


# Names


@pytest.mark.parametrize(
    "name",
    [
        "1x1024-5000x1024-d128-float16",
        "32x32-32x300-d128-bfloat16-candidates-train",
        "128x32-20000x97-d128-float16-ragged",
        "4x8-4x16-d48-float32-masked-pairs",
        "1x8-4x16-d48-float16-winners-int8",
        "1x8-4x16-d48-float16-residual2",
    ],
)
def test_a_name_is_read_and_written_alike(name):
    assert cases.parse(name).name == name


def test_suffixes_are_read_in_any_order():
    assert cases.parse("2x3-4x5-d8-float16-train-candidates").name == "2x3-4x5-d8-float16-candidates-train"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1x2-3x4-float16",
        "1x2-3x4-d8-float64",
        "1x2-3x4-d8-float16-fast",
        "1x2-3x4-d8-float16-ragged-ragged",
        "1x2-3x4-d8-float16-int8-fp8",
        "0x2-3x4-d8-float16",
        "1x2-3x4-d8-float16-pairs",
        "1x2-3x4-d8-float16-ragged-masked",
        "1x2-3x4-d8-float16-winners-train",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError):  # noqa: PT011  any message: the ways to be wrong are many
        cases.parse(name)


@pytest.mark.parametrize("suite", cases.SUITES)
def test_a_suite_holds_different_cases_with_contenders(suite):
    names = [case.name for case in cases.SUITES[suite]]
    assert len(set(names)) == len(names)
    for case in cases.SUITES[suite]:
        assert cases.parse(case.name) == case
        for device in ("cpu", "cuda"):
            usual = run.default_contenders(case, torch.device(device))
            assert usual[0] == "maxsim"
            assert all(run.contender(name).name == name for name in usual)


USERS = """
    16x32-32x300-d128-bfloat16-candidates 256x128-256x8192-d128-bfloat16 128x256-1024x2048-d48-bfloat16
    1x32-16384x187-d128-float16-views 128x50-128x1030-d128-bfloat16-masked 128x50-128x1030-d320-bfloat16-masked
    128x50-128x1024-d128-bfloat16-masked 128x50-128x1024-d320-bfloat16-masked 128x32-128x662-d128-bfloat16-ragged
    128x32-128x662-d320-bfloat16-ragged 64x768-64x30-d128-bfloat16-train 1x4096-1000x1024-d128-float16
    1x32-1000x300-d640-float16 1x32-1000x300-d1024-float16 1x32-1000x300-d2560-float16
"""
TRAINING = [
    "128x32-256x300",
    "64x32-64x1030",
    "32x1024-32x1024",
    "64x1024-64x1024",
    "128x1024-128x1024",
    "32x32-32x300",
]


def test_users_holds_the_shapes_of_their_configurations():
    assert set(USERS.split()) <= {case.name for case in cases.SUITES["users"]}


def test_training_holds_each_row_in_bfloat16_and_float32():
    names = [case.name for case in cases.SUITES["training"]]
    ends = {shape: "-candidates-train" if shape == "32x32-32x300" else "-train" for shape in TRAINING}
    dtypes = ("bfloat16", "float32")
    assert names == [f"{shape}-d128-{dtype}{ends[shape]}" for dtype in dtypes for shape in TRAINING]
    for name in names:
        usual = run.default_contenders(cases.parse(name), torch.device("cuda"))
        assert {"maxsim", "naive", "matched", "flash-maxsim", "flash-maxsim-invgrid"} <= set(usual)
        assert {f"late-interaction-kernels{mode}" for mode in ("", "-lowmem", "-unified")} <= set(usual)
        assert ("maxsim-high" in usual) == ("naive-high" in usual) == ("float32" in name)


def test_ragged_rows_have_the_persistent_kernel_among_them():
    for case in (case for suite in cases.SUITES.values() for case in suite if case.ragged and not case.codec):
        assert "flash-maxsim-persistent" in run.default_contenders(case, torch.device("cuda"))


def small(case):
    """The case at sizes for a CPU; as many queries as documents where pairs need it."""
    return dataclasses.replace(case, NQ=min(case.NQ, 3), LQ=5, ND=3 if case.pairs else 4, LD=7, D=min(case.D, 48))


@pytest.mark.parametrize("suite", ["forward", "users", "training", "host", "codes", "wide"])
def test_each_row_of_a_suite_runs_for_each_contender_that_can(suite, limits):
    """What cannot says why in words of its own: nothing fails, and nobody is wrong."""
    done = set()
    for case in dict.fromkeys(small(case) for case in cases.SUITES[suite]):
        names = [
            name for name in run.CONTENDERS if name not in ("compiled", "maxsim:compiled", "maxsim-cpu", "numkong")
        ]
        for row in run.run_case(case, names, 0.01, CPU, limits).rows:
            assert row.timing or not any(word in row.note for word in ("Error", "wrong", "Exception")), (case.name, row)
            done |= {row.contender} if row.timing else set()
    assert {"maxsim", "naive"} <= done or suite == "codes"
    assert "chunked" in done or suite in ("training", "codes")
    assert ("maxsim-float" in done) == (suite in ("codes", "wide"))


def test_forward_holds_the_rows_of_the_paper():
    assert cases.SUITES["forward"][0].name == "1x1024-5000x1024-d128-float16"
    assert cases.parse("1x1024-20000x1024-d128-float16") in cases.SUITES["forward"]


# Inputs


def test_inputs_are_the_same_every_time_and_unit_tokens():
    case = cases.parse("2x3-40x7-d16-float16-ragged")
    one, other = make(case, CPU), make(case, CPU)
    assert torch.equal(one.documents, other.documents)
    assert one.documents.dtype == torch.float16
    assert one.documents.float().norm(dim=-1).sub(1).abs().max() < 2e-3
    assert int(one.offsets[-1]) == len(one.documents)
    assert one.lengths.float().mean().item() == pytest.approx(7, rel=0.5)


@pytest.mark.parametrize("suffix", ["", "-ragged", "-views", "-masked"])
def test_a_block_holds_the_tokens_of_its_documents(suffix):
    inputs = make(cases.parse(f"1x3-6x5-d8-float32{suffix}"), CPU)
    tokens, mask = inputs.block(slice(2, 5))
    for row in range(3):
        kept = tokens[row] if mask is None else tokens[row][mask[row]]
        if inputs.starts is None:
            expected = inputs.documents[2 + row][: len(kept)]
        else:
            start = int(inputs.starts[2 + row])
            expected = inputs.documents[start : start + int(inputs.lengths[2 + row])]
        assert torch.equal(kept, expected)


@pytest.mark.parametrize(
    ("name", "flop", "moved"),
    [
        ("2x3-5x7-d16-float16", 2 * 16 * 6 * 35, (6 + 35) * 32 + 10 * 4),
        ("2x3-5x7-d16-float16-winners", 2 * 16 * 6 * 35, (6 + 35) * 32 + 10 * 4 + 30 * 12),
        ("2x3-5x7-d16-float16-candidates", 2 * 16 * 6 * 35, (6 + 70) * 32 + 10 * 4),
        ("4x3-4x7-d16-float32-pairs", 2 * 16 * 12 * 7, (12 + 28) * 64 + 4 * 4),
        ("2x3-5x7-d16-float16-views", 2 * 16 * 6 * 35, (6 + 35) * 32 + 10 * 4),
    ],
)
def test_work_counts_each_token_once(name, flop, moved):
    assert work(make(cases.parse(name), CPU)) == (flop, moved)


# Truth


@pytest.mark.parametrize("suffix", ["", "-ragged", "-masked", "-views", "-candidates", "-pairs", "-masked-candidates"])
def test_truth_is_the_float64_score(suffix):
    inputs = make(cases.parse(f"4x3-4x5-d8-float32{suffix}"), CPU)
    right = truth.truth(inputs).scores
    for q in range(4):
        for n in range(right.shape[1] if right.ndim == 2 else 1):
            query = inputs.queries[q].double()
            if inputs.query_mask is not None:
                query = query[inputs.query_mask[q]]
            if suffix.endswith("candidates"):
                document, mask = inputs.documents[q, n], inputs.document_mask
                document = document if mask is None else document[mask[q, n]]
            else:
                tokens, mask = inputs.block(slice(None))
                which = q if suffix == "-pairs" else n
                document = tokens[which] if mask is None else tokens[which][mask[which]]
            expected = (query @ document.double().T).amax(1).sum()
            assert (right[q] if suffix == "-pairs" else right[q, n]).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(
    "suffix",
    ["", "-ragged", "-masked", "-views", "-candidates", "-pairs", "-winners", "-train", "-candidates-train"],
)
@pytest.mark.parametrize("name", ["maxsim", "naive"])
def test_ours_and_the_usual_lines_are_right(name, suffix):
    case = cases.parse(f"4x3-4x9-d16-float32{suffix}")
    inputs = make(case, CPU)
    error = truth.truth(inputs).error(contenders_call(name, inputs)())
    assert error <= truth.allowed(case, exact=True)


def contenders_call(name, inputs):
    return run.contender(name).prepare(inputs)


def test_one_missed_token_is_wrong():
    case = cases.parse("1x64-8x64-d32-float16")
    inputs = make(case, CPU)
    short = dataclasses.replace(inputs, documents=inputs.documents[:, :-1])
    assert truth.truth(inputs).error(contenders_call("maxsim", short)()) > truth.allowed(case, exact=True)


@pytest.mark.parametrize("layout", ["", "-masked", "-ragged", "-winners"])
@pytest.mark.parametrize("codec", cases.CODECS)
def test_scores_of_codes_are_held_to_what_the_codes_stand_for(codec, layout):
    case = cases.parse(f"2x5-120x9-d32-float16{layout}-{codec}")
    inputs = make(case, CPU)
    right = truth.truth(inputs)
    assert right.error(contenders_call("maxsim", inputs)()) <= truth.allowed(case, exact=True)
    if layout != "-winners":
        error = right.error(contenders_call("maxsim-float", inputs)())
        assert error > truth.allowed(case, exact=True)
    assert work(inputs)[1] < work(dataclasses.replace(inputs, codes=None))[1]
    with pytest.raises(contenders.Unavailable, match="for documents as they are"):
        contenders_call("naive", inputs)


def test_codes_of_layouts_without_any_are_refused():
    for suffix in ("-views", "-candidates", "-train"):
        with pytest.raises(ValueError, match="codes are measured on padded and ragged documents"):
            cases.parse(f"{TINY}{suffix}-int8")


def test_nan_and_wrong_winners_are_wrong():
    inputs = make(cases.parse(TINY), CPU)
    assert math.isnan(truth.truth(inputs).error(torch.full((2, 5), torch.nan)))
    winners = make(cases.parse(TINY + "-winners"), CPU)
    index, similarity = maxsim.matches(winners.queries, winners.documents)
    assert truth.truth(winners).error((index, similarity)) < 1e-6
    assert truth.truth(winners).error(((index + 1) % 7, None)) > 1e-3
    assert truth.truth(winners).error((index - 7, None)) == math.inf


# One case


def run_tiny(names, limits, case=TINY, **options):
    return run.run_case(cases.parse(case), names, 0.02, CPU, limits, **options)


def test_a_right_contender_has_a_time_and_a_record(limits):
    outcome = run_tiny(["maxsim", "naive"], limits)
    for row in outcome.rows:
        assert row.note is None
        assert 0 < row.timing.p20_ms <= row.timing.median_ms <= row.timing.p80_ms
        assert row.error < 1e-5
    rows = outcome.records(records.environment(CPU))
    assert [row.contender for row in rows] == ["maxsim", "naive"]
    assert all(row.case == TINY and row.gemm_tflops > 0 and row.copy_tbps > 0 for row in rows)


def test_a_wrong_contender_has_no_time(limits, monkeypatch):
    def prepare(inputs):
        call = plain.prepare_naive(inputs)
        return lambda: call() + 1

    monkeypatch.setitem(run.CONTENDERS, "wrong", contenders.Contender("wrong", prepare, ("float32",)))
    outcome = run_tiny(["maxsim", "wrong"], limits)
    wrong = outcome.rows[1]
    assert wrong.timing is None
    assert wrong.error == pytest.approx(1, abs=1e-3)
    assert "wrong: error" in table.case_table(outcome)
    record = outcome.records(records.environment(CPU))[1]
    assert (record.median_ms, record.p20_ms, record.host_us) == (None, None, None)
    assert record.max_error == wrong.error


def test_a_contender_that_fails_or_is_not_there_says_why(limits, monkeypatch):
    def prepare(inputs):
        raise RuntimeError("no such card")

    monkeypatch.setitem(run.CONTENDERS, "broken", contenders.Contender("broken", prepare))
    outcome = run_tiny(["maxsim", "broken", "flash-maxsim"], limits)
    assert [row.note for row in outcome.rows] == [None, "RuntimeError: no such card", "needs a CUDA GPU"]
    assert [row.contender for row in outcome.records(records.environment(CPU))] == ["maxsim"]
    assert "no such card" in table.case_table(outcome)
    assert TINY in table.summary([outcome])


def test_a_backend_can_be_forced(limits):
    outcome = run_tiny(["maxsim:cpu", "maxsim:nothing"], limits)
    assert outcome.rows[0].timing
    assert "nothing" in outcome.rows[1].note
    assert table.ours(outcome).contender == "maxsim:cpu"


def test_switches_for_float32_stand_beside_each_other(limits):
    names = ["maxsim", "maxsim-high", "maxsim-medium", "naive", "naive-high", "naive-medium"]
    outcome = run_tiny(names, limits)
    assert all(row.timing and row.error < 1e-2 for row in outcome.rows)
    assert table.ours(outcome).contender == "maxsim"
    assert table.best_peer(outcome).contender.startswith("naive")
    assert [row.contender for row in outcome.rows if table.is_ours(row)] == names[:3]
    usual = run.default_contenders(cases.parse(TINY), torch.device("cuda"))
    assert set(names) <= set(usual)
    halves = run_tiny(names, limits, case="2x3-5x7-d16-float16")
    assert [row.note for row in halves.rows if not row.timing] == ["differs for float32 only"] * 4


def test_the_switch_holds_during_the_call_alone():
    seen = []
    call = contenders.at_precision("high", lambda: seen.append(torch.get_float32_matmul_precision()))
    call()
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_steps_of_the_host_are_contenders(limits):
    """Those of a plan need a GPU; those that score are checked."""
    names = run.SUITE_CONTENDERS["host"]
    assert names[:4] == ["maxsim", "maxsim:plan", "maxsim:launch", "maxsim:output"]
    outcome = run_tiny(names, limits, case="1x3-5x7-d16-float16")
    rows = {row.contender: row for row in outcome.rows}
    assert {name for name, row in rows.items() if name.startswith("maxsim") and not row.timing} == {
        "maxsim:plan",
        "maxsim:launch",
    }
    assert rows["maxsim:plan"].note == "no plan is kept for this call"
    for step in ("unplanned", "operator", "compiled", "winners", "autograd"):
        assert rows[f"maxsim:{step}"].error == rows["maxsim"].error
    assert rows["maxsim:checks"].error is None
    shown = {line.split()[0]: line for line in table.case_table(outcome).splitlines()[4:]}
    assert "%" not in shown["maxsim:checks"]
    assert "%" in shown["maxsim:operator"]
    assert run_tiny(["maxsim:checks"], limits, case=TINY + "-train").rows[0].note == "a step of plain scores"


# Training


@pytest.mark.parametrize("suffix", ["", "-masked", "-candidates", "-masked-candidates"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_ours_are_those_of_its_winners(suffix, dtype, monkeypatch):
    inputs = make(cases.parse(f"3x4-5x9-d16-{dtype}{suffix}-train"), CPU)
    call = contenders.prepare_maxsim(inputs)
    whole = contenders.gradients_of_winners(inputs)
    assert contenders.wrong_gradients(inputs, call(), call) is None
    with monkeypatch.context() as patch:  # one document after another
        patch.setattr(contenders, "blocks", lambda count, size: (slice(n, n + 1) for n in range(count)))
        for one, other in zip(contenders.gradients_of_winners(inputs), whole, strict=True):
            torch.testing.assert_close(one, other)
    if dtype == "float32":
        right = truth.truth(inputs).gradients
        for one, other in zip(whole, right, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_gradients_that_are_a_little_off_or_change_are_wrong(limits, monkeypatch):
    inputs = make(cases.parse(TINY + "-train"), CPU)
    right = contenders.prepare_maxsim(inputs)()
    off = tuple(gradient * (1 + 1e-4) for gradient in right)
    assert "queries' gradient is off by 1.0e-04" in contenders.wrong_gradients(inputs, off, lambda: off)
    assert contenders.wrong_gradients(inputs, right, lambda: off) == "wrong: another run gave other bits"
    monkeypatch.setattr(contenders, "SAME_WINNERS", {"float32": 0.0})
    row = run_tiny(["maxsim"], limits, case=TINY + "-train").rows[0]
    assert row.timing is None
    assert "given its winners" in row.note


# Clocks


def test_quantiles_are_values_of_the_list():
    assert timer.timing([3.0, 1.0, 2.0, 5.0, 4.0]) == timer.Timing(3.0, 2.0, 5.0, 5)
    assert timer.timing([2.0], [7.0, 9.0]).host_us == 9.0


def test_contenders_take_turns_and_a_slow_one_does_not_take_all(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timer.time, "perf_counter", lambda: clock[0])
    order = []

    def sample(name, call):
        order.append(name)
        clock[0] += {"fast": 0.01, "slow": 0.9, "broken": 0.01}[name]
        if name == "broken":
            raise RuntimeError("gone")
        return 1.0

    errors = {}
    calls = dict.fromkeys(["fast", "slow", "broken"], lambda: None)
    samples = timer._turns(calls, 2.0, errors, sample)
    assert order[:3] == ["fast", "slow", "broken"]
    assert order[3:5] == ["slow", "fast"]
    assert len(samples["slow"]) == 2
    assert len(samples["fast"]) > 10
    assert list(errors) == ["broken"]


def test_a_gpu_sample_is_a_cold_call_between_two_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 1.5

    class Flush:
        def sum(self):
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    assert timer._gpu_ms(lambda: log.append("call"), [10.0], Flush()) == 1.5
    assert log == ["flush", "sleep", "record", "call", "record", "wait"]


# Records


def test_a_record_has_the_agreed_keys(limits, tmp_path):
    expected = (
        "case contender median_ms p20_ms p80_ms host_us peak_mib max_error gemm_tflops copy_tbps "
        "card driver torch triton commit kernels date"
    )
    assert expected.split() == list(records.KEYS)
    rows = run_tiny(["maxsim", "naive"], limits).records(records.environment(CPU, commit="abc"))
    path = records.write(rows, tmp_path, "tiny")
    assert path.name == f"{rows[0].date}-{rows[0].card}-tiny.jsonl"
    assert records.write(rows, tmp_path, "tiny", append=True) == path
    assert records.read(path) == rows + rows
    path.write_text('{"case": "x"}\n')
    with pytest.raises(ValueError, match="keys case"):
        records.read(path)


def test_the_hash_of_the_kernels_changes_with_them(tmp_path):
    for name in ("kernels", "backends"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("1")
    (tmp_path / "autograd.py").write_text("1")
    (tmp_path / "ops.py").write_text("1")
    seen = [records.kernels_hash(tmp_path)]
    for name in ("kernels/a.py", "backends/a.py", "autograd.py"):
        (tmp_path / name).write_text("2")
        seen.append(records.kernels_hash(tmp_path))
    (tmp_path / "kernels/a.py").rename(tmp_path / "kernels/b.py")
    seen.append(records.kernels_hash(tmp_path))
    assert len(set(seen)) == len(seen)
    (tmp_path / "ops.py").write_text("2")
    assert records.kernels_hash(tmp_path) == seen[-1]
    assert records.kernels_hash() == records.kernels_hash()


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_card_has_a_short_name(monkeypatch, name, short):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert records.card_name(torch.device("cuda")) == short


# The command


def test_unknown_names_are_a_usage_error(capsys):
    for arguments in (["nothing"], [TINY, "--contenders", "nobody"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
    assert "no contender 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "device", "suite"), [(True, None, "forward"), (True, "cpu", "cpu"), (False, None, "cpu")]
)
def test_without_names_the_suite_of_the_machine_is_run(monkeypatch, gpu, device, suite):
    ran = []
    monkeypatch.setattr(cli, "device_of", lambda name: CPU)
    monkeypatch.setattr(cli, "too_large", lambda what: None)
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        cli, "run_case", lambda case, *rest, **options: ran.append(case) or run.Outcome(case, (), 1, 1, 1, 1)
    )
    assert cli.main(["--device", device] if device else []) == 0
    assert ran == list(cases.SUITES[suite])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "maxsim bench: --device: cuda: PyTorch finds no CUDA GPU here"),
        ([TINY, "--device", "abacus"], "maxsim bench: --device: a device is"),
        (["forward"], "maxsim bench: the suite forward is meant for a GPU .* take the suite cpu"),
        (["cpu", "training"], "maxsim bench: the suite training is meant for a GPU"),
    ],
)
def test_what_this_machine_cannot_do_is_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(cli.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments, program="maxsim bench")
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert re.match(message, said.err)
    assert (len(said.err.splitlines()), said.out) == (1, "")


def test_suites_that_are_not_too_large_for_a_cpu():
    assert cli.too_large(["cpu", "host", "1x1024-5000x1024-d128-float16"]) is None
    assert {suite for suite in cases.SUITES if cli.too_large([suite])} == set(cases.SUITES) - {"cpu", "host", "wide"}


def test_steps_are_told_as_they_are_taken(monkeypatch, capsys):
    assert cli.main([TINY, "--device", "cpu", "--seconds", "0.02", "--contenders", "maxsim,naive"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"1 of 1, {TINY}: {step}"
        for step in (
            "making the tokens",
            "finding the right answer in float64",
            "checking maxsim",
            "checking naive",
            "timing 2 contenders for about 0.02 s",
        )
    ]
    assert "one case, for about 0.02 s of timing" in said.out


def test_a_case_named_twice_is_run_once():
    found = [case.name for case in cli.cases_of(["cpu", "1x32-1000x300-d128-float32", TINY])]
    assert found == [case.name for case in cases.SUITES["cpu"]] + [TINY]


@pytest.mark.parametrize("wrong", [("--seconds", "-1"), ("--seconds", "0"), ("--threads", "-2")])
def test_no_time_and_no_threads_are_refused(capsys, wrong):
    with pytest.raises(SystemExit):
        cli.main([TINY, "--device", "cpu", *wrong])
    assert f"{wrong[0]} must be more than 0, got {wrong[1]}" in capsys.readouterr().err


def test_a_broken_device_is_left_behind_with_its_contender(monkeypatch, tmp_path):
    class Replaced(Exception):
        pass

    def execute(program, command):
        raise Replaced(command)

    def broken(case, names, *rest, **options):
        assert "naive" not in names
        raise run.Poisoned("numpy", "illegal memory access")

    monkeypatch.setattr(cli, "run_case", broken)
    monkeypatch.setattr(cli.os, "execv", execute)
    with pytest.raises(Replaced) as replaced:
        cli.main([TINY, "cpu", "--device", "cpu", "--skip", f"{TINY}=naive", "--out", str(tmp_path)])
    command = replaced.value.args[0]
    assert command[1:4] == ["-m", "maxsim.bench", TINY]
    options = cli._parser().parse_args(command[3:])
    assert options.what == [TINY] + [case.name for case in cases.SUITES["cpu"]]
    assert options.skip == [f"{TINY}=naive", f"{TINY}=numpy"]
    assert (options.label, options.out, options.append) == ("cases", tmp_path, False)


def test_appending_no_record_names_no_file(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli, "run_case", lambda case, *rest, **options: run.Outcome(case, (), 1, 1, 1, 1))
    assert cli.main([TINY, "--device", "cpu", "--append", "--out", str(tmp_path)]) == 0
    assert "record:" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_table_and_keeps_a_record(tmp_path):
    command = [sys.executable, "-m", "benchmarks", TINY, "--device", "cpu", "--seconds", "0.05"]
    command += ["--contenders", "maxsim,naive", "--out", str(tmp_path), "--commit", "abc"]
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "naive" in done.stdout
    assert "record:" in done.stdout
    (path,) = tmp_path.iterdir()
    rows = records.read(path)
    assert [row.contender for row in rows] == ["maxsim", "naive"]
    assert {row.commit for row in rows} == {"abc"}
    assert all(row.median_ms > 0 for row in rows)


def test_import_maxsim_leaves_the_benchmark_alone():
    code = "import sys, maxsim; sys.exit(any(name.startswith('maxsim.bench') for name in sys.modules))"
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}).returncode == 0


def test_figure2_draws_what_it_measured(tmp_path, monkeypatch):
    """Growing numbers of documents; a contender that fails is left out of larger ones, and its line ends."""
    from maxsim.bench import figure2

    monkeypatch.setattr(figure2, "SIZES", (2, 4, 8))
    monkeypatch.setattr(figure2, "MOST_ON_A_CPU", 6)
    monkeypatch.setattr(figure2, "TOKENS", 16)
    monkeypatch.setattr(figure2, "WIDTH", 8)
    told = ["figure2", "--device", "cpu", "--seconds", "0.2", "--contenders", "maxsim,naive,numkong", "--out"]
    assert cli.main([*told, str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-figure2.jsonl")
    rows = records.read(path)
    assert [row.case.split("-")[1] for row in rows if row.contender == "maxsim"] == ["2x16", "4x16", "6x16"]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert (
        "documents of 1,024 tokens" in path.with_suffix(".svg").read_text() or path.with_suffix(".svg").stat().st_size
    )
    cases = figure2.cases(torch.device("cpu"))
    assert figure2.stopped(cases[0], cases, ["naive"]) == [f"{case.name}=naive" for case in cases[1:]]


def test_a_problem_of_ones_own_is_measured_and_drawn(tmp_path, capsys):
    drawn = tmp_path / "own.png"
    told = ["--queries", "2x3", "--documents", "5x7", "--dim", "16", "--dtype", "int8", "--ragged", "--device", "cpu"]
    assert cli.main([*told, "--seconds", "0.05", "--plot", str(drawn)]) == 0
    said = capsys.readouterr().out
    assert "2x3-5x7-d16-float16-ragged-int8" in said
    assert f"drawn: {drawn}" in said
    assert drawn.read_bytes().startswith(b"\x89PNG")
    train = cases.described("2x3", "5x7", 16, "bfloat16", train=True)
    assert train == cases.parse("2x3-5x7-d16-bfloat16-train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--queries", "3", "--documents", "5x7"], "queries are given as COUNTxTOKENS, such as 128x32, got '3'"),
        (["--queries", "2x3"], "takes --queries and --documents, and no names"),
        (["forward", "--queries", "2x3", "--documents", "5x7"], "takes --queries and --documents, and no names"),
        (["--queries", "2x3", "--documents", "5x7", "--dtype", "int4"], "dtype must be one of float16"),
        (["--queries", "2x3", "--documents", "5x7", "--pairs"], "pairs need as many queries as documents"),
        (["host", "--plot", "times.pdf"], "--plot writes .png or .svg, got times.pdf"),
        (["host", "--plot", "nowhere/times.png"], "no folder nowhere for the plot"),
    ],
)
def test_problems_that_are_none_are_usage_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--device", "cpu"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
