"""A job one of whose processes runs out of memory, or is killed; it says what the job made of that."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from flinkish_spark import CheckpointConfig, FixedDelay, MemorySink, StreamExecutionEnvironment
from flinkish_spark.bridge.session import configure_spark_with_jars
from flinkish_spark.core.errors import FlinkishError, NoProgressError
from tests.conftest import spark_test_conf
from tests.support.services import BUILD

ORDER = "user STRING, amount LONG"


def hungry(order: Any) -> Any:
    """Take memory until there is none, far more than the limit."""
    taken = [bytearray(1 << 26) for _ in range(256)]
    return order.user, order.amount + len(taken)


def large(frame: DataFrame) -> DataFrame:
    """Make one value that no heap here holds."""
    numbers = F.expr("sequence(0, 150000000 + amount)")
    return frame.withColumn("amount", F.size(F.reverse(numbers)).cast("long"))


def slow(order: Any) -> Any:
    time.sleep(60)
    return order.user, order.amount


def _kill(what: str) -> None:
    """Kill the JVM of the driver once, or each executor a while after it was started."""
    jvm: Any = getattr(SparkContext._gateway, "proc", None)
    if what == "killed driver":
        time.sleep(15)
        jvm.kill()
        return
    seen: set[int] = set()
    # As many as a task of Spark's may lose: the job is restarted once, and finishes.
    while jvm.poll() is None and len(seen) < 4:
        for one in psutil.Process(jvm.pid).children(recursive=True):
            line = one.as_dict(["cmdline"])["cmdline"] or ()
            if one.pid not in seen and any("CoarseGrainedExecutorBackend" in word for word in line):
                seen.add(one.pid)
                # A task has begun by then.
                time.sleep(15)
                one.kill()
        time.sleep(0.5)


def main(folder: Path, master: str, where: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        conf = {
            **spark_test_conf(Path(scratch)),
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": "",
        }
        if where == "worker":
            conf["spark.executor.pyspark.memory"] = "2g"
        builder = SparkSession.builder.master(master).config(map=conf)
        spark = configure_spark_with_jars(builder, BUILD / "jars").getOrCreate()
        env = StreamExecutionEnvironment(
            spark,
            "hungry",
            str(folder / "job"),
            checkpoint=CheckpointConfig(interval_ms=500),
            restart_strategy=FixedDelay(attempts=5, delay_ms=100),
        )
        orders = env.from_collection([("ann", 1)], ORDER, uid="orders")
        if where == "worker":
            orders = orders.map(hungry, output=ORDER)
        elif where == "executor":
            orders = orders.transform(large)
        else:
            orders = orders.map(slow, output=ORDER)
            threading.Thread(target=_kill, args=(where,), daemon=True).start()
        orders.sink_to(MemorySink("hungry"), uid="out")
        client = env.execute_async()
        try:
            client.wait(timeout_ms=400_000)
        except FlinkishError as error:
            first: Any = error.__cause__ if isinstance(error, NoProgressError) else error
            print(f"@error={type(first).__name__}")
            print(f"@process={getattr(getattr(first, 'process', None), 'value', None)}")
            print(f"@exit_code={getattr(first, 'exit_code', '')}")
            print(f"@message={error!s}".replace("\n", " "))
            print(f"@restarts={client.progress.restarts}", flush=True)
        else:
            print(f"@status={client.status.value}")
            print(f"@message={client.progress.last_error}".replace("\n", " "))
            print(f"@restarts={client.progress.restarts}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
