# Every target sets up what it needs, once: Python 3.11 or later and make are all that a clone asks for.

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint lint-python lint-types lint-layers lint-wire breaking generate bench clean

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
WORKERS ?= 2
MYPY_CACHE ?= .mypy_cache
BASE ?= HEAD~1
BENCHMARKS ?= $(patsubst benchmarks/%.py,%,$(shell grep -l '__name__ == "__main__"' benchmarks/*.py))

BIN := .venv/bin
RESULTS := build/test
GENERATED := build/generated
GENERATOR := grpcio-tools==1.76.0 mypy-protobuf==5.1.0 protobuf==6.33.6 "setuptools<81"
PROTOC = PATH="$(CURDIR)/.venv-gen/bin:$$PATH" .venv-gen/bin/python -m grpc_tools.protoc -Iprotos \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) \
	protos/petals_async/v1/*.proto

help:
	@echo "make demo      three servers, one is killed in the middle of a text, and the text is the same"
	@echo "make test      the whole test suite"
	@echo "make lint      format, lint, types, layers, wire contract, generated code"
	@echo "make generate  petals_async/v1 from protos/"
	@echo "make bench     the benchmarks, one JSON object each"
	@echo "make clean     remove what these have made"

# -- set-up: made again only when its versions change

setup: .venv/.done

.venv/.done: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "setting up .venv with $(PYTHON) (once; a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt --editable . --group test --group lint
	@touch $@

# The generator is older than the runtime on purpose: generated code refuses runtimes older than itself.
.venv-gen/.done: Makefile
	@echo "setting up .venv-gen (once; half a minute)"
	@$(PYTHON) -m venv .venv-gen
	@.venv-gen/bin/python -m pip install --quiet --disable-pip-version-check $(GENERATOR)
	@touch $@

# -- what one runs

demo: .venv/.done
	@$(BIN)/python clients/demo.py

# Tests that start processes run alone, since load would move their time limits. Nothing asks a model hub.
test: export HF_HUB_OFFLINE = 1
test: .venv/.done .venv-gen/.done
	@rm -rf $(RESULTS) && mkdir -p $(RESULTS)
	@status=0; \
	$(BIN)/pytest -n $(WORKERS) -m "not processes" --junitxml=$(RESULTS)/parallel.xml || status=1; \
	$(BIN)/pytest -m processes --junitxml=$(RESULTS)/processes.xml || status=1; \
	$(BIN)/python -c "$$SUMMARY" $(RESULTS)/parallel.xml $(RESULTS)/processes.xml || status=1; \
	exit $$status

define SUMMARY
import os, sys, xml.etree.ElementTree as tree
crashed = [path for path in sys.argv[1:] if not os.path.exists(path)]
suites = [suite for path in sys.argv[1:] if path not in crashed for suite in tree.parse(path).iter("testsuite")]
count = lambda *kinds: sum(int(suite.get(kind)) for suite in suites for kind in kinds)
failed = [case for suite in suites for case in suite if {"failure", "error"} & {part.tag for part in case}]
bad, skipped = len(failed) + len(crashed), count("skipped")
print(f"total: {count('tests') - len(failed) - skipped} passed, {bad} failed, {skipped} skipped")
for case in failed:
    print(f"  failed: {case.get('classname')} {case.get('name')}")
for path in crashed:
    print(f"  crashed: pytest wrote no {path}")
sys.exit(bad > 0)
endef
export SUMMARY

lint: lint-python lint-types lint-layers lint-wire breaking

lint-python: .venv/.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint-types: .venv/.done
	$(BIN)/mypy --cache-dir $(MYPY_CACHE)

lint-layers: .venv/.done
	$(BIN)/lint-imports

lint-wire: .venv/.done .venv-gen/.done
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	@rm -rf $(GENERATED) && mkdir -p $(GENERATED)
	@$(call PROTOC,$(GENERATED))
	@diff -r -x __init__.py -x __pycache__ $(GENERATED)/petals_async/v1 petals_async/v1 \
		|| { echo "petals_async/v1 is not what protos/ gives: make generate" >&2; exit 1; }
	@echo "petals_async/v1 is up to date"

# Reports and doesn't refuse, until the first release.
breaking: .venv/.done
	@base=$$(git rev-parse --quiet --verify "$(BASE)^{commit}" 2>/dev/null) \
		|| { echo "buf breaking: no earlier commit here, nothing to compare with"; exit 0; }; \
	$(BIN)/buf breaking --against ".git#ref=$$base" \
		&& echo "buf breaking: compatible with $(BASE)" \
		|| echo "buf breaking: the wire contract differs from $(BASE); allowed before the first release"

generate: .venv-gen/.done
	@$(call PROTOC,.)
	@git diff --stat -- petals_async/v1 2>/dev/null || true

bench: .venv/.done
	@for name in $(BENCHMARKS); do echo "# python -m benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean:
	rm -rf .venv .venv-gen build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
