"""The rules of DESIGN.md, walked: imports point down only, every room keeps to its own, public names are documented."""

from __future__ import annotations

import ast
import inspect
import pathlib
import sys

import pytest

import maxsim

ROOT = pathlib.Path(maxsim.__file__).parent
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# From the ground up; a room sees those below it, and a folder sees itself (but no backend another).
LAYERS = [
    {
        "errors",
        "reference",
        "precision",
        "packed",
        "devices",
        "kernels",
        "jsonlines",
        "models",
        "sources",
        "plans",
        "progress",
        "quantized",
    },
    {"problem"},
    {"layout", "result", "encode"},
    {"gpu", "stream"},
    {"backends", "bounds", "quantizing"},
    {"dispatch", "corpus"},
    {"autograd"},
    {"graph"},
    {"ops", "best"},
    {"distributed", "certified", "integrations", "explaining"},
    {"search"},
    {"indexing"},
    {"bench"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
SAME_LEVEL = {
    ("quantized", "packed"),
    ("sources", "jsonlines"),
    ("plans", "precision"),
    ("plans", "packed"),
    ("plans", "quantized"),
    ("layout", "result"),
    ("result", "plans"),
}
ALONE = {
    "reference": set(),
    "kernels": {"kernels"},
    "corpus": {"corpus", "devices", "errors", "jsonlines", "packed", "quantized", "quantizing"},
    "errors": set(),
    "quantized": {"quantized", "packed"},
}


def imports(path: pathlib.Path) -> set[str]:
    """Rooms of ours that a file imports, wherever in the file, and other packages by their first name in quotes."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.add(
                    alias.name.split(".")[1] if alias.name.startswith("maxsim.") else f"'{alias.name.split('.')[0]}'"
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = (node.module or "").split(".")
            if parts[0] == "maxsim":
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
            else:
                found.add(f"'{parts[0]}'")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - (node.level - 1)]
            whole = (*above, *(node.module.split(".") if node.module else ()))
            found |= {whole[0]} if whole else {alias.name for alias in node.names}
    return found


def room(name: str) -> str:
    return name.split("/")[0]


@pytest.mark.parametrize("name", FILES)
def test_imports_point_down(name):
    own = room(name)
    assert own in LEVEL, f"{own} has no layer: give it one here and say so in DESIGN.md"
    for other in imports(FILES[name]):
        if other.startswith("'") or other == own:
            continue
        if other == "'maxsim'" or other not in LEVEL:
            assert own in ("bench", "cli", "__main__"), f"{name} imports {other}: public names, not for the road itself"
            continue
        assert LEVEL[other] < LEVEL[own] or (own, other) in SAME_LEVEL, f"{name} imports {other}, which is not below it"
        assert own not in ALONE or other in ALONE[own], f"{name} must not know {other}"


def test_backends_never_import_each_other():
    names = {name.split("/")[1] for name in FILES if room(name) == "backends"} - {"__init__"}
    assert {"cpu", "triton", "hopper"} <= names
    for name in names:
        tree = ast.parse(FILES[f"backends/{name}"].read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                seen = {(node.module or "").split(".")[0]} | {alias.name for alias in node.names}
                assert not seen & (names - {name}), f"backends/{name} imports {seen & names}"


def test_triton_only_in_its_rooms():
    users = {name for name, path in FILES.items() if "'triton'" in imports(path)}
    assert all(room(name) == "kernels" or name == "backends/triton" or room(name) == "bench" for name in users), users
    assert "backends/triton" in users


def test_only_autograd_knows_ctx():
    users = {name for name, path in FILES.items() if "torch.autograd.Function" in path.read_text()}
    assert {name for name in users if room(name) != "bench"} == {"autograd", "distributed/function"}


def test_frameworks_are_imported_where_they_are_used():
    """An integration loads its framework when it is called, never when it is imported."""
    for name, path in FILES.items():
        if room(name) == "integrations":
            top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            names = [alias.name for node in top if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module or "" for node in top if isinstance(node, ast.ImportFrom) and not node.level]
            found = {each.split(".")[0] for each in names} - set(sys.stdlib_module_names)
            assert found <= {"torch", "numpy"}, f"{name} imports {found}"


def test_no_autotuner_and_no_float_atomics():
    for name, path in FILES.items():
        if room(name) not in ("bench",):
            text = path.read_text()
            assert "triton.autotune" not in text, name
            assert "atomic_add" not in text or name == "kernels/lists", name  # whose counters are integers


FLOATS = {"empty", "full", "ones", "rand", "randn", "zeros"}  # of the default dtype, unless told
PLACED = {"arange", "as_tensor", "randint", "randperm", "tensor", *FLOATS}


def test_tensors_are_made_where_they_are_used():
    """Neither PyTorch's default device nor its default dtype, which users change, says what is made."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())) if room(name) != "bench" else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PLACED):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
                given, where = {each.arg for each in node.keywords}, f"{name}:{node.lineno}"
                assert "device" in given, f"{where}: torch.{node.func.attr} without device="
                assert "dtype" in given or node.func.attr not in FLOATS, f"{where}: no dtype="


@pytest.mark.parametrize("name", FILES)
def test_files_stay_small_and_say_what_they_are(name):
    text = FILES[name].read_text()
    assert len(text.splitlines()) <= 400, f"{name} is too long for one job"
    assert not text.strip() or ast.get_docstring(ast.parse(text)) or name.endswith("__main__"), (
        f"{name} says nothing of itself"
    )


EXPORTED = [
    "CertifiedTopK", "Corpus", "Explanation", "Matches", "Packed", "Quantized", "TopK", "UnsupportedError", "Views",
    "backend_for", "certified_topk", "error_bound", "explain", "matches", "quantize", "score", "score_pairs", "topk",
]  # fmt: skip


def test_public_names():
    assert maxsim.__all__ == sorted(maxsim.__all__)
    assert set(EXPORTED) <= set(maxsim.__all__)
    assert set(maxsim.__all__) == set(EXPORTED), "a new public name: document it, and list it here"
    assert not {room(name) for name in FILES} & set(EXPORTED), "importing the room would hide the name"
    assert (ROOT / "py.typed").exists()
    assert maxsim.__version__
    with pytest.raises(AttributeError, match="no_such_name"):
        maxsim.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", EXPORTED)
def test_public_names_are_documented(name):
    public = getattr(maxsim, name)
    assert inspect.getdoc(public), name
    if inspect.isfunction(public):
        hints = inspect.signature(public)
        assert hints.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in hints.parameters.values())


SCORE = ["queries", "documents", "query_mask", "document_mask", "masked", "normalize", "backend"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("score", SCORE),
        ("matches", SCORE),
        ("backend_for", SCORE[:-1]),
        ("score_pairs", ["queries", "documents", "pairs", *SCORE[2:]]),
        ("topk", ["queries", "documents", "k", *SCORE[2:]]),
        ("error_bound", SCORE[:-1]),
    ],
)
def test_signatures(name, parameters):
    """The order that callers rely on, and the defaults of the contract."""
    found = inspect.signature(getattr(maxsim, name)).parameters
    assert list(found) == parameters
    assert found["masked"].default == "exclude"
    assert found["normalize"].default is False
    assert all(found[mask].default is None for mask in ("query_mask", "document_mask"))
