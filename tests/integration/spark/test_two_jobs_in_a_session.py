"""Two jobs of one session: each under the settings that it needs, and the session as its user has it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from flinkish_spark import MemorySink, StreamExecutionEnvironment
from tests.support.jobs import TOTAL, RunningTotal, await_that, environment, rows

ADAPTIVE, RETAINED = "spark.sql.adaptive.enabled", "spark.sql.streaming.minBatchesToRetain"
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"


def job(spark: Any, root: Path) -> StreamExecutionEnvironment:
    env = environment(spark, root / "job", trigger_interval_ms=100)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()
    orders = rate.selectExpr("CAST(value % 3 AS STRING) AS user", "value AS amount")
    totals = env.from_dataframe(orders, uid="rate").key_by("user")
    totals.process(RunningTotal(), output=TOTAL, uid="totals").sink_to(MemorySink(str(root)), uid="out")
    return env


def settings(spark: Any) -> dict[str, str]:
    """All settings of a session but those that Delta itself leaves in every session that meets a table."""
    return {name: value for name, value in spark.conf.getAll.items() if ".parquet.fieldId." not in name}


def test_two_jobs_with_one_name_start_at_once_and_the_session_is_as_it_was(spark: Any, tmp_path: Any) -> None:
    spark.conf.set(ADAPTIVE, "true")
    spark.conf.set(RETAINED, "77")
    before = settings(spark)
    jobs = [job(spark, tmp_path / name) for name in "ab"]
    over, seen = threading.Event(), set()

    def look() -> None:
        while not over.is_set():
            seen.update({name: spark.conf.get(name, None) for name in before}.items() - before.items())
            time.sleep(0.02)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        clients = [env.execute_async() for env in jobs]
        for client in clients:
            await_that(lambda client=client: rows(client, "out") >= 10, client)
        queries = {query.name: query for query in spark.streams.active}
        first, second = sorted(queries)
        assert (first, second.startswith("orders (")) == ("orders", True)
        for query in queries.values():
            conf = query._jsq.streamingQuery().sparkSessionForStream().conf()
            found = [conf.get(name) for name in (PROVIDER, FORMAT, RETAINED, ADAPTIVE)]
            assert (found[0].rpartition(".")[2], found[1:]) == (
                "RocksDBStateStoreProvider",
                ["2", "200", "false"],
            )
        assert settings(spark) == before
        # A query of the user's own that starts now.
        plan = spark.range(9).groupBy("id").count()._jdf.queryExecution().executedPlan().toString()
        assert "AdaptiveSparkPlan" in plan
        for client in clients:
            client.stop_with_checkpoint()
        for client in clients:
            assert client.wait(timeout_ms=120_000)
            assert client.progress.restarts == 0
        assert settings(spark) == before
    finally:
        over.set()
        looking.join()
        for name in (ADAPTIVE, RETAINED):
            spark.conf.unset(name)
    # Only for the moment of a start, and nothing but what a query needs.
    assert {name for name, _ in seen} <= {
        ADAPTIVE,
        RETAINED,
        PROVIDER,
        FORMAT,
        "spark.sql.inMemoryColumnarStorage.compressed",
    }
