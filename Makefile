# make install | grpo | test | fast | lint | clean
#
#   DEVICE=cpu|cuda   which vLLM build to install; unset, what this machine has
#   PYTHON=python3    which Python makes the environment (3.11 or 3.12)
#   ARGS='...'        handed on to what grpo, test and fast start: make grpo ARGS='--run.steps 5'

# One GPU is too few: a job needs a rank that trains and one that rolls out, each with a GPU of its own.
DEVICE ?= $(if $(filter-out 0 1,$(shell nvidia-smi -L 2>/dev/null | wc -l)),cuda,cpu)
PYTHON ?= python3
ARGS ?=

ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE must be cpu or cuda, got '$(DEVICE)')
endif

BIN := .venv/bin
INSTALLED := $(BIN)/.installed-$(DEVICE)
OTHER_DEVICE = $(filter-out $(INSTALLED),$(wildcard $(BIN)/.installed-*))
PROCESSES = $(if $(filter cuda,$(DEVICE)),$(shell nvidia-smi -L | wc -l),2)
ROOMS := comm launch rollout trainers

# uv reads neither the system's certificates nor pip's settings unless told to; it separates folders by commas, pip by spaces
# or lines. (pip config get would see the user's file alone.)
export UV_SYSTEM_CERTS := 1
comma := ,
space := $(subst ,, )
pip_setting = $(strip $(shell $(PYTHON) -m pip config list 2>/dev/null | sed -n "s/^[^=]*\.$(1)='\(.*\)'$$/\1/p" | sed 's/\\n/ /g; q'))
find_links = $(subst $(space),$(comma),$(call pip_setting,find-links))
index_url = $(call pip_setting,index-url)

# On the CPU it is to stay there, also where torch sees a GPU.
ifeq ($(DEVICE),cpu)
export CUDA_VISIBLE_DEVICES :=
endif

.PHONY: install grpo test fast lint clean

install: $(INSTALLED) models/smollm2/config.json models/tiny/config.json

# The two vLLM builds share one module name, so an environment made for the other device is made anew.
$(INSTALLED): setup.cfg overrides.txt
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 13) or sys.exit("Python must be 3.11 or 3.12, got " + sys.version.split()[0] + "; make install PYTHON=python3.12 picks another")'
	$(if $(OTHER_DEVICE),rm -rf .venv)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(if $(index_url),UV_DEFAULT_INDEX='$(index_url)') UV_FIND_LINKS='$(find_links)' $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --override overrides.txt -e '.[$(DEVICE),dev]'
	touch $@

models/smollm2/config.json models/tiny/config.json &: | $(INSTALLED)
	TQDM_DISABLE=1 $(BIN)/python -m rayless.launch.small_models models

grpo: install
	$(BIN)/torchrun --nproc_per_node $(PROCESSES) launch/grpo.py $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

fast: install
	$(BIN)/python -m pytest -m 'not job' $(ARGS)

# mypy sees the rooms as rayless.* through this link: setup.cfg maps them, and mypy does not read setup.cfg.
build/types/rayless:
	mkdir -p build/types
	ln -sfn ../.. $@

lint: install build/types/rayless
	$(BIN)/ruff check $(ROOMS) tests
	$(BIN)/ruff format --check $(ROOMS) tests
	$(BIN)/mypy

# Everything that the targets above made; runs/ holds the user's results and stays.
clean:
	rm -rf .venv build dist rayless.egg-info models/smollm2 models/tiny .pytest_cache .mypy_cache .ruff_cache
	find $(ROOMS) tests -name __pycache__ -type d -exec rm -rf {} +
