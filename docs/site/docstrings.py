"""Whether the reference is whole: every public name is on one of its pages and has a docstring that parses."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import griffe

# a module's public names: its __all__, or what is defined there without an underscore
MODULES = ("maxsim", "maxsim.distributed", "maxsim.integrations")
WHOLE = tuple(f"maxsim.integrations.{name}" for name in ("colpali", "mteb", "pylate", "sentence_transformers", "vllm"))
OPTIONS = {
    "returns_named_value": False,
    "returns_multiple_items": False,
    "warn_unknown_params": False,
    "warn_missing_types": False,
}


class _Heard(logging.Handler):
    """What griffe warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def problems(source: Path, reference: Path) -> list[str]:
    """What is wrong, a line each.

    Args:
        source: the folder that holds the package.
        reference: the folder of the pages, which name objects by `::: path`.
    """
    package = griffe.load("maxsim", search_paths=[source], resolve_aliases=True)
    text = "".join(page.read_text() for page in sorted(reference.glob("*.md")))
    shown = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    wanted = [f"{module}.{name}" for module in MODULES for name in _public(source, module)]
    found = [f"{name} is on no page of the reference" for name in (*wanted, *WHOLE) if name not in shown]
    heard = _Heard()
    logger = logging.getLogger("griffe")
    logger.addHandler(heard)
    logger.propagate = False
    for path in shown:
        try:
            found += _of(package[path.removeprefix("maxsim.")], path)
        except KeyError:
            found.append(f"{path}, on a page of the reference, is not there")
    logger.removeHandler(heard)
    return found + heard.said


def _public(source: Path, module: str) -> list[str]:
    tree = ast.parse((source / module.replace(".", "/") / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def _of(thing: griffe.Object | griffe.Alias, path: str) -> list[str]:
    """What a name and, of a class or module, its public members lack."""
    found = []
    if thing.docstring is None:
        found.append(f"{path} has no docstring")
    else:
        found += _parameters(thing, path, thing.docstring.parse("google", **OPTIONS))
    if thing.is_class or thing.is_module:
        members = thing.all_members if thing.is_class else thing.members
        for name, member in members.items():
            if name.startswith("_") or (thing.is_module and member.is_alias):  # what a module imports is not its own
                continue
            if member.is_function or member.is_class or "property" in member.labels:
                found += _of(member, f"{path}.{name}")
    return found


def _parameters(thing: griffe.Object | griffe.Alias, path: str, sections: list[griffe.DocstringSection]) -> list[str]:
    """Parameters of a function that its docstring neither lists nor names in backticks."""
    if not thing.is_function:
        return []
    listed = [each.name for section in sections if section.kind.value == "parameters" for each in section.value]
    said = {name for names in listed for name in names.split(", ")}  # "queries, documents: ..." says both
    text = thing.docstring.value if thing.docstring else ""
    names = [each.name for each in thing.parameters if each.name not in ("self", "cls", *said)]
    left = [name for name in names if f"`{name}`" not in text]
    return [f"{path} does not say what is {', '.join(left)}"] if left else []
