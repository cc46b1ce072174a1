# make demo: index and search real text.  make train: a head learns.  make test: what every commit must pass.  All set up .venv first if need be.
.PHONY: setup demo train test ci check clean

PY = .venv/bin/python
PYTEST = $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal

demo: setup
	@$(PY) examples/demo.py

train: setup
	@$(PY) examples/train.py

test: setup
	scripts/check
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter and not slow"

ci: setup
	$(PYTEST) -m slow
	scripts/browser
	scripts/hosts sentence-transformers
	scripts/hosts pylate
	$(PY) docs/site

check: setup
	scripts/check

# the documentation, in .site/html
.PHONY: docs
docs: setup
	@$(PY) docs/site

setup:
	@scripts/setup

clean:
	rm -rf .venv .demo .hosts .site .mypy_cache .pytest_cache .ruff_cache .hypothesis
