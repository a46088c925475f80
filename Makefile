# `make help` lists the targets. All are phony but the two stamps, which tools/setup.sh writes into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

# PYTHON, TORCH: see tools/setup.sh. ARGS: more arguments for the command that a target runs.
PYTHON ?=
TORCH ?=
EXECUTOR ?=
BACKEND ?=
ARGS ?=
export PYTHON TORCH
export MPLBACKEND ?= Agg

BIN := .venv/bin
BASE := .venv/.base
TRAIN := .venv/.train
# Asking for another interpreter or torch than a stamp names makes that stamp out of date.
changed = $(if $(1),$(if $(findstring <$(1)>,<$(shell cat $(2) 2>/dev/null)>),,changed))

.PHONY: help setup setup-train reproduce-fig7 check-fig7 reproduce-all publish publish-set publish-studies train-demo wheelhouse test test-slurm check lint types bench clean clean-venv changed

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: ARGS (more arguments for a command), PYTHON (3.11 to 3.13), TORCH (a version, a requirement, or system)"

setup: $(BASE) ## make .venv with the base install: no torch

setup-train: $(TRAIN) ## add torch, megatron-core and the development tools to .venv

# Figure 7 takes 16 nodes: a run of it without a cluster is refused, with what two GPUs of this host can do instead.
TWO_GPUS := test "$$(nvidia-smi -L 2>/dev/null | wc -l)" -lt 2 || \
	echo "two GPUs are here: moebench figure h200x2 measures the systems on them" >&2
reproduce-fig7: $(if $(filter run,$(BACKEND)),$(TRAIN),$(BASE)) ## simulate and draw Figure 7; EXECUTOR=slurm BACKEND=run elsewhere
ifeq ($(EXECUTOR)$(BACKEND),)
	@$(BIN)/moebench figure fig7 $(ARGS)
else
	@$(BIN)/moebench sweep fig7 --executor $(or $(EXECUTOR),inprocess) --backend $(or $(BACKEND),simulate) --out out $(ARGS) || \
		{ code=$$?; $(if $(EXECUTOR),,$(TWO_GPUS);) exit $$code; }
endif

check-fig7: $(BASE) ## simulate Figure 7 anew and compare it with the published one, cell by cell
	@$(BIN)/moebench figure fig7 --check $(ARGS)

# What needs no GPU and no torch, the short ones first.
FIGURES := split top-k virtual-stages ep-size batch nodes fig7 sensitivity regimes scaling refinement
reproduce-all: $(BASE) ## every simulated figure, and the table of claims
	@for name in $(FIGURES); do $(BIN)/moebench figure $$name $(ARGS) || exit 1; done
	@$(BIN)/moebench claims $(ARGS)

# Trials and table of what the README states. Old trials go first: only one code's results are published. The default set
# of assumptions has no folder of its own.
PUBLISHED := results/published
SET ?= h200-measured
SETS := h200-measured datasheet sm-exchange nccl-all-to-all
publish: $(BASE) ## for maintainers: publish Figure 7, scaling and what the claims rest on, and write the README's table
	@for set in $(SETS); do $(MAKE) --no-print-directory publish-set SET=$$set || exit 1; done
	@rm -rf $(PUBLISHED)/scaling
	@$(BIN)/moebench figure scaling --results $(PUBLISHED)/scaling --out $(PUBLISHED)/scaling $(ARGS)

publish-set: $(BASE) ## for maintainers: the same under one set of assumptions, SET=sm-exchange say
	@folder=$(PUBLISHED)$(addprefix /,$(filter-out h200-measured,$(SET))); \
	for name in fig7 virtual-stages; do \
		rm -rf $$folder/$$name; \
		$(BIN)/moebench figure $$name --assumptions $(SET) --results $$folder/$$name --out $$folder/$$name $(ARGS) || exit 1; \
	done
	@$(BIN)/moebench claims --published --into README.md

# Of the tornado, with hundreds of steps, the figure and its table alone.
STUDIES := split top-k ep-size batch nodes
publish-studies: $(BASE) ## for maintainers: publish the studies along one axis and the tornado
	@for name in $(STUDIES); do \
		rm -rf $(PUBLISHED)/studies/$$name; \
		$(BIN)/moebench figure $$name --results $(PUBLISHED)/studies/$$name --out $(PUBLISHED)/studies/$$name $(ARGS) || exit 1; \
	done
	@$(BIN)/moebench figure sensitivity --out $(PUBLISHED)/studies/sensitivity $(ARGS)

wheelhouse: ## collect wheels for hosts without a network, for PYTHON=3.12 say
	@sh tools/wheelhouse.sh "$(PYTHON)"

train-demo: $(TRAIN) ## train three systems on 4 CPU processes, verify them and draw their losses
	@$(BIN)/moebench figure train-demo $(ARGS)

test: $(TRAIN) ## the whole test suite
	@$(BIN)/python -m pytest $(ARGS)

test-slurm: $(TRAIN) ## the launcher on a real Slurm of one host; root, or a machine with slurm-wlm and munge
	@$(BIN)/python -m pytest -m slurm tests/slurm $(ARGS)

check: lint types ## lint, types and the fast tests
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

lint: $(TRAIN) ## ruff
	@$(BIN)/python -m ruff check .

types: $(TRAIN) ## mypy
	@$(BIN)/python -m mypy

bench: $(TRAIN) ## time the hot paths, keep the numbers in out/bench and compare them with the last ones there
	@$(BIN)/python -m pytest tests bench/micro --benchmark-enable --benchmark-only --benchmark-autosave \
		--benchmark-compare --benchmark-storage=file://out/bench --benchmark-columns=min,median,iqr,rounds $(ARGS)

clean: ## remove caches and build output
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info
	@find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

clean-venv: ## remove .venv
	@rm -rf .venv

$(BASE): pyproject.toml constraints.txt tools/setup.sh $(call changed,$(PYTHON),$(BASE))
	@sh tools/setup.sh base

$(TRAIN): $(BASE) $(call changed,$(TORCH),$(TRAIN))
	@sh tools/setup.sh train
