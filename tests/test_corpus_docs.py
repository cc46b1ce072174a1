"""The examples of docs/corpus.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "corpus.md"


def test_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(block for block in blocks if "torch.distributed" not in block)
    assert code.count("corpus.") > 12
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["corpus"].ids() == ["b", "a"]
    assert {path.name for path in tmp_path.iterdir()} == {"store", "out.npz", "out.jsonl"}
