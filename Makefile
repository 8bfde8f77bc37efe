# Everything a new user needs: `make train` and `make test`. PYTHON must be 3.11 (torch's CPU build is tested with it).
PYTHON ?= python3
# On a CPU machine 2.13.0 is the build that is tested; with CUDA set TORCH to what your driver wants.
TORCH ?= torch==2.13.0
VENV := .venv
PIP := -m pip --disable-pip-version-check install -qq
# One more than two cores, because a real host waits for its processes now and then.
WORKERS ?= 3
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
# Without bytecode each process of the tests compiles ours and rewrites the assertions of 200 modules, in 4 s.
unexport PYTHONDONTWRITEBYTECODE
# Plugins of packages that a host needs: no test uses them, and each process of the tests imports them for 0.4 s.
# That of hypothesis reads all our modules in each process for numbers to try, and only one has tests that try some.
# A folder of a test that passed is removed by its worker, not by the next run but two, at its end and on one core.
export PYTEST_ADDOPTS := -p no:hydra_pytest -p no:anyio -p no:hypothesispytest -o tmp_path_retention_policy=failed $(PYTEST_ADDOPTS)

CORE_TESTS := tests/ops tests/core tests/host/test_hook.py tests/host/test_packing.py tests/hosts/test_contract.py \
	tests/host/test_off_policy_is.py tests/test_laws.py tests/test_presets.py tests/test_tis.py

REQUIREMENTS := slime_ext_cpu/requirements.txt slime_ext_cpu/install.py slime_ext/tools/releases.py

.PHONY: install host train rehearse test test-core test-fast test-gpu docs wheel lock cuda-wheels lint format clean

# What the second step brings, and why it is one of its own: slime_ext_cpu/install.py.
install: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml setup.py $(REQUIREMENTS)
	@echo "slime-ext: creating the environment ($(VENV)): a real host, its engine and the tests; about two minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP) --no-compile "$(TORCH)" -e ".[train,dev]" $(if $(LOCKED),-c requirements.lock)
	@$(VENV)/bin/python -m slime_ext_cpu.install
	@$(VENV)/bin/python -m tests.peers.wheels
	@touch $@

host: install # the hosts' environment is this one

train: install
	@$(VENV)/bin/slime-ext train

rehearse: install # the tiny task on the miles of the package index: its parser, Ray, SGLang, Megatron; no GPU
	@$(VENV)/bin/slime-ext rehearse examples/rehearse_tiny.sh --host miles

test: install
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/python -m pytest tests -q -n $(WORKERS) --dist loadgroup

# The mathematics and the hook.
test-core: install
	@$(VENV)/bin/python -m pytest $(CORE_TESTS) -q -n 2 --dist loadgroup -m "not slow"

test-fast: install
	@$(VENV)/bin/python -m pytest tests -q -n $(WORKERS) -m "not slow and not host"

test-gpu:
	@$(VENV)/bin/python -m pytest tests_gpu -q

# README.md and docs/ as a site in build/site; every warning is an error.
docs:
	@.venv-docs/bin/python -c "import mkdocstrings_handlers.python" 2>/dev/null || \
	  { $(PYTHON) -m venv .venv-docs && .venv-docs/bin/python $(PIP) "mkdocs-material>=9.5,<10" "mkdocstrings[python]>=1,<2" ruff; }
	@$(PYTHON) docs/site.py build/docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build -q --strict
	@echo "slime-ext: build/site/index.html"

wheel:
	@PYTHON=$(PYTHON) TORCH="$(TORCH)" .ci/wheel

# The versions that the suite ran with; `make install LOCKED=1` takes them.
lock:
	@{ echo "# Made by \`make lock\`: what the suite ran with, on Python 3.11 and a CPU."; \
	  $(VENV)/bin/python -m pip --disable-pip-version-check freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' | grep -v '^#'; } > requirements.lock

# Wheels for `bash benchmarks/cuda.sh` on a machine with CUDA and without a network; its Python may be another.
CUDA_PYTHON ?= 3.12
cuda-wheels:
	@$(PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
	  --python-version $(CUDA_PYTHON) --implementation cp $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) \
	  --platform manylinux2014_x86_64 -d cuda-wheels -r benchmarks/requirements-cuda.txt
	@du -sh cuda-wheels

lint:
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

format:
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .venv-docs build dist *.egg-info .pytest_cache .ruff_cache
