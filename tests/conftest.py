"""What all tests share. A test's directory is its marker: tests/spark/* is marked `spark`, and so on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from tests import effort
from tests.jvm_flags import JVM_FLAGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.testing.broker import LocalBroker

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"

# Before anything can start a JVM. Spark's Python workers must be this interpreter (another one has no
# pyarrow), must find the tests' own functions, and must not be given another Spark.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# JVMs of tests live for seconds or minutes: what the second compiler makes of their code comes too late,
# and its threads take the two cores that jobs and brokers want.
os.environ["JAVA_TOOL_OPTIONS"] = JVM_FLAGS
# What a driver's JVM loads comes from an archive (`make spark` makes it); a JVM that cannot use it goes on.
if (BUILD / "classes.jsa").exists():
    archived = f"-XX:SharedArchiveFile={BUILD / 'classes.jsa'}"
    os.environ["SPARK_SUBMIT_OPTS"] = f"{archived} -Xlog:cds=off -Xlog:cds+dynamic=off"
for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"):
    os.environ.pop(name, None)

TopicFactory = Callable[..., str]

_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--jvm",
        choices=("with", "without"),
        help="only tests with a Spark session, or only those without; for running both at the same time",
    )
    parser.addoption("--nightly", action="store_true", help="also the tests that `make test` leaves out")


# First: tests/unit/conftest.py asks for it, too.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    effort.is_night = config.getoption("--nightly")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--jvm")
    if wanted is not None:
        chosen = [item for item in items if _starts_spark(item) is (wanted == "with")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if not config.getoption("--nightly"):
        chosen = [item for item in items if item.get_closest_marker("nightly") is None]
        config.stash[_LEFT_OUT] = len(items) - len(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    for item in items:
        kind = item.path.relative_to(ROOT / "tests").parts[0]
        item.add_marker(kind)
        heavy = {"spark", "broker"} & set(getattr(item, "fixturenames", ()))
        if kind == "unit" and heavy:
            raise pytest.UsageError(f"{item.nodeid} uses {', '.join(heavy)}: tests/unit runs without a JVM")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist has left out; each of them sees all tests."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(f"{left_out} nightly tests left out: `make nightly`, or pytest --nightly")


def _starts_spark(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return "spark" in getattr(item, "fixturenames", ()) or getattr(module, "STARTS_SPARK", False)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests; `local[2,4]`, because `local[2]` does not retry tasks."""
    from pyspark.sql import SparkSession

    from flinkish_spark.session import configure_spark_with_jars

    scratch = _scratch("test-spark-")
    builder = SparkSession.builder.master("local[2,4]").appName("tests")
    builder = builder.config(map={**spark_test_conf(scratch)})
    session = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    shutil.rmtree(scratch, ignore_errors=True)


def spark_test_conf(scratch: Path) -> dict[str, str]:
    """Settings of every Spark session that a test starts, in this process or another."""
    return {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "2g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.databricks.delta.snapshotPartitions": "1",
        # VACUUM lists a table's folders in as many tasks as this says, 10,000 by default: a minute.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    }


@pytest.fixture(scope="session")
def broker() -> Iterator[LocalBroker]:
    """One broker for all tests. Whoever kills or pauses a broker takes one of its own."""
    from flinkish_spark.testing.broker import LocalBroker

    scratch = _scratch("test-broker-")
    # Records with old timestamps must not go while a test looks at them.
    forever = {"log.retention.ms": "-1"}
    with LocalBroker(scratch, jars_dir=BUILD / "broker-jars", extra_properties=forever) as running:
        yield running
    shutil.rmtree(scratch, ignore_errors=True)


@pytest.fixture
def topic(broker: LocalBroker) -> TopicFactory:
    """Call it for the name of a new topic: ``topic(partitions=3)``."""
    from kafka.admin import KafkaAdminClient

    def create(partitions: int = 1, configs: Mapping[str, str] = MappingProxyType({})) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        options = {"num_partitions": partitions, "replication_factor": 1, "configs": dict(configs)}
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
        try:
            admin.create_topics({name: options}, wait_for_metadata=True)
        finally:
            admin.close()
        return name

    return create


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """Where a job may keep its checkpoints; not made yet, as for a job that starts for the first time."""
    return tmp_path / "job"


def _scratch(prefix: str) -> Path:
    BUILD.mkdir(exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=BUILD))
