# make demo: index and search real text.  make train: a head learns.  make docs: the documentation site.  make test: what every commit must pass.
# All set up .venv first if need be.
.PHONY: setup demo train docs test ci check clean

PY = .venv/bin/python
PYTEST = $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal

demo: setup
	@$(PY) examples/demo.py

train: setup
	@$(PY) examples/train.py

docs: setup
	@$(PY) docs/site

test: setup
	scripts/check
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter and not slow"

ci: setup
	$(PYTEST) -m slow
	$(PY) docs/site
	scripts/hosts sentence-transformers
	scripts/hosts pylate

check: setup
	scripts/check

setup:
	@scripts/setup

clean:
	rm -rf .venv .demo .hosts .site .mypy_cache .pytest_cache .ruff_cache .hypothesis
