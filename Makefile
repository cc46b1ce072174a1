# make demo: index and search real text.  make train: a head learns.  make test: what every commit must pass.  All set up .venv first if need be.
.PHONY: setup demo train test ci check clean

PY = .venv/bin/python

demo: setup
	@$(PY) examples/demo.py

train: setup
	@$(PY) examples/train.py

test: setup
	scripts/check
	$(PY) -m pytest -m "not slow"
	TRITON_INTERPRET=1 $(PY) -m pytest -m "interpreter and not slow"

ci: setup
	$(PY) -m pytest -m slow

check: setup
	scripts/check

setup:
	@scripts/setup

clean:
	rm -rf .venv .demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
