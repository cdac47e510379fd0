.DEFAULT_GOAL := help
.PHONY: help test lint clean

help:
	@echo "make test   set up .venv and run the whole test suite"
	@echo "make lint   format, lint, types, layers, wire"

.venv/.done: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/pip install --quiet --upgrade pip
	.venv/bin/pip install --quiet -c constraints.txt -e . --group test --group lint
	touch $@

test: .venv/.done
	.venv/bin/pytest

lint: .venv/.done
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/buf lint

clean:
	rm -rf .venv .venv-gen
