# make demo: index and search real text.  make train: a head learns.  make pages: search page images (other examples: examples/README.md).
# make test: what every commit must pass.  All set up .venv first if need be.
.PHONY: setup demo train pages docs test ci check clean

PY = .venv/bin/python
PYTEST = $(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal

demo: setup
	@$(PY) examples/search.py

train: setup
	@$(PY) examples/train.py

pages: setup
	@scripts/pages
	@$(PY) examples/pages.py

test: setup
	scripts/check
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "interpreter and not slow"

ci: setup
	scripts/pages
	$(PYTEST) -m slow
	scripts/browser
	scripts/hosts sentence-transformers
	scripts/hosts pylate
	$(PY) docs/site

check: setup
	scripts/check

# the documentation, in .site/html
docs: setup
	@$(PY) docs/site

setup:
	@scripts/setup

clean:
	rm -rf .venv .demo .hosts .site .mypy_cache .pytest_cache .ruff_cache .hypothesis
