# Everything that a fresh clone needs: `make run` starts the gateway, `make test` checks it.
# Needs Python 3.11 or later; PYTHON=... chooses which. ARGS=... is handed on to the program.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ALONE  := $(VENV)/.gateway
STAMP  := $(VENV)/.installed
DOCS   := $(VENV)/.documenting
PIP    := $(BIN)/python -m pip -q --disable-pip-version-check

# Where compiled files are not written, each process that the tests start compiles the gateway again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run pipeline compile pure test-compiled wheel versions release-check image check test lint format docs docs-reference bench profile bench-pipeline kills story iceberg fuzz adversary simulate mutants chaos peers lock audit clean
.DELETE_ON_ERROR:

run: $(ALONE)
	@$(BIN)/python deploy/compile.py --check
	$(BIN)/gateway run $(ARGS)

# The way of a message compiled in place, some three times as fast; `make pure` takes it away again.
compile: $(STAMP)
	$(BIN)/python deploy/compile.py

pure: $(ALONE)
	$(BIN)/python deploy/compile.py --remove

# What the data pipeline needs, some 600 MB: Spark, Arrow, pandas, clients of HDFS and PostgreSQL. Spark needs Java 17 or later.
pipeline: $(ALONE)
	sed '/^# The documentation/,$$d' requirements.lock | $(PIP) install --require-hashes -r /dev/stdin

# The tests of what is compiled, when it is; nothing compiled is left when they pass.
test-compiled: compile
	$(BIN)/gateway version | grep -q ", compiled "
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/broker tests/containment tests/deploy/test_compiled.py \
	    tests/durable/test_order.py tests/durable/test_paused.py tests/ingress tests/mapping tests/model tests/protocols tests/store tests/transport $(ARGS)
	$(BIN)/python deploy/compile.py --remove

# For this interpreter and processor, in dist/. What was compiled stays in place, as after `make compile`.
wheel: $(STAMP)
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(PIP) wheel --no-deps --no-build-isolation -w dist .

# The tests that need no other program, and a compiled wheel, with every supported version of Python that is found:
# make versions ARGS="--no-wheel 3.13". PYTHONS=/path/to/python3.14 names interpreters that are not found.
versions: $(STAMP)
	$(BIN)/python -m tests.ship.versions $(ARGS)

# The steps of a release that need no account: versions, pages, archives, a newcomer's way, an upgrade. Downloads locked packages from PyPI only, changes
# nothing outside this checkout, and prints what a person has to do after it.
release-check: $(STAMP) docs versions
	git diff --exit-code
	rm -rf dist
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=0 $(BIN)/python -m hatchling build -t sdist -t wheel
	RELEASE_CHECK=1 $(BIN)/pytest -q tests/deploy/test_package.py tests/docs tests/ship/test_newcomer.py tests/ship/test_upgrade.py
	@echo "Left for a person, with the commands in docs/developing/releasing.md: the changelog and its date; make audit;"
	@echo "the image with the digest of its base, and its push; the tag; the upload of dist/ and of build/versions/*/dist/."

# Builds the container image with buildah, runs it, and publishes a message through it: five minutes, as root. The image stays in build/image.
image: $(STAMP) peers
	GATEWAY_TEST_IMAGE=$(CURDIR)/build/image $(BIN)/pytest -q tests/ship/test_image.py $(ARGS)

# Four processes share the tests on two cores: most tests wait for programs that they have started.
test: lint peers
	$(BIN)/pytest -q -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# What can be known in a minute: lint, types, and the tests that need no program, process, gateway or patience.
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

# The pages as a site in build/docs; every warning is an error.
docs: docs-reference
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/docs

# What the pages say of options, metrics and commands, out of the code.
docs-reference: $(DOCS)
	$(BIN)/python -m docs.generate

bench: $(STAMP) peers
	$(BIN)/python -m tests.benchmarks $(ARGS)

# Where processor time goes under one load: make profile SCENARIO=A
profile: $(STAMP) peers
	$(BIN)/python -m tests.benchmarks.profile $(or $(SCENARIO),A) $(ARGS)

# Rows per second of the data pipeline, on one core and on two.
bench-pipeline: $(STAMP) peers
	$(BIN)/python -m tests.pipeline.bench $(ARGS)

# Every row once, however often Spark is killed: make kills KILLS=50
kills: $(STAMP) peers
	KILLS=$(or $(KILLS),20) $(BIN)/pytest -q -s tests/pipeline/test_kills.py $(ARGS)

# Each of half a million messages is accounted for by every job: make story MESSAGES=50000
story: $(STAMP) peers
	STORY_MESSAGES=$(or $(MESSAGES),500000) $(BIN)/pytest -q -s tests/pipeline/test_story.py $(ARGS)

# Batches of the pipeline, and both kinds of tables, with the newest Spark that has Iceberg, beside the one that .venv has:
# some 600 MB, once.
iceberg: $(STAMP)
	$(PYTHON) tests/clients/builds.py iceberg
	.peers/iceberg/environment/bin/python -m pytest -q -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning \
	    tests/pipeline/test_tables.py tests/pipeline/test_archive.py tests/pipeline/test_rates.py tests/pipeline/test_stores.py \
	    tests/pipeline/test_mistaken.py tests/pipeline/jobs tests/pipeline/source $(ARGS)

# Codecs, languages and sockets: make fuzz FUZZ_COUNT=10000000 FUZZ_SEED=5
fuzz: $(STAMP)
	FUZZ_COUNT=$${FUZZ_COUNT:-3000000} $(BIN)/pytest -q tests/fuzz $(ARGS)

# What attacks cost others, as a table: make adversary ARGS=work.filters
adversary: $(STAMP)
	$(BIN)/python -m tests.adversary $(ARGS)

# The whole gateway by virtual time: make simulate SECONDS=600; one seed again: make simulate SEED=7 ARGS=--trace
simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(if $(SECONDS),--seconds $(SECONDS),$(if $(SEED),,--seconds 600)) $(if $(SEED),--seed $(SEED)) \
	    $(if $(STEPS),--steps $(STEPS)) $(if $(WITHOUT),--without $(WITHOUT)) $(ARGS)

# One changed line in the rooms that hold messages, and whether a test sees it: make mutants COUNT=60 SEED=1
mutants: $(STAMP)
	$(BIN)/python -m tests.mutation --count $(or $(COUNT),60) --seed $(or $(SEED),1) $(ARGS)

# Kill, cut and fill up what there is, for so many seconds: make chaos SECONDS=600 SEED=7
chaos: $(STAMP) peers
	$(BIN)/python -m tests.chaos --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(ARGS)

# What replicas were told of their state, over longer histories than `make test` has: make histories OPERATIONS=100000
histories: $(STAMP) peers
	STATE_OPERATIONS=$(or $(OPERATIONS),100000) OWNERSHIP_OPERATIONS=$(or $(OPERATIONS),100000) \
	    $(BIN)/pytest -q -s tests/state/test_history.py tests/engine/test_ownership.py $(ARGS)

# Write requirements.lock: what is missing is added, ARGS=--upgrade takes the newest versions.
lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip -q --disable-pip-version-check install uv
	$(PYTHON) deploy/lock.py --uv build/uv/bin/uv $(ARGS)

# Look up known vulnerabilities of everything that is locked, in the database of PyPI.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip -q --disable-pip-version-check install pip-audit
	build/audit/bin/pip-audit --require-hashes --disable-pip -r requirements.lock $(ARGS)

peers:
	@tests/interop/peers.sh
	@$(PYTHON) tests/clients/builds.py

# Who only runs the gateway is spared what the tests and the data pipeline need, some 600 MB.
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

# Who only builds the pages is spared Spark.
$(DOCS): $(ALONE)
	sed '/^# The journal in Parquet/,/^$$/d; /^# The data pipeline/,/^# The documentation/d; /^# Tests/,$$d' requirements.lock | $(PIP) install --require-hashes -r /dev/stdin
	@touch $@

$(STAMP): $(ALONE)
	$(PIP) install --require-hashes -r requirements.lock
	@touch $@

clean:
	rm -rf $(VENV) .node .peers .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
