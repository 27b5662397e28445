# Every target sets up what it needs; `make` alone lists them.
# Arguments are passed on with ARGS, for example: make test ARGS="-k foo"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz lint docs bench lock clean

ARGS ?=

# Put in front of a command: the project's own tools first on PATH, ...
IN_VENV = export PATH="$(CURDIR)/.venv/bin:$$PATH";
# ... and a Java that can run Spark. The assignment stands alone so that its failure stops the recipe.
WITH_JAVA = $(IN_VENV) JAVA_HOME="$$(scripts/java.sh)"; export JAVA_HOME;

COMPILE = uv pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 \
	--generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
	--custom-compile-command "make lock"

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '%-14s %s\n' "$$t" "$$d"; done

setup: ## make .venv with the pinned requirements, and find or install Java
	@scripts/setup.sh
	@scripts/java.sh >/dev/null

demo: setup ## run the demonstration
	@$(WITH_JAVA) millstream demo $(ARGS)

test: setup ## run the tests in two processes; with ARGS="-k foo", pytest with these
	@$(WITH_JAVA) python scripts/test.py $(ARGS)

FUZZ ?= 500
fuzz: setup ## compare random queries on Spark with the simulator and a sequential run; FUZZ=500 of them
	@$(WITH_JAVA) MILLSTREAM_SPARK_QUERIES=$(FUZZ) python -m pytest -q tests/spark/test_random_on_spark.py $(ARGS)

lint: ## check style, formatting and types
	@scripts/setup.sh
	@$(IN_VENV) ruff check
	@$(IN_VENV) ruff format --check
	@$(IN_VENV) mypy

docs: ## write docs/api.md anew from the docstrings, and the table of docs/nexmark.md
	@scripts/setup.sh
	@$(IN_VENV) python scripts/api.py
	@$(IN_VENV) python scripts/nexmark_lines.py

bench: setup ## measure throughput
	@$(WITH_JAVA) millstream bench throughput $(ARGS)

lock: ## write requirements*.txt anew from pyproject.toml; ARGS=--upgrade moves the pins
	@command -v uv >/dev/null || { echo "lock: this needs uv on PATH (for example: pip install uv)" >&2; exit 1; }
	@$(COMPILE) $(ARGS) --output-file requirements.txt pyproject.toml
	@$(COMPILE) $(ARGS) --all-extras --constraint requirements.txt --output-file requirements-dev.txt pyproject.toml

clean: ## remove .venv, caches and the leftovers of runs (bench/results stays)
	@rm -rf .venv build dist artifacts spark-warehouse metastore_db derby.log millstream-demo.png
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
