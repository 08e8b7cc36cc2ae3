# ckptless: `make demo` shows it, `make test` tests it; both set up their own virtual environment first.
PYTHON ?= python3.11
VENV   ?= .venv
# Pinned so that an index or folder that offers the CPU build (2.13.0+cpu) wins over the CUDA one.
TORCH  ?= torch==2.13.0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

# Folder by folder: the files of one import each other by their bare names, as Python does beside a script.
CHECKED := $(filter-out %/__pycache__,$(wildcard tests/unit/*)) tests/property tests/integration tests/torch \
	tests/sim tests/local tests/slurm docs/demo

.PHONY: setup demo test test-slow bench lint types imports check format clean
.PHONY: slurm-shell native native-check install install-job-submit
setup: $(STAMP)

$(STAMP): setup.cfg Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off $(TORCH)
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[daemon,plot,test,lint]'
	touch $@

demo: $(STAMP)
	$(BIN)/python docs/demo/demo.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not slow' $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow $(ARGS)

bench: $(STAMP)
	$(BIN)/python tests/local/bench.py equal
	$(BIN)/python tests/local/bench.py stall

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	set -e; export MYPYPATH=tests/local; for folder in $(CHECKED); do $(BIN)/mypy $$folder; done

imports: $(STAMP)
	$(BIN)/lint-imports

check: lint types imports test

# A prompt on a cluster of five nodes, in namespaces of this machine; takes root and Debian's Slurm packages.
slurm-shell: $(STAMP)
	$(BIN)/python tests/slurm/shell.py $(ARGS)

# What is written in C: the SPANK plugin, ckptless-notify, and for the controller the job_submit plugin.
NATIVE := slurm_ext/spank slurm_ext/hooks
native:
	set -e; for folder in $(NATIVE); do $(MAKE) -C $$folder; done

native-check:
	$(MAKE) -C slurm_ext/spank check asan
	$(MAKE) -C slurm_ext/job_submit check

# DESTDIR, PREFIX, PLUGINDIR, SYSCONFDIR, LIBEXECDIR, MANDIR; an edited ckptless.conf is kept.
install: native
	set -e; for folder in $(NATIVE); do $(MAKE) -C $$folder install; done

install-job-submit:
	$(MAKE) -C slurm_ext/job_submit install

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
