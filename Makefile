# make run    the main job: three real models through PyGraph, and the engine at work
# make test   every test that this machine can run
#
# Both set up what they need in .venv (PyTorch is several GB): the newest PyTorch that PyGraph supports, or
# another with TORCH=2.11, in .venv-2.11. Where PyTorch is installed already and there is no network:
# make run PYTHON=python3 SETUP=none
PYTHON ?= python3
SETUP ?= venv
NEWEST := 2.15
TORCH ?= $(NEWEST)
SUFFIX := $(if $(filter-out $(NEWEST),$(TORCH)),-$(TORCH))
VENV := .venv$(SUFFIX)

ifeq ($(SETUP),none)
  PY := $(PYTHON)
  READY :=
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/ready
  ENGINE_FLAGS ?= -DPYGRAPH_FETCH_GTEST=ON
  export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
endif
SITE := build/site$(SUFFIX)
SOURCES := $(shell find include src bindings python CMakeLists.txt pyproject.toml -type f -not -name '*.pyc')
export PYTHONPATH := $(CURDIR)/$(SITE)
GENERATOR := $(if $(shell command -v ninja),-G Ninja)

.PHONY: wheel test-wheel fuzz fuzz-engine fuzz-programs fuzz-steps soak soak-training sanitize-gpu run test test-engine test-workspace test-python test-release test-gpu sanitize lint lint-bindings format bench bench-indirection clean

run: $(SITE)/ready build/engine/ready
	$(PY) -m examples.python.demo --example build/engine/examples/cpp/relocate

test: test-engine test-workspace test-python

test-engine: build/engine/ready
	ctest --test-dir build/engine --output-on-failure -j 2

# What the extension allocates, on an allocator that the tests register with PyTorch.
test-workspace: $(READY)
	cmake -S . -B build/workspace$(SUFFIX) $(GENERATOR) $(ENGINE_FLAGS) -DPYGRAPH_BINDINGS=ON -DPYGRAPH_EXAMPLES=OFF \
	  -DPython_EXECUTABLE=$(shell $(PY) -c "import sys; print(sys.executable)")
	cmake --build build/workspace$(SUFFIX) --target workspace_tests
	ctest --test-dir build/workspace$(SUFFIX) --output-on-failure -R "^(Workspace|HeldBlocks)"

# Nothing but speed depends on patches of PyTorch: what asks Dynamo for something runs without any, too.
WITHOUT_PATCHES := $(addprefix tests/python/test_,uncapturable.py wrapper_bypass.py polyfills.py)
test-python: $(SITE)/ready
	$(PY) -m pytest tests
	PYGRAPH_PATCHES=none $(PY) -m pytest $(WITHOUT_PATCHES)

# What depends on PyTorch's private parts, for a release that is not the newest: make test-release TORCH=2.11
test-release: $(SITE)/ready
	$(PY) -m pytest tests/python -k "$(BY_RELEASE)"
BY_RELEASE := patches or guard or compiled or numbers or parameters or backend or stub or barriers or \
  wrapper_bypass or engine or warm_start or fx_passes or graph_pass or cpu_values or polyfills or uncapturable or partition or launch

# The tests that need a GPU. Those that measure free memory run alone. With pytest-xdist, on two GPUs:
# make test-gpu PYGRAPH_TEST_GPUS=0,1 PARALLEL="-n 24 --dist worksteal"
export PYGRAPH_TEST_GPUS
# Also with releases of PyTorch that have not run on a GPU yet.
export PYGRAPH_UNTESTED_RELEASES := 1
test-gpu: $(SITE)/ready build/engine/ready
	PYGRAPH_TEST_DRIVER=cuda build/engine/tests/cpp/engine_tests --gtest_brief=1
	$(PY) -m pytest tests/gpu --ignore tests/gpu/test_short_memory.py $(PARALLEL)
	$(PY) -m pytest tests/gpu/test_short_memory.py tests/multi_gpu

# The engine's tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
sanitize: $(READY)
	cmake -S . -B build/asan $(GENERATOR) -DPYGRAPH_SANITIZE=address,undefined
	cmake --build build/asan && ctest --test-dir build/asan --output-on-failure -j 2
	cmake -S . -B build/tsan $(GENERATOR) -DPYGRAPH_SANITIZE=thread
	cmake --build build/tsan && ctest --test-dir build/tsan --output-on-failure -j 2

# Random programs for so many seconds, each part; see docs/explanation/fuzzing.md. The second part needs a GPU; it
# is continued with SEED set to the seed that it names at its end.
SECONDS ?= 60
COUNT ?= 1000000
SEED ?= 0
fuzz: fuzz-engine fuzz-programs fuzz-steps

fuzz-programs: $(SITE)/ready
	$(PY) -m tests.fuzz.run --seed $(SEED) --seconds $(SECONDS) --count $(COUNT)

fuzz-steps: $(SITE)/ready
	$(PY) -m tests.fuzz.steps.run --seed $$(date +%s) --count $(COUNT) --seconds $(SECONDS)

fuzz-engine: build/engine/ready
	build/engine/tests/cpp/fuzz/engine_fuzz --seed $$(date +%s)000 --seconds $(SECONDS)

# These need a GPU: ten models in eight threads while the driver fails, and compute-sanitizer.
soak: $(SITE)/ready
	$(PY) -m tests.soak.run

# 10 000 training steps by pygraph.graph beside uncaptured ones, and 500 with each other optimizer.
soak-training: $(SITE)/ready
	$(PY) -m tests.soak.training

sanitize-gpu: $(SITE)/ready build/engine/ready
	$(PY) -m tests.sanitizer.run

TIDY := xargs -P $(shell nproc) -n 1 clang-tidy --quiet
lint: $(READY) build/engine/ready
	clang-format --dry-run --Werror $$(git ls-files '*.cc' '*.h')
	git ls-files 'src/*.cc' 'examples/*.cc' | $(TIDY) -p build/engine
	$(PY) -m ruff format --check . && $(PY) -m ruff check .
	MYPYPATH=python $(PY) -m mypy

# Apart from lint, because PyTorch's headers make it slow.
lint-bindings: $(READY)
	cmake -S . -B build/bindings $(GENERATOR) -DPYGRAPH_BINDINGS=ON -DPYGRAPH_TESTS=OFF \
	  -DPYGRAPH_EXAMPLES=OFF -DPython_EXECUTABLE=$(shell $(PY) -c "import sys; print(sys.executable)")
	git ls-files 'bindings/*.cc' | $(TIDY) -p build/bindings

format: $(READY)
	clang-format -i $$(git ls-files '*.cc' '*.h')
	$(PY) -m ruff format . && $(PY) -m ruff check --fix .

bench: $(SITE)/ready
	$(PY) -m benchmarks.run

# The ways to give a graph other addresses; needs nvcc.
bench-indirection:
	mkdir -p build
	nvcc -std=c++17 -O2 -arch=native -rdc=true -o build/indirection benchmarks/indirection.cu -lcudadevrt
	./build/indirection

# A wheel in dist/ for this Python, with an engine for each supported release of PyTorch, whose wheels are
# downloaded for their headers. It is tried beside each of these releases, which takes longer.
wheel: $(READY)
	$(PY) tools/build_wheel.py

test-wheel: $(READY)
	$(PY) tests/wheel/run.py dist/*.whl

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install "torch==$(TORCH).*" torchvision rich pytest ruff mypy transformers timm matplotlib \
	  numpy ninja cmake wheel "scikit-build-core>=0.10"
	touch $@

# The package, installed beside the sources so that its backend is found by name.
$(SITE)/ready: $(READY) $(SOURCES)
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --upgrade --target $(SITE) .
	touch $@

build/engine/ready: $(READY) $(SOURCES) $(shell find tests/cpp tests/fuzz/engine examples/cpp -type f)
	cmake -S . -B build/engine $(GENERATOR) $(ENGINE_FLAGS)
	cmake --build build/engine
	touch $@

clean:
	rm -rf build
