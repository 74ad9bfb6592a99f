# Every target makes what it needs; `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ONNXJS := tests/lowering/onnxjs/node_modules/.package-lock.json
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-full check lower-bounds rule zoo onnxjs lower-zoo ops wild ort-suite upstream bench bench-setup bench-quick bench-build bench-web bench-federated web web-test cpp-test cpp-tools style-transfer federated-demo chromium clean finetune-demo

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cpu,plot]" "scikit-learn>=1.6"
	@touch $@

# constraints.txt has the releases that the tests were last run with; users are not bound to them.
# torch comes first: the CPU build of its release is the one the tests were made with.
$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cpu,torch,sklearn,plot,text,dev]"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## train a digits classifier on stock ONNX Runtime, into runs/demo/
	$(BIN)/python examples/digits.py

# A fixed seed: CI says the same twice. Plain pytest draws another order and other data each time.
PYTEST := $(BIN)/python -m pytest -n 2 -q -p randomly --randomly-seed=1
# A test that hung or lost a connection runs once more and is listed as flaky. A wrong value never does.
RETRY := --reruns 1 --only-rerun '^(\w*Timeout|Connection|BrokenPipe|URLError|OSError.*Address already in use)' --rerun-except '^AssertionError'

test: $(VENV)/.dev web/node_modules/.package-lock.json $(ONNXJS) chromium cpp-tools check  ## everything CI runs: Python, web, C++ where there are headers
	$(PYTEST) $(RETRY) -m "not full" --durations=30
	$(MAKE) web-test

test-fast: $(VENV)/.dev  ## rule cases on the cpu target and a few files per package, under three minutes
	$(PYTEST) @tests/fast.txt

test-full: $(VENV)/.dev check  ## the long loops too, and transformers
	$(BIN)/python -m pytest -n 2 -q
	$(MAKE) hugging-face

check: $(VENV)/.dev  ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

.PHONY: docs site screenshots release-check hugging-face
$(VENV)/.docs: $(VENV)/.dev
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	@touch $@

docs: $(VENV)/.docs  ## the documentation site, into docs/_build/html
	cd docs && ../$(BIN)/python -m sitegen
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	$(BIN)/python -m tools.site_links docs/_build/html

release-check: $(BIN)/python  ## build and try wheel, sdist and npm tarball of the last commit, from a clean clone
	$(BIN)/python -m tools.release_check .cache/release

HUGGING_FACE := .cache/hugging-face
$(HUGGING_FACE)/.ready: pyproject.toml
	$(PYTHON) -m venv $(HUGGING_FACE)
	$(HUGGING_FACE)/bin/pip install --quiet --constraint constraints.txt torch
	$(HUGGING_FACE)/bin/pip install --quiet --constraint constraints.txt --editable ".[cpu,torch,dev]"
	$(HUGGING_FACE)/bin/pip install --quiet transformers datasets trl lightning wandb mlflow-skinny  # they bound packages of their own
	@touch $@

hugging-face: $(HUGGING_FACE)/.ready  ## transformers, datasets, TRL, Lightning, wandb and mlflow, in an environment that has them
	$(HUGGING_FACE)/bin/python -m pytest -n0 -q tests/torch/test_frameworks.py tests/torch/test_hugging_face.py tests/torch/test_trl.py tests/torch/test_trl_preference.py tests/training/test_trackers.py "tests/docs/test_pages.py::test_blocks_run[docs/hugging-face.md]"

.PHONY: openvino
openvino: $(VENV)/.dev web/node_modules/.package-lock.json  ## training on OpenVINO, with its own onnxruntime under .cache/openvino
	$(BIN)/python -m pytest -n0 -q tests/openvino

lower-bounds: $(BIN)/python  ## fast tests with the oldest and the newest releases that pyproject.toml allows
	$(BIN)/python tests/lower_bounds.py .cache/lower-bounds

rule: $(VENV)/.dev  ## all questions about one operator: make rule OP=Erf
	@grep -rqE "[\"']$(OP)[\"']" tests/cases || { echo "no such operator in tests/cases: $(OP)"; exit 2; }
	$(BIN)/python -m pytest tests/test_op_cases.py -q -k "[$(OP)-"

zoo: $(VENV)/.dev  ## every zoo model against torch, its gradients and one training step
	$(BIN)/python -m tests.zoo
	$(BIN)/python -m tests.torch.zoo

onnxjs: $(ONNXJS)  ## install onnxjs 0.1.8, in which the tests run lowered models

$(ONNXJS): tests/lowering/onnxjs/package-lock.json
	cd tests/lowering/onnxjs && npm ci
	@touch $@

lower-zoo: $(VENV)/.dev $(ONNXJS)  ## every zoo model at older opsets; rewrites docs/lowering.md
	$(BIN)/python -m tests.lowering.zoo

ops: $(VENV)/.dev  ## ONNX's node tests as a gradient test; rewrites docs/ops.md
	$(BIN)/python -m tests.node_cases --write

wild: $(VENV)/.dev  ## files that others made, in .cache/wild; rewrites docs/wild.md
	$(BIN)/python -m tests.wild.produce
	$(BIN)/python -m tests.wild --write
	$(BIN)/python -m tests.wild.as_torch

ort-suite: $(VENV)/.dev  ## onnxruntime's own tests of its training API: make ort-suite ORT_SRC=<checkout>
	$(BIN)/python -m tests.compat.ort_suite "$(ORT_SRC)"

upstream: $(VENV)/.dev  ## programs of other projects: make upstream UPSTREAM=<folder of checkouts> [ONLY=<project>]
	$(BIN)/python -m tests.upstream "$(UPSTREAM)" --only "$(ONLY)"

# Other engines, each in its own environment under .cache/bench; torch.compile needs g++.
bench-setup: $(VENV)/.dev  ## the environments and exported nets of the benchmarks
	@command -v g++ >/dev/null || { apt-get update -qq && apt-get install -y -qq g++; }
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.prepare

# Writes nothing if other work is on the machine; the last line draws the chart that leads the page.
bench: bench-setup  ## every engine on every net, growth, gradients and thresholds; rewrites docs/benchmarks.md and docs/speed.md
	$(BIN)/python -m benchmarks --write
	$(BIN)/python -m benchmarks.growth --write
	$(BIN)/python -m benchmarks.gradients --write
	$(BIN)/python -m benchmarks.passes --sizes --write
	cd docs && ../$(BIN)/python -m sitegen

bench-quick: bench-setup  ## three nets, under three minutes once everything is set up
	$(BIN)/python -m benchmarks --quick

bench-build: $(VENV)/.dev  ## build time and node counts of gradient graphs
	$(BIN)/python benchmarks/build.py

benchmarks/web/node_modules/.package-lock.json: benchmarks/web/package-lock.json
	cd benchmarks/web && npm ci
	@touch $@

BENCH_WEB := .cache/bench-web
bench-web: $(VENV)/.dev chromium web/node_modules/.package-lock.json benchmarks/web/node_modules/.package-lock.json  ## training in Chromium beside other libraries; rewrites docs/benchmarks-web.md
	$(BIN)/python -m benchmarks.peers ort-training
	cd web && npm run build --workspace onnxtrain
	$(BIN)/python benchmarks/web/nets.py $(BENCH_WEB)
	.cache/bench/venvs/ort-training/bin/python benchmarks/web/official.py $(BENCH_WEB) 2>$(BENCH_WEB)/official.log
	node benchmarks/web/run.mjs $(BENCH_WEB) benchmarks/web/results.json 5 $(BENCH_WEB_FLAGS)
	$(BIN)/python -m benchmarks.web.report benchmarks/web/results.json docs
	$(BIN)/python -m benchmarks.web.finetune

# No scripts of other packages: the runtime's would fetch CUDA libraries. Ours (prepack) may run.
web/node_modules/.package-lock.json: web/package-lock.json
	cd web && npm ci --ignore-scripts
	@touch $@

web: $(VENV)/.demo web/node_modules/.package-lock.json  ## serve the site whose pages train in the tab
	$(BIN)/python web/site/make_artifacts.py web/site/public
	cd web && npm run dev

site: $(VENV)/.demo web/node_modules/.package-lock.json  ## build it into web/site/dist, plain files for any place; `make docs` has it in the gallery
	$(BIN)/python web/site/make_artifacts.py web/site/public
	cd web && npm run build

screenshots: site chromium  ## pictures of the site's pages, into docs/images
	cd web && node site/screenshots.mjs ../docs/images

chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; }

# Root installs the compiler; others are told by the tests what is missing.
cpp-tools:
	@{ command -v g++ && command -v cmake; } >/dev/null || [ "$$(id -u)" != 0 ] || \
		{ apt-get update -qq && apt-get install -y -qq g++ cmake; }

CPP_DEBIAN := g++ cmake default-jdk-headless rustc g++-aarch64-linux-gnu qemu-user
CPP_TOOLS := g++ cmake javac rustc aarch64-linux-gnu-g++ qemu-aarch64
cpp-test: $(VENV)/.dev web/node_modules/.package-lock.json  ## the C++ trainer, its C interface, Java, Rust, sanitizers and arm64
	@for tool in $(CPP_TOOLS); do command -v $$tool >/dev/null || missing=1; done; \
		[ -z "$$missing" ] || [ "$$(id -u)" != 0 ] || { apt-get update -qq && apt-get install -y -qq $(CPP_DEBIAN); }
	$(PYTEST) $(RETRY) tests/cpp

web-test: $(VENV)/.dev web/node_modules/.package-lock.json chromium  ## the web package in Node and in Chromium
	cd web && npm run check && npm test && npm run test:browser

style-transfer: $(VENV)/.dev web/node_modules/.package-lock.json $(ONNXJS) chromium  ## train a style, lower it to opset 7, run it in browser runtimes
	$(BIN)/python examples/style_transfer/run.py $(STYLE_FLAGS)

# Flower wants older releases of some of our tools: it has an environment of its own.
federated-demo: $(VENV)/.dev web/node_modules/.package-lock.json chromium  ## Python, Node and a browser tab train digits, then adapters, together
	cd web && npm run build --workspace onnxtrain
	python=$$($(BIN)/python -m tests.flower.environment) && PYTHONPATH=src $$python examples/federated/run.py $(FEDERATED_FLAGS)

bench-federated: $(VENV)/.dev web/node_modules/.package-lock.json  ## bytes and time of a federated round, beside Flower's PyTorch quickstart
	cd web && npm run build --workspace onnxtrain
	python=$$($(BIN)/python -m tests.flower.environment) && PYTHONPATH=src:. $$python -m benchmarks.federated $(FEDERATED_FLAGS)

finetune-demo: $(VENV)/.dev  ## train a small Llama, write it in 4 bits, fine-tune that file to another text
	$(BIN)/python examples/finetune/run.py $(FINETUNE_FLAGS)

clean:  ## remove what make made
	rm -rf $(VENV) runs .cache docs/_build docs/generated web/node_modules tests/lowering/onnxjs/node_modules web/.fixtures web/packages/*/dist web/site/dist web/site/public
