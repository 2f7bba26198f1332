# Six commands: demo, demo-vllm, test, test-vllm-suite, lint, bench. Each sets up what it needs in .venv and target, and is
# quick when nothing has changed.

PYTHON ?= python3
BIN := .venv/bin
TRACE ?= $(wildcard ../shared/data/mooncake_conversation_trace.jsonl)
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml

.PHONY: demo demo-vllm test test-core test-vllm-suite lint bench build clean

demo: build
	$(BIN)/lockstep-kv demo $(if $(TRACE),--trace "$(TRACE)")

# A real vLLM engine on the CPU, stock and with the plugin.
demo-vllm: build .venv/vllm
	$(BIN)/python benches/demo_vllm.py

test: .venv/vllm test-core

# Without vLLM where it is not installed: the tests against it are skipped then.
test-core: build
	cargo test --quiet --workspace --locked
	$(BIN)/python -m pytest --timeout 900

# vLLM's own tests, fetched into build/vllm_suite, on its own manager and on ours.
test-vllm-suite: build .venv/vllm
	$(BIN)/python tests/vllm_suite/run.py

lint: build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --quiet --workspace --no-deps --locked
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest lockstep_kv._core

bench: build .venv/vllm
	$(BIN)/python benches/steps_by_length.py
	$(BIN)/python benches/decode_vs_vllm.py
	$(BIN)/python benches/replay_vs_vllm.py "$(or $(TRACE),$(error give TRACE=file.jsonl))"

build: .venv/built

.venv/built: .venv/installed $(RUST_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/maturin develop --release --locked --quiet
	@touch $@

.venv/installed: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@touch $@

.venv/vllm: .venv/installed requirements-vllm.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-vllm.lock
	@touch $@

clean:
	rm -rf .venv target

# Pins the newest versions that requirements.in allows.
.PHONY: lock
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --requirement requirements.in
	(echo '# Pinned by `make lock` from requirements.in.'; build/lock/bin/python -m pip freeze) >requirements.lock
