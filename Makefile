# Commands for a fresh clone: `make run` starts the gateway, `make test` tests it.
# Needs Python 3.11 or later; PYTHON=... selects the interpreter. ARGS=... is passed to the program.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ALONE  := $(VENV)/.gateway
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.documenting
PIP    := $(BIN)/python -m pip -q --disable-pip-version-check

# Without compiled files, each process that the tests start would compile the gateway again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run pipeline compile pure test-compiled wheel versions release-check image check test lint format docs docs-reference bench profile bench-pipeline kills story iceberg fuzz adversary simulate mutants chaos peers lock audit clean
.DELETE_ON_ERROR:

run: $(ALONE)
	@$(BIN)/python deploy/compile.py --check
	$(BIN)/gateway run $(ARGS)

# Compile the message path in place, which makes it about three times as fast; `make pure` deletes the extensions.
compile: $(STAMP)
	$(BIN)/python deploy/compile.py

pure: $(ALONE)
	$(BIN)/python deploy/compile.py --remove

# Install the dependencies of the data pipeline, about 600 MB: Spark, Arrow, pandas, clients of HDFS and PostgreSQL. Spark needs
# Java 17 or later.
pipeline: $(ALONE)
	sed '/^# The documentation/,$$d' requirements.lock | $(PIP) install --require-hashes -r /dev/stdin

# Compile the gateway, run the tests of the compiled modules, and delete the extensions if the tests pass.
test-compiled: compile
	$(BIN)/gateway version | grep -q ", compiled "
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/broker tests/containment tests/deploy/test_compiled.py \
	    tests/durable/test_order.py tests/durable/test_paused.py tests/ingress tests/mapping tests/model tests/protocols tests/store tests/transport $(ARGS)
	$(BIN)/python deploy/compile.py --remove

# Build a wheel for this interpreter and processor in dist/. The extensions stay in place, as after `make compile`.
wheel: $(STAMP)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(PIP) wheel --no-deps --no-build-isolation -w dist .

# Run the tests that need no other program, and build a compiled wheel, with each supported version of Python that is found:
# make versions ARGS="--no-wheel 3.13". PYTHONS=/path/to/python3.14 names interpreters that are not found.
versions: $(STAMP)
	$(BIN)/python -m tests.ship.versions $(ARGS)

# Run the steps of a release that need no account: versions, pages, archives, the tutorial, an upgrade. It downloads only locked
# packages from PyPI, changes nothing outside this checkout, and prints the remaining manual steps.
release-check: $(STAMP) docs versions
	git diff --exit-code
	rm -rf dist
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=0 $(BIN)/python -m hatchling build -t sdist -t wheel
	RELEASE_CHECK=1 $(BIN)/pytest -q tests/deploy/test_package.py tests/docs tests/ship/test_newcomer.py tests/ship/test_upgrade.py
	@echo "Left for a person, with the commands in docs/developing/releasing.md: the changelog and its date; make audit;"
	@echo "the image with the digest of its base, and its push; the tag; the upload of dist/ and of build/versions/*/dist/."

# Build the container image with buildah, run it, and publish a message through it: five minutes, as root. The image stays in build/image.
image: $(STAMP) peers
	GATEWAY_TEST_IMAGE=$(CURDIR)/build/image $(BIN)/pytest -q tests/ship/test_image.py $(ARGS)

# Run all tests, in four processes on two cores: most tests wait for programs that they have started.
test: lint peers
	$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# Check in a minute: lint, types, and the fast tests that need no other program and no running gateway.
check: lint
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not needs" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict gateway tests/adversary tests/benchmarks tests/blocking_clients tests/chaos tests/fuzz tests/mapping \
	    tests/model tests/mutation tests/simulation
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/codespell gateway docs tests deploy mappings changes *.md Makefile Dockerfile

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Build the documentation's site in build/docs; every warning is an error.
docs: docs-reference
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/docs

# Generate the reference pages of options, metrics and commands from the code.
docs-reference: $(DOCS)
	$(BIN)/python -m docs.generate

bench: $(STAMP) peers
	$(BIN)/python -m tests.benchmarks $(ARGS)

# Profile the processor time of one load: make profile SCENARIO=A
profile: $(STAMP) peers
	$(BIN)/python -m tests.benchmarks.profile $(or $(SCENARIO),A) $(ARGS)

# Measure rows per second of the data pipeline, on one core and on two.
bench-pipeline: $(STAMP) peers
	$(BIN)/python -m tests.pipeline.bench $(ARGS)

# Check that each row is written once although Spark is killed: make kills KILLS=50
kills: $(STAMP) peers
	KILLS=$(or $(KILLS),20) $(BIN)/pytest -q -s tests/pipeline/test_kills.py $(ARGS)

# Check that every job of the pipeline accounts for each message: make story MESSAGES=50000
story: $(STAMP) peers
	STORY_MESSAGES=$(or $(MESSAGES),500000) $(BIN)/pytest -q -s tests/pipeline/test_story.py $(ARGS)

# Test the pipeline's batches and both table formats with the newest Spark for which Iceberg exists, installed beside that of
# .venv: about 600 MB, once.
iceberg: $(STAMP)
	$(PYTHON) tests/clients/builds.py iceberg
	.peers/iceberg/environment/bin/python -m pytest -q -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning \
	    tests/pipeline/test_tables.py tests/pipeline/test_archive.py tests/pipeline/test_rates.py tests/pipeline/test_stores.py \
	    tests/pipeline/test_mistaken.py tests/pipeline/jobs tests/pipeline/source $(ARGS)

# Fuzz codecs, parsers and sockets: make fuzz FUZZ_COUNT=10000000 FUZZ_SEED=5
fuzz: $(STAMP)
	FUZZ_COUNT=$${FUZZ_COUNT:-3000000} $(BIN)/pytest -q tests/fuzz $(ARGS)

# Measure how much attacks slow down other clients, as a table: make adversary ARGS=work.filters
adversary: $(STAMP)
	$(BIN)/python -m tests.adversary $(ARGS)

# Simulate the whole gateway in virtual time: make simulate SECONDS=600; repeat one seed: make simulate SEED=7 ARGS=--trace
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(SECONDS),--seconds $(SECONDS),$(if $(SEED),,--seconds 600)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(STEPS),--steps $(STEPS)) $(if $(WITHOUT),--without $(WITHOUT)) $(ARGS)

# Change single lines of the packages that hold messages, and check that a test fails: make mutants COUNT=60 SEED=1
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation --count $(or $(COUNT),60) --seed $(or $(SEED),1) $(ARGS)

# Kill processes, cut connections and fill disks at random: make chaos SECONDS=600 SEED=7
chaos: $(STAMP) peers
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Check the replies of the shared database in longer histories than `make test` does: make histories OPERATIONS=100000
histories: $(STAMP) peers
	STATE_OPERATIONS=$(or $(OPERATIONS),100000) OWNERSHIP_OPERATIONS=$(or $(OPERATIONS),100000) \
	    $(BIN)/pytest -q -s tests/state/test_history.py tests/engine/test_ownership.py $(ARGS)

# Write requirements.lock: missing packages are added; ARGS=--upgrade selects the newest versions.
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip -q --disable-pip-version-check install uv
	$(PYTHON) deploy/lock.py --uv build/uv/bin/uv $(ARGS)

# Query PyPI's database for known vulnerabilities of all locked packages.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip -q --disable-pip-version-check install pip-audit
	build/audit/bin/pip-audit --require-hashes --disable-pip -r requirements.lock $(ARGS)

peers:
	@tests/interop/peers.sh
	@$(PYTHON) tests/clients/builds.py

# Installation for running the gateway only, without the dependencies of tests and data pipeline (about 600 MB).
$(ALONE): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than Python 3.11; say PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	    { test "$$(id -u)" = 0 && apt-get install -y python3-venv || \
	      { test "$$(id -u)" = 0 && apt-get update && apt-get install -y python3-venv; } || \
	      { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed '/^# Traces/,/^$$/d; /^# The journal in Parquet/,/^$$/d; /^# What compiles it/,$$d' requirements.lock | $(PIP) install --require-hashes -r /dev/stdin
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

# Installation for building the documentation only, without Spark.
$(DOCS): $(ALONE)
	sed '/^# The journal in Parquet/,/^$$/d; /^# The data pipeline/,/^# The documentation/d; /^# Tests/,$$d' requirements.lock | $(PIP) install --require-hashes -r /dev/stdin
	@touch $@

$(STAMP): $(ALONE)
	$(PIP) install --require-hashes -r requirements.lock
	@touch $@

clean:
	rm -rf $(VENV) .node .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
