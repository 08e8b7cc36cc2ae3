# ckptless: `make demo` shows it, `make test` tests it; both set up their own virtual environment first.
PYTHON ?= python3.11
VENV   ?= .venv
# Pinned so that an index or folder that offers the CPU build (2.13.0+cpu) wins over the CUDA one.
TORCH  ?= torch==2.13.0
# torchtitan with what its Trainer imports, as it is: its own requirements are of another huggingface_hub than transformers'.
TITAN  ?= torchtitan==0.3.0 datasets==4.7.0 dill docstring_parser httpx multiprocess pandas spmd_types==0.2.3 torchdata \
	typeguard tyro
# It needs triton, too, which is kept apart: where torch finds it, the end of each process takes a second longer.
TRITON ?= triton==3.9.0
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup demo test test-slow test-gpu test-torch-matrix coverage soak simulate simulate-night test-slurm-matrix
.PHONY: fuzz mutants scale bench bench-slurm lint types imports check format clean
.PHONY: slurm-demo slurm-shell slurm-packages native native-check
.PHONY: install uninstall install-job-submit uninstall-job-submit
setup: $(STAMP)

$(STAMP): setup.cfg Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off $(TORCH)
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[daemon,data,plot,test,lint,docs,dist]'
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps $(TITAN)
	$(BIN)/python -m pip install --quiet --progress-bar off --no-deps --upgrade --target $(VENV)/triton $(TRITON)
	touch $@

demo: $(STAMP)
	$(BIN)/python docs/demo/demo.py $(ARGS)

# All of it in two runs side by side; with ARGS (folders, -k NAME) in one.
test: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest -q -m 'not slow and not soak' $(ARGS)
else
	$(BIN)/python tests/side_by_side.py -m 'not slow and not soak'
endif

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow $(ARGS)

# The tests that stand on torch, on other torches: environments of 7 GB each in .torch/, one after the other.
VERSIONS ?= 2.8.0 2.9.1 2.10.0 2.11.0 2.12.1 2.14.1 2.15.0
test-torch-matrix: $(STAMP)
	$(BIN)/python tests/torch/matrix.py $(ARGS) $(VERSIONS)

# The adapters' tests with the oldest and the newest release of each framework: environments over this one in .torch/.
.PHONY: test-framework-matrix
test-framework-matrix: $(STAMP)
	$(BIN)/python -m tests.torch.frameworks_matrix $(ARGS) $(RELEASES)

# Every night: the newest one. Its wheels take longer to install (4 to 5 minutes, 5.5 GB) than CI has for it.
.PHONY: test-newest-torch
test-newest-torch: VERSIONS := 2.15.0
test-newest-torch: test-torch-matrix

# What needs a CUDA device; without one it runs on the simulated device, or is skipped.
test-gpu: $(STAMP)
ifdef ARGS
	$(BIN)/python -m pytest -q $(ARGS)
else
	$(BIN)/python tests/side_by_side.py --gpu
	$(BIN)/python -m tests.gpu.report --json build/gpu-report.json
endif

# Whatever bytes come from somebody else, for so many seconds; SEED for others than the last time.
SECONDS ?= 3600
fuzz: $(STAMP)
	FUZZ_SECONDS=$(SECONDS) FUZZ_SEED=$(or $(SEED),1) $(BIN)/python -m pytest -q --timeout=0 tests/fuzz $(ARGS)

# How much of the control core the unit tests and the simulator reach.
CORE := ckptless.daemon.agent.core,ckptless.daemon.replication,ckptless.daemon.ckptlessd.consensus,ckptless.daemon.ckptlessd.planning,ckptless.daemon.ckptlessd.recovery,ckptless.daemon.ckptlessd.membership,ckptless.daemon.ckptlessd.peering,ckptless.daemon.ckptlessd.session
coverage: $(STAMP)
	$(BIN)/python -m coverage run --branch --source=$(CORE) --data-file=build/coverage -m pytest -q \
		-m 'not slow' tests/unit/agent tests/unit/control tests/unit/membership tests/unit/daemon tests/property tests/sim \
		--deselect tests/sim/test_planted.py --deselect tests/sim/test_simulation.py::test_twenty_thousand_faults
	$(BIN)/python -m coverage report --data-file=build/coverage --skip-covered --fail-under=95

soak: $(STAMP)
	$(BIN)/python -m pytest -q -s -m soak $(ARGS)

# Another Slurm (trixie: 24.11, sid: 26.05) in a chroot, with our packages installed, and the tests on real Slurm in it.
test-slurm-matrix: $(STAMP) slurm-packages
	set -e; for suite in trixie sid; do \
		root=$$($(BIN)/python -m tests.slurm.packaged $$suite --into .roots); export CKPTLESS_PACKAGED=1; \
		CKPTLESS_REQUIRE_SLURM=1 CKPTLESS_SLURM_ROOTFS=$$root $(BIN)/python -m pytest -q $(ARGS) \
			-m 'not slow' tests/slurm; done

# The story of one seed, or with COUNT=N which of so many fail; NODES and FAULTS of its job, if not the seed's.
# With GUEST=1 another job in the same daemons; with ELECTIONS=1 only elections beside bad disks, of so many seeds.
SEED ?= 1
simulate: $(STAMP)
	$(BIN)/python -m tests.sim $(SEED) --count $(or $(COUNT),1) --nodes $(or $(NODES),0) \
		--faults $(or $(FAULTS),0) --components $(or $(COMPONENTS),0) $(if $(ELECTIONS),--elections) $(if $(GUEST),--guest) $(if $(COST_MS),--cost-ms $(COST_MS))

# A million faults of components, each job with so many: 33 minutes on two cores with COMPONENTS=120.
simulate-night: $(STAMP)
	$(BIN)/python -m tests.sim $(SEED) --until 1000000 --components $(or $(COMPONENTS),40)

# Small mistakes in the pure rooms: COUNT of them, drawn by SEED, each of which some test has to notice. Minutes.
mutants: $(STAMP)
	mkdir -p build/mutants
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),300) --seed $(SEED) $(ARGS)

# Those that have a name, and a test that has to find them: every rule of the agreement, seconds.
.PHONY: mutants-named
mutants-named: $(STAMP)
	$(BIN)/python -m tests.mutants.named

# Thousands of simulated nodes: what they say to each other, and how long a recovery takes. Ten minutes.
# All daemons of 12,500 nodes in one process would, as their memory grows, not fit into 24 GB; single ones are measured up to that.
SIZES ?= 16 64 256 1024 4096 12500
scale: $(STAMP)
	$(BIN)/python -m tests.sim.scale $(filter-out 12500,$(SIZES)) --json docs/scale.json --plot docs/scale.png
	$(BIN)/python -m tests.sim.scale_parts $(SIZES) --json docs/scale_parts.json
	$(BIN)/python -m tests.sim.scale_memory $(SIZES) --json docs/scale_memory.json

# All of docs/performance.md, ours beside the peers in environments of their own (built at first): an hour. Or one part:
# `make bench-data`. With LONG=1 every peer in every case, five minutes of each fire, all sizes: more than three hours.
BENCH := docs/bench
PARTS := crash dark alarms fire peace hangs init data replication
ifdef LONG
crash := --kills 3 --own-kills 20
fire := --for 300
dark := --ways ckptless requeue requeue-tuned
alarms := --hours 1e6
hangs := --hangs 200
init := --turns 5 --default-up-to 1024 256 --real 16 64 128
data := --turns 5 --jobs 4 --kinds list quick slow
replication := --times 7 --large 4096 --restored 2048
else
crash := --short
alarms := --hours 1e5
fire := --for 90
peace := --turns 2 --times 1 32 --for 10
hangs := --hangs 28
init := --ranks 16 256 1024
data := --turns 2 --jobs 1
replication := --interfaces 1 4 --times 3
endif
bench: $(STAMP)
	set -e; for part in $(PARTS) scale; do $(MAKE) bench-$$part; done

.PHONY: $(PARTS:%=bench-%) bench-scale
bench-dark: slurm-packages
$(PARTS:%=bench-%): bench-%: $(STAMP)
	$(BIN)/python -m tests.bench.$* $($*) --json $(BENCH)/$*.json
	$(BIN)/python -m tests.bench.report

# Of what `make scale` has written.
bench-scale: $(STAMP)
	$(BIN)/python -m tests.bench.scale
	$(BIN)/python -m tests.bench.report

# Whether a hang is told of where none is, for so many seconds each: on a machine with a load of 20, in a job of wild
# step times, and in such a job on such a machine. K='even-20' or 'wild-0' for one of them.
.PHONY: false-alarms
false-alarms: $(STAMP)
	CKPTLESS_SOAK_S=$(SECONDS) $(BIN)/python -m pytest -q -s -m slow tests/local/test_false_alarms.py -k '$(K)'

# Recoveries of one job: whether all losses are equal, and in how many seconds.
.PHONY: bench-faults
bench-faults: $(STAMP)
	$(BIN)/python tests/local/bench.py equal
	$(BIN)/python tests/local/bench.py stall

# What a change of the number of ranks costs, beside torchrun's elastic nodes with DCP, in turns. Ten minutes.
.PHONY: bench-elastic
bench-elastic: $(STAMP)
	$(BIN)/python -m tests.local.bench_elastic $(ARGS)

# How long training stands still when a rank moves to a spare, planned and at once. Ten minutes.
.PHONY: bench-moves
bench-moves: $(STAMP)
	$(BIN)/python -m tests.local.bench_moves $(ARGS)

bench-slurm: $(STAMP) slurm-packages
	$(BIN)/python -m tests.slurm.bench $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy docs/options.py docs/events.py docs/metrics.py docs/site.py docs/api.py docs/refusals.py docs/messages.py
	$(BIN)/mypy docs/demo
	$(BIN)/mypy etc/packages

imports: $(STAMP)
	$(BIN)/lint-imports

check: lint types imports test

# The same on real Slurm: five nodes in namespaces of this machine, of which one loses its power.
slurm-demo: slurm-packages $(STAMP)
	$(BIN)/python docs/demo/slurm_demo.py $(ARGS)

# The pictures of docs/metrics.md: what a real Prometheus has of such a job that loses ranks and nodes, drawn as Grafana
# would show it; takes Debian's prometheus. Three minutes; ARGS=--again draws what was recorded before.
.PHONY: dashboards
dashboards: slurm-packages $(STAMP)
	$(BIN)/python -m tests.slurm.dashboards $(ARGS)

# An elastic job on twelve such nodes: it gives way to a job of higher priority, and grows again as nodes come free.
.PHONY: elastic-demo
elastic-demo: slurm-packages $(STAMP)
	$(BIN)/python docs/demo/elastic_demo.py $(ARGS)

# Debian's Slurm, where it is missing.
SLURM_PACKAGES := slurmd slurmctld slurm-client slurm-wlm-basic-plugins libslurm-dev munge libmunge2 iproute2 \
	nftables procps gcc libc6-dev
slurm-packages:
	@test "$$(id -u)" = 0 || { echo 'a Slurm cluster on one machine takes root' >&2; exit 2; }
	@dpkg -s $(SLURM_PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		RUNLEVEL=1 apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; }

# A prompt on a cluster of five nodes (ARGS='--nodes 3'), in namespaces of this machine; takes root and Debian's
# Slurm packages.
slurm-shell: slurm-packages $(STAMP)
	$(BIN)/python -m tests.slurm.shell $(ARGS)

# What is written in C: the SPANK plugin, ckptless-notify, and for the controller the job_submit plugin.
NATIVE := slurm_ext/spank slurm_ext/hooks
native:
	set -e; for folder in $(NATIVE); do $(MAKE) -C $$folder; done

native-check:
	$(MAKE) -C slurm_ext/spank check asan
	$(MAKE) -C slurm_ext/job_submit check

# DESTDIR, PREFIX, PLUGINDIR, SYSCONFDIR, LIBEXECDIR, MANDIR, UNITDIR, BINDIR. Edited configuration is kept.
install: native
	set -e; for folder in $(NATIVE) etc; do $(MAKE) -C $$folder install; done
	@echo "the Python part is pip's, not installed here: pip install '.[daemon]' on nodes, '.' for users"

# What `make install` with the same variables has put there, but for configuration that was changed since.
uninstall:
	set -e; for folder in $(NATIVE) etc; do $(MAKE) -C $$folder uninstall; done
	@echo "the Python part is pip's: pip uninstall ckptless"

install-job-submit uninstall-job-submit:
	$(MAKE) -C slurm_ext/job_submit $(@:-job-submit=)

# The source archive, the wheel, .deb, .rpm and their checksums, to build/dist: docs/packages.md. ARGS='--python python3.12'
# where that is the nodes' Python; PLUGINDIR, SLURM_CPPFLAGS as for `make install`.
.PHONY: dist
dist: $(STAMP)
	$(BIN)/python etc/packages/dist.py --into build/dist $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What manual pages, etc/ckptless.yaml and the plugin's header have of the table in daemon/settings/options.py.
.PHONY: options
options: $(STAMP)
	$(BIN)/python docs/options.py
	$(BIN)/python docs/metrics.py

# docs/events.md, of the table in daemon/ledger/event_kinds.py.
.PHONY: events
events: $(STAMP)
	$(BIN)/python docs/events.py

# docs/messages.md: every message and record, from their types.
.PHONY: messages
messages: $(STAMP)
	$(BIN)/python docs/messages.py

# docs/troubleshooting.md, its second part: the refusals in the code, with docs/refusals.toml.
.PHONY: refusals
refusals: $(STAMP)
	$(BIN)/python docs/refusals.py

# docs/api.md, of signatures and docstrings of what scripts may use.
.PHONY: api
api: $(STAMP)
	$(BIN)/python docs/api.py

# The documentation site, to build/site/html. A link to a page or a heading that is not there is an error.
.PHONY: site
site: $(STAMP)
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f docs/mkdocs.yml

clean:
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
