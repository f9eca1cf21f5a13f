# Each target works alone on a fresh clone: it makes .venv and installs what is needed first.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo grpo test check clean

demo: $(INSTALLED)
	$(VENV)/bin/python scripts/demo.py

grpo: $(INSTALLED)
	OMP_NUM_THREADS=1 $(VENV)/bin/python scripts/grpo.py $(GRPO)

test check: $(INSTALLED)
	scripts/check

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
