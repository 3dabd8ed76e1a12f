# Everything is installed into .venv/; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo venv engines test check bench bench-vllm traces nightly clean

demo: venv  ## run the main job for real on the embedded engine and compare it with its simulation
	$(BIN)/rlsched validate verl-hybrid areal-async areal-async,admit.eta=1 --output out/demo $(ARGS)

venv: $(VENV)/.installed  ## only the environment, with .venv/bin/rlsched

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[real,test,dev]'
	touch $@

ENGINES := .engines
TORCH = torch==$$(sed -n 's/^torch==//p' constraints.txt)

engines: $(ENGINES)/vllm/.installed $(ENGINES)/sglang/.installed  ## vLLM and SGLang on CPU, each in an environment of its own

# $(1) is the engine. All that it needs is in its file, so that no resolver brings CUDA builds.
define engine
	$(PYTHON) -m venv --clear $(ENGINES)/$(1)
	$(ENGINES)/$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(ENGINES)/$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r real/engines/requirements-$(1).txt
	$(ENGINES)/$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
endef

$(ENGINES)/vllm/.installed: real/engines/requirements-vllm.txt constraints.txt
	$(call engine,vllm)
	touch $@

$(ENGINES)/sglang/.installed: real/engines/requirements-sglang.txt real/engines/sglang_shim.py constraints.txt
	$(call engine,sglang)
	site=$$($(ENGINES)/sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp real/engines/sglang_shim.py "$$site/rlsched_sglang_shim.py" && \
		echo 'import rlsched_sglang_shim' > "$$site/rlsched_sglang_shim.pth"
	touch $@

test: venv  ## all tests, vLLM and SGLang included where `make engines` has put them
	RLSCHED_DATA="$(RLSCHED_DATA)" $(BIN)/python -m pytest

check: venv  ## style, types and floors, on a non-editable install: on an editable one sim and real aren't seen
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python tests/wheel.py

bench: venv  ## speed of engine, controller and checker
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench.py

bench-vllm: venv engines  ## tokens a second through rlsched, against the same requests sent straight to vLLM
	$(BIN)/python tests/bench_vllm.py

traces: venv engines  ## record traces/ anew: both presets, and the second at eta = 1, on every engine
	for engine in transformers vllm sglang; do \
		for policy in verl-hybrid areal-async areal-async,admit.eta=1; do \
			$(BIN)/rlsched run $$policy --engine $$engine --output traces/$$engine-$$(echo $$policy | tr ',=' '__').jsonl.zst || exit 1; \
		done; \
	done
	rm traces/*.rollouts.jsonl.zst

nightly: venv  ## what takes minutes
	RLSCHED_NIGHTLY=1 $(BIN)/python -m pytest -m nightly

clean:
	rm -rf $(VENV) $(ENGINES) build out *.egg-info
