"""What all tests share. A test's folder is its marker: tests/integration/spark/* is marked `spark`."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import effort, run_order
from tests.support.buckets import S3A_CONF, SECRETS
from tests.support.fork_server import interpreter
from tests.support.jvm_flags import JVM_FLAGS
from tests.support.services import BUILD, ROOT, Services, ask, end_with_the_run, scratch, topics_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.testing.broker import LocalBroker

# Before anything can start a JVM. Spark's Python workers must be this interpreter (another one has no
# pyarrow), must find the tests' own functions, and must not be given another Spark.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "quick_imports")])
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
# JVMs of tests live for seconds or minutes: what the second compiler makes of their code comes too late,
# and its threads take the two cores that jobs and brokers want.
os.environ["JAVA_TOOL_OPTIONS"] = JVM_FLAGS
# What a driver's JVM and a broker's load comes from archives (the Makefile makes them); a JVM that cannot use
# its one goes on. A driver's is on its command line, which counts for more.
ARCHIVE = "-XX:SharedArchiveFile={} -Xlog:cds=off -Xlog:cds+dynamic=off"
if (BUILD / "broker.jsa").exists():
    os.environ["JAVA_TOOL_OPTIONS"] += " " + ARCHIVE.format(BUILD / "broker.jsa")
if (BUILD / "classes.jsa").exists():
    os.environ["SPARK_SUBMIT_OPTS"] = ARCHIVE.format(BUILD / "classes.jsa")
for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"):
    os.environ.pop(name, None)
# Each process that a test starts would compile all of this package anew: a second or two.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TopicFactory = Callable[..., str]

_NO_CODEGEN = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}

_LEFT_OUT = pytest.StashKey[int]()
_SERVICES = pytest.StashKey[Services]()


# First: tests/unit/conftest.py asks whether it is night, too.
@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    effort.is_night = config.getoption("--nightly")
    # Processes of pytest-xdist use the servers of the one that started them.
    if not hasattr(config, "workerinput"):
        config.stash[_SERVICES] = Services()
        if config.getoption("--write-costs"):
            config.pluginmanager.register(run_order.Measured(config.rootpath))
    else:
        end_with_the_run()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["services"] = node.config.stash[_SERVICES].address


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # Each of them has collected all.
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    services = config.stash.get(_SERVICES, None)
    if services is not None:
        services.close()


@pytest.fixture(scope="session")
def service(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Call it for a server that the whole run shares: ``service("postgres")``."""
    services = request.config.stash.get(_SERVICES, None)
    if services is not None:
        return services.get
    return partial(ask, request.config.workerinput["services"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also the tests that `make test` leaves out")
    parser.addoption(
        "--write-costs", action="store_true", help=f"keep how long each file took in {run_order.FILE.name}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        chosen = [item for item in items if item.get_closest_marker("nightly") is None]
        config.stash[_LEFT_OUT] = len(items) - len(chosen)
        if hasattr(config, "workeroutput"):
            config.workeroutput["left_out"] = len(items) - len(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    for item in items:
        kind = next(part for part in item.path.relative_to(ROOT / "tests").parts if part != "integration")
        item.add_marker(kind)
        heavy = {"spark", "broker"} & set(getattr(item, "fixturenames", ()))
        if kind == "unit" and heavy:
            raise pytest.UsageError(f"{item.nodeid} uses {', '.join(heavy)}: tests/unit runs without a JVM")
    if hasattr(config, "workerinput"):
        run_order.longest_first(items)


def pytest_collection_finish() -> None:
    # Thousands of tests and what they import stay until the end: no collection need look at them again.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [str(one.longrepr[2]) for one in terminalreporter.stats.get("skipped", ())]
    counted = os.environ.get("FLINKISH_SKIPPED")
    if skipped and counted:
        with Path(counted).open("a", encoding="utf-8") as file:
            file.writelines(f"{why}\n" for why in skipped)
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        terminalreporter.write_line(f"{left_out} nightly tests left out: `make nightly`, or pytest --nightly")


@pytest.fixture(scope="session")
def python_of_workers() -> Iterator[str]:
    """The interpreter for Spark's Python processes; see tests/support/fork_server.py."""
    with scratch("test-forks-") as folder, interpreter(folder) as program:
        yield program


@pytest.fixture(scope="session")
def spark(python_of_workers: str) -> Iterator[SparkSession]:
    """One session for all tests; `local[2,4]`, because `local[2]` does not retry tasks."""
    from pyspark.sql import SparkSession

    from flinkish_spark.bridge.session import configure_spark_with_jars

    with scratch("test-spark-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", python_of_workers)
        # Python in tasks has the environment with which the session was started.
        os.environ.update(SECRETS)
        builder = SparkSession.builder.master("local[2,4]").appName("tests")
        builder = builder.config(map={**spark_test_conf(folder)})
        s3a = sorted((BUILD / "s3a-jars").glob("*.jar"))
        session = configure_spark_with_jars(builder, BUILD / "jars", extra_jars=s3a).getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        patch.undo()
        yield session
        session.stop()


def spark_test_conf(folder: Path) -> dict[str, str]:
    """Settings of every Spark session that a test starts, in this process or another."""
    return {
        "spark.ui.enabled": "false",
        **S3A_CONF,
        "spark.driver.memory": "2g",
        # What a query makes and forgets dies young; from the start, or each full heap is looked at first.
        "spark.driver.extraJavaOptions": "-Xms1g -Xmn640m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.databricks.delta.snapshotPartitions": "1",
        # By day: most jobs of tests end before generated code has paid for its compilation.
        **({} if effort.is_night else _NO_CODEGEN),
        # VACUUM lists a table's folders in as many tasks as this says, 10,000 by default: a minute.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",
    }


@pytest.fixture(scope="session")
def broker(service: Callable[[str], Any]) -> LocalBroker:
    """One broker for all tests. Whoever kills or pauses a broker takes one of its own."""
    found: LocalBroker = service("broker")
    return found


@pytest.fixture
def registry(service: Callable[[str], Any]) -> Any:
    """The schema registry that all tests share."""
    from tests.support.registry import LocalRegistry

    why_not = LocalRegistry.why_not(BUILD / "registry")
    if why_not:
        pytest.skip(why_not)
    return service("registry")


@pytest.fixture(scope="session")
def topic(broker: LocalBroker) -> TopicFactory:
    """Call it for the name of a new topic: ``topic(partitions=3)``."""
    return topics_of(broker)


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    """Where a job may keep its checkpoints; not made yet, as for a job that starts for the first time."""
    return tmp_path / "job"
