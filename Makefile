# Every target sets up what it needs, under build/ in this checkout; a second run starts at once.
# Needed on the machine: Python 3.11+, a JDK 17+, make; for the JVM side and the tests Maven and openssl too.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BUILD := $(CURDIR)/build
VENV  := $(BUILD)/venv
PY    := $(VENV)/bin/python

# For the demo and chaos: how many kills, which seed (empty: drawn and printed), how many orders, anything else.
KILLS ?=
SEED ?=
ORDERS ?=
MINUTES ?=
SHIM ?=
STORE ?=
# For chaos and the crash sweep: which sinks, with commas between them.
SINK ?=
ARGS ?=
RUN_ARGS = $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Another Spark or another set of packages in the caller's shell must not leak in. Without compiled files each
# process of Python's compiles 437 modules of ours anew, and pytest rewrites every test's assertions.
unexport PYTHONDONTWRITEBYTECODE SPARK_HOME SPARK_CONF_DIR PYSPARK_SUBMIT_ARGS PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYSPARK_PYTHON := $(PY)
export PYSPARK_DRIVER_PYTHON := $(PY)
export SPARK_LOCAL_IP := 127.0.0.1

# Why tests of `make test` were skipped, a line for each.
SKIPPED := $(BUILD)/skipped.txt
export FLINKISH_SKIPPED := $(SKIPPED)

SHIM_SOURCES := jvm-shim/pom.xml $(shell find jvm-shim/src -type f 2>/dev/null)
STAGES := lint types unit system

.PHONY: help docs notebooks setup jars old-broker s3a hdfs flink registry shim demo test nightly $(STAGES) integration crash spark broker store azurite chaos soak crash-sweep simulate matrix bench bench-spark bench-recovery bench-latency bench-merge bench-peers-env bench-start bench-test bench-state bench-operators bench-regressions bench-flink bench-full wheel clean

help: ## this page
	@echo "flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming"
	@echo
	@echo "  Start here:  make demo    (the first run downloads about 600 MB into build/)"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-17s %s\n", $$1, $$2 }'
	@echo
	@echo "  Needed: Python 3.11+, a JDK 17+; for anything but demo, lint, types, unit and docs Maven too."
	@echo "  Nothing is written outside this directory."

setup: $(VENV)/.stamp jars shim ## virtual environment, JARs, the JVM side
	@echo "ready: $(VENV)"

jars: $(BUILD)/jars/.stamp $(BUILD)/broker-jars/.stamp old-broker s3a hdfs flink registry ## third-party JARs for Spark and the broker

shim: $(BUILD)/shim.stamp ## the JVM side, into flinkish_spark/jars/

# The job has no JAR of ours. Only Spark's checkpoints in a bucket or on HDFS need one.
demo: $(VENV)/.stamp $(BUILD)/broker-jars/.stamp $(if $(SHIM)$(filter s3 hdfs,$(STORE)),setup) ## a job killed 5 times, nothing lost, nothing twice   [KILLS=20 SEED=7 ORDERS=300000 SHIM=1 STORE=s3|hdfs]
	@$(PY) -m demo.run $(RUN_ARGS) $(if $(ORDERS),--orders $(ORDERS)) $(if $(SHIM),--shim) $(if $(STORE),--store $(STORE))

test: setup $(BUILD)/classes.jsa $(BUILD)/compiled.stamp ## everything CI runs: lint types unit system
	@started=$$SECONDS; rm -f $(SKIPPED); \
	for stage in $(STAGES); do \
	    echo "==== $$stage"; before=$$SECONDS; \
	    $(MAKE) $$stage || { echo "==== $$stage FAILED after $$((SECONDS - before)) s"; exit 1; }; \
	    echo "==== $$stage passed in $$((SECONDS - before)) s"; \
	done; \
	if [ -e $(SKIPPED) ]; then sort $(SKIPPED) | uniq -c; fi; \
	echo "==== all passed in $$((SECONDS - started)) s, $$(cat $(SKIPPED) 2>/dev/null | wc -l) tests skipped"

nightly: ## test, with the tests that are marked nightly, a soak of ten minutes, the docs, the bench's tests, and what has become slower
	@PYTEST_ADDOPTS="$(PYTEST_ADDOPTS) --nightly" $(MAKE) test
	@$(MAKE) soak MINUTES=10
	@$(MAKE) docs
	@$(MAKE) bench-test
	@$(MAKE) bench-regressions

# Pictures on the site are copies: cp build/notebooks/*.png docs/notebooks/
notebooks: setup ## the course in notebooks/, executed; with outputs in build/notebooks   [ARGS="-k patterns"]
	@$(PY) -m pytest --nightly --quiet --show-capture=no --durations=0 tests/integration/broker/test_notebooks.py $(ARGS)

docs: $(BUILD)/docs.stamp ## the documentation as a site, in build/site; a warning or a dead link fails
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "$(BUILD)/site/index.html"

lint: $(VENV)/.stamp ## ruff; import-linter: which floor may import which; words: names and docstrings
	@$(PY) -m ruff check .
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) -m tools.words

types: $(VENV)/.stamp ## mypy --strict on the package
	@$(PY) -m mypy

# As many processes as the smallest machine of ours has cores: these tests compute and seldom wait.
unit: $(VENV)/.stamp ## no JVM; statements and branches of protocol/ are covered
	@tools/require.sh openssl
	@COVERAGE_FILE=$(BUILD)/coverage $(PY) -m pytest --numprocesses=2 --dist=worksteal tests/unit $(ARGS) \
	    --cov=flinkish_spark.protocol --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

# Processes that share one broker and one database server of each kind (tests/support/services.py): one more than
# the smallest machine of ours has cores, since tests wait. Each has a Spark session and takes whole files
# (tests/support/run_order.py).
WORKERS ?= 3
POOL = $(PY) -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
INTEGRATION := $(addprefix tests/,integration/spark integration/broker integration/store contracts)
system: setup $(BUILD)/classes.jsa azurite ## integration and crash, side by side
	@$(POOL) $(INTEGRATION) tests/crash $(ARGS)

integration: setup $(BUILD)/classes.jsa azurite ## Spark sessions, a real Kafka broker, databases, buckets
	@$(POOL) $(INTEGRATION) $(ARGS)

spark broker store: setup $(BUILD)/classes.jsa azurite # of integration, the tests of one folder
	@$(POOL) tests/integration/$@ $(ARGS)

crash: setup $(BUILD)/classes.jsa ## kill -9 with exact counts; some kills are drawn  [SEED=7]
	@$(POOL) tests/crash $(ARGS)

chaos: setup $(BUILD)/classes.jsa ## the crash test for longer, resumable          [KILLS=200 SEED=7 SINK=all]
	@$(PY) -m tests.crash$(if $(SINK),.sweep).chaos $(if $(SINK),--sinks $(SINK)) $(RUN_ARGS)

soak: setup $(BUILD)/classes.jsa ## one job for long: a kill each minute, bounces, rewinds; exact, and nothing grows  [MINUTES=100 SEED=7]
	@$(PY) -m tests.crash.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

crash-sweep: setup $(BUILD)/classes.jsa ## a fault at every call of a checkpoint, resumable  [SINK=delta,files STORE=s3 ARGS=--fresh]
	@$(PY) -m tests.crash.sweep $(if $(SINK),--sinks $(SINK)) $(if $(STORE),--store $(STORE)) $(ARGS)

simulate: $(VENV)/.stamp ## the protocol against a seeded world of faults      [SEEDS=2000]
	@$(PY) -m tests.simulation --seeds $(or $(SEEDS),2000)

matrix: setup ## other versions of Spark, Python, pandas and the broker  [ARGS="--rows newest --lanes unit"]
	@$(PY) tools/matrix.py $(ARGS)

# Groups and variants are workloads of ours beside Spark's own ways: the target below.
bench: setup $(BUILD)/bench.stamp $(if $(filter --groups --variants,$(ARGS)),,bench-peers-env) ## Nexmark beside Flink and others, a quarter of an hour; or [ARGS="--groups cep"]
	@$(PY) -m $(if $(filter --groups --variants,$(ARGS)),bench.run,bench.nexmark.measure --daily --events 200000 --rounds 2) $(ARGS)

bench-spark: setup $(BUILD)/bench.stamp ## throughput beside Spark's own ways            [ARGS="--groups sum session"]
	@$(PY) -m bench.run $(ARGS)

bench-recovery: setup $(BUILD)/bench.stamp bench-peers-env ## kill -9 of each engine: how long until the next result, what is lost or there twice
	@$(PY) -m bench.nexmark.recovery $(ARGS)

bench-latency: setup $(BUILD)/bench.stamp ## from a record's arrival in Kafka to its result, by the interval of checkpoints
	@$(PY) -m bench.latency $(ARGS)

bench-merge: setup $(BUILD)/bench.stamp $(BUILD)/peers/deltars/.stamp ## the MERGE of an upsert beside one by hand and delta-rs
	@$(PY) -m bench.merge $(ARGS)

bench-start: setup $(BUILD)/bench.stamp ## from python app.py to the first checkpoint, beside plain Spark
	@$(PY) -m bench.start $(ARGS)

bench-state: setup $(BUILD)/bench.stamp ## a micro-batch beside thousands and millions of keys
	@$(PY) -m bench.big_state $(ARGS)

bench-operators: setup $(BUILD)/bench.stamp ## small micro-batches with 1, 2, 4 and 8 operators and sinks   [ARGS="--operators 4 --records 6000"]
	@$(PY) -m bench.operators $(ARGS)

bench-regressions: $(BUILD)/bench.stamp ## our own parts beside those of another commit    [ARGS="--base HEAD~5"]
	@$(PY) -m bench.regressions $(ARGS)

bench-test: $(BUILD)/bench.stamp ## tests of the bench itself; part of nightly
	@$(PY) -m pytest bench/tests $(ARGS)

bench-flink: $(BUILD)/flink-cluster-jars/.stamp ## the patterns of the bench in Flink, in this process   [ARGS="rises 2500000 10000 2"]
	@javac -d $(BUILD)/flink-classes -cp "$(BUILD)/flink-cluster-jars/*" bench/FlinkPatterns.java
	@java -Xmx3g -cp "$(BUILD)/flink-classes:$(BUILD)/flink-cluster-jars/*" FlinkPatterns $(ARGS)

bench-full: setup $(BUILD)/bench.stamp bench-peers-env ## all of it, up to ten million keys: for hours; goes on where it was ended
	@$(PY) -m bench.nexmark.measure --resume --rounds 5
	@$(PY) -m bench.nexmark.recovery --resume
	@$(PY) -m bench.latency
	@$(PY) -m bench.run --resume
	@$(PY) -m bench.big_state --keys 10000 100000 1000000 5000000 10000000

# Engines that are measured beside ours, each in an environment of its own: none of it is in build/venv.
PEER_pyflink := apache-flink==2.3.0
PEER_quix    := quixstreams==3.28.1
PEER_bytewax := bytewax[kafka]==0.21.1
PEER_deltars := deltalake[pyarrow]==1.6.6
PEERS := $(foreach peer,pyflink quix bytewax,$(BUILD)/peers/$(peer)/.stamp)
bench-peers-env: $(PEERS) $(BUILD)/flink-classes/FlinkSql.class ## the engines that `make bench` compares with

wheel: setup ## dist/*.whl, with the JVM side in it
	@rm -rf $(BUILD)/lib $(BUILD)/bdist.*
	@$(PY) -m build --wheel --outdir dist . > $(BUILD)/wheel.log 2>&1 || { tail -20 $(BUILD)/wheel.log; exit 1; }
	@ls dist/*.whl

clean: ## remove build/, dist/ and the built JAR
	rm -rf build dist flinkish_spark.egg-info jvm-shim/target flinkish_spark/jars/flinkish-spark-shim-*.jar
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis

# What the targets above stand on. A stamp is as new as the last time its inputs were taken in.

$(VENV)/.stamp: setup.cfg pyproject.toml
	@python=$$(tools/require.sh python) || exit 1; \
	$(PY) -m pip --version >/dev/null 2>&1 || \
	    { echo "making build/venv with $$python"; "$$python" -m venv --clear $(VENV); }
	@echo "installing Python packages into build/venv"
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[test,pinned,notebooks]' || \
	    { echo "flinkish_spark: pip could not install the packages: check the network (or pip's proxy)" >&2; exit 1; }
	@touch $@

$(BUILD)/bench.stamp: bench/requirements.txt | $(VENV)/.stamp
	@$(PY) -m pip install --quiet --disable-pip-version-check -r bench/requirements.txt
	@touch $@

$(BUILD)/peers/%/.stamp: Makefile | $(VENV)/.stamp
	@echo "installing $(PEER_$*) into build/peers/$*"
	@$(PY) -m venv $(BUILD)/peers/$*
	@$(BUILD)/peers/$*/bin/python -m pip install --quiet --disable-pip-version-check '$(PEER_$*)'
	@touch $@

$(BUILD)/flink-classes/FlinkSql.class: bench/nexmark/FlinkSql.java $(BUILD)/flink-cluster-jars/.stamp
	@javac -nowarn -d $(BUILD)/flink-classes -cp "$(BUILD)/flink-cluster-jars/*" $<

$(BUILD)/docs.stamp: setup.cfg | $(VENV)/.stamp
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

ROLE_OF_broker-jars := broker
ROLE_OF_broker-3.9-jars := broker-3.9
ROLE_OF_s3a-jars := s3a
ROLE_OF_hdfs-jars := hdfs
ROLE_OF_flink-jars := flink
ROLE_OF_flink-cluster-jars := flink-cluster
$(BUILD)/%/.stamp: flinkish_spark/jars/pinned.txt tools/resolve_jars.py | $(VENV)/.stamp
	@tools/require.sh java
	@echo "fetching JARs into build/$*"
	@$(PY) tools/resolve_jars.py $(or $(ROLE_OF_$*),spark) $(BUILD)/$*
	@touch $@

# Hadoop's S3A, in which Spark keeps its checkpoint in buckets. Without it its tests are skipped, and counted.
s3a: $(VENV)/.stamp
	@$(MAKE) $(BUILD)/s3a-jars/.stamp || echo "no S3A: the tests of jobs in a bucket are skipped"

# Kafka 3.9, to be upgraded from. Without it its tests are skipped, and counted.
old-broker: $(VENV)/.stamp
	@$(MAKE) $(BUILD)/broker-3.9-jars/.stamp || echo "no Kafka 3.9: the tests of upgrades are skipped"

# HDFS and YARN in one JVM. Without it their tests are skipped, and counted.
hdfs: $(VENV)/.stamp
	@$(MAKE) $(BUILD)/hdfs-jars/.stamp || echo "no HDFS: the tests of jobs on it are skipped"

# Flink's own pattern matcher. Without it the tests that compare ours with it are skipped, and counted.
flink: $(VENV)/.stamp
	@$(MAKE) $(BUILD)/flink-jars/.stamp || echo "no Flink: our pattern matcher is not compared with its own"

# A schema registry with the REST API of Confluent's; 3.x needs Java 21. Without it its tests are skipped, and counted.
REGISTRY := io.apicurio:apicurio-registry-app:2.6.13.Final
registry:
	@if [ -e $(BUILD)/registry/$(REGISTRY) ]; then exit 0; fi; \
	tools/require.sh maven; mkdir -p $(BUILD)/registry; echo "fetching a schema registry into build/registry"; \
	cd $(BUILD)/registry; : the plugin leaves its markers in a folder of the current one, whatever it is told; \
	mvn -q -B -Dmaven.repo.local=$(BUILD)/m2 org.apache.maven.plugins:maven-dependency-plugin:3.6.1:unpack \
	    -Dartifact=$(REGISTRY):tar.gz:all -DoutputDirectory=$(BUILD)/registry \
	    </dev/null > $(BUILD)/registry/maven.log 2>&1 && touch $(BUILD)/registry/$(REGISTRY) || \
	    echo "no schema registry (build/registry/maven.log): the tests that ask one are skipped"

# A server of Azure's blobs. Without npm its tests are skipped, and counted as such.
AZURITE := azurite@3.37.0
azurite:
	@if [ -e $(BUILD)/azurite/$(AZURITE) ]; then exit 0; fi; \
	command -v npm >/dev/null || { echo "no npm: the tests of Azure's store are skipped"; exit 0; }; \
	echo "installing $(AZURITE) into build/azurite"; mkdir -p $(BUILD)/azurite; \
	npm install --prefix $(BUILD)/azurite --silent --no-audit --no-fund --ignore-scripts $(AZURITE) \
	    </dev/null > $(BUILD)/azurite/npm.log 2>&1 && touch $(BUILD)/azurite/$(AZURITE) || \
	    echo "npm could not install it (build/azurite/npm.log): the tests of Azure's store are skipped"

$(BUILD)/classes.jsa: tests/support/archive_classes.py $(BUILD)/jars/.stamp $(BUILD)/broker-jars/.stamp $(BUILD)/shim.stamp
	@echo "archiving the classes of a job and of a broker"
	@$(PY) -m tests.support.archive_classes $@ $(BUILD)/broker.jsa
	@touch $@

# Once, and not by each process of each pool at the same time; what changes later is compiled when it is imported.
$(BUILD)/compiled.stamp: | $(VENV)/.stamp
	@echo "compiling the package and its tests"
	@$(PY) -m compileall -q flinkish_spark demo tests
	@$(PY) -m pytest --collect-only -qq tests > $(BUILD)/compiled.log || { tail -20 $(BUILD)/compiled.log >&2; exit 1; }
	@touch $@

$(BUILD)/shim.stamp: $(SHIM_SOURCES) $(if $(wildcard flinkish_spark/jars/flinkish-spark-shim-*.jar),,FORCE)
	@tools/require.sh java
	@tools/require.sh maven
	@mkdir -p $(BUILD)
	@echo "building the JVM side"
	@mvn -q -B -Dmaven.repo.local=$(BUILD)/m2 -f jvm-shim/pom.xml package </dev/null || \
	    { echo "flinkish_spark: the JVM side did not build; Maven's reason is above" >&2; exit 1; }
	@rm -f flinkish_spark/jars/flinkish-spark-shim-*.jar
	@cp jvm-shim/target/flinkish-spark-shim-*.jar flinkish_spark/jars/
	@touch $@

.PHONY: FORCE
FORCE:
