# Everything is installed into .venv/; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo venv test check bench nightly clean

demo: venv  ## run the main job for real on the embedded engine and compare it with its simulation
	$(BIN)/rlsched validate verl-hybrid areal-async areal-async,admit.eta=1 --output out/demo $(ARGS)

venv: $(VENV)/.installed  ## only the environment, with .venv/bin/rlsched

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[real,test,dev]'
	touch $@

test: venv  ## all tests, real engines included
	RLSCHED_DATA="$(RLSCHED_DATA)" $(BIN)/python -m pytest

check: venv  ## style, types and floors, on a non-editable install: on an editable one sim and real aren't seen
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python tests/wheel.py

bench: venv  ## speed of engine, controller and checker
	$(BIN)/python tests/bench_engine.py
	$(BIN)/python tests/bench.py

nightly: venv  ## what takes minutes
	RLSCHED_NIGHTLY=1 $(BIN)/python -m pytest -m nightly

clean:
	rm -rf $(VENV) build out *.egg-info
