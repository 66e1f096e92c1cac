"""Bad settings are refused before anything starts: what, why, what to do, and no trace left behind."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from pathlib import Path

import pytest
from pyspark.sql import functions as F

from flinkish_spark import (
    AggregateColumn,
    CheckpointConfig,
    DeltaSink,
    Fold,
    KafkaSink,
    KeyedProcessFunction,
    MemorySink,
)
from flinkish_spark.core.errors import (
    BrokerUnavailableError,
    ConfigError,
    FlinkishError,
    GraphError,
    JobDirError,
    SchemaError,
    UserError,
    UserFunctionError,
)
from flinkish_spark.protocol.envelope import FORMAT, seal, unseal
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    environment,
    failure_of,
    orders_source,
    read_delta,
    rows,
    running,
)

#: Port 9 (discard) is closed here, and no test may take it.
NO_BROKER = "127.0.0.1:9"


class HoldsALock(KeyedProcessFunction):
    def __init__(self):
        self.lock = threading.Lock()

    def process_element(self, value, ctx):
        return ()


class HoldsASession(KeyedProcessFunction):
    def __init__(self, spark):
        self.spark = spark

    def process_element(self, value, ctx):
        return ()


def ticks(spark):
    """Orders without a broker: a generator of Spark's that replays."""
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    return rate.selectExpr("concat('u', value % 3) AS user", "value AS amount")


def totals_job(spark, job_dir, table, *, uids=("ticks", "totals", "table"), max_parallelism=None, **settings):
    env = environment(spark, job_dir, **settings)
    keyed = env.from_dataframe(ticks(spark), uid=uids[0]).key_by("user")
    totals = keyed.process(RunningTotal(), output=TOTAL, uid=uids[1], max_parallelism=max_parallelism)
    totals.sink_to(DeltaSink(str(table)), uid=uids[2])
    return env


def assert_refused(env, kind, job_dir: Path, *parts: str) -> FlinkishError:
    """Run the job: it must fail with one typed error that says all three things, and leave no trace."""
    error = failure_of(env)
    assert type(error) is kind, repr(error)
    assert all(part in str(error) for part in parts), str(error)
    assert error.what and error.why and error.what_to_do, str(error)
    assert not job_dir.exists(), sorted(job_dir.iterdir())
    return error


@pytest.mark.parametrize("setting", ["interval_ms", "timeout_ms", "restart_budget_ms", "retained"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10"])
def test_a_checkpoint_setting_that_is_not_positive(setting, value) -> None:
    is_text = value == "10" and setting != "retained"
    advice = "give milliseconds, or a length of" if is_text else "give CheckpointConfig such a value"
    with pytest.raises(ConfigError, match=rf"{setting} is .*To do: {advice}"):
        CheckpointConfig(**{setting: value})


@pytest.mark.parametrize("value", [0, -1])
def test_other_times_that_are_not_positive(spark, job_dir, value) -> None:
    with pytest.raises(ConfigError, match="transaction_timeout_ms"):
        KafkaSink(NO_BROKER, "out", transaction_timeout_ms=value)
    with pytest.raises(ConfigError, match="min_pause_ms"):
        CheckpointConfig(min_pause_ms=-1)
    with pytest.raises(ConfigError, match="trigger_interval_ms"):
        environment(spark, job_dir, trigger_interval_ms=-1)


def test_a_broker_that_is_down(spark, job_dir, tmp_path, caplog) -> None:
    """One message in time, not a stack of retries, and no log full of refused connections."""
    env = environment(spark, job_dir)
    env.from_source(orders_source(NO_BROKER, "orders"), uid="orders").sink_to(
        DeltaSink(str(tmp_path / "table")), uid="table"
    )
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        error = assert_refused(env, BrokerUnavailableError, job_dir, NO_BROKER, "start the broker")
    assert time.monotonic() - began < 45
    assert len(str(error)) < 500 and "\n" not in str(error)
    assert len(caplog.records) <= 1, caplog.text
    assert not (tmp_path / "table").exists()


@pytest.mark.nightly
def test_the_sinks_broker_is_down(spark, job_dir) -> None:
    env = environment(spark, job_dir)
    env.from_dataframe(ticks(spark), uid="ticks").sink_to(KafkaSink(NO_BROKER, "out"), uid="out")
    assert_refused(env, BrokerUnavailableError, job_dir, NO_BROKER)


def test_a_transaction_timeout_below_interval_and_restart_budget(spark, job_dir) -> None:
    checkpoint = CheckpointConfig(interval_ms=2_000, restart_budget_ms=60_000)
    env = environment(spark, job_dir, checkpoint=checkpoint)
    sink = KafkaSink(NO_BROKER, "out", transaction_timeout_ms=61_999)
    env.from_dataframe(ticks(spark), uid="ticks").sink_to(sink, uid="out")
    assert_refused(env, ConfigError, job_dir, "61999 ms", "62000 ms", "restart_budget_ms")


@pytest.mark.parametrize("is_expression", [False, True])
def test_a_key_that_the_records_do_not_have(spark, job_dir, is_expression) -> None:
    key = F.col("uzer") + 1 if is_expression else "uzer"
    says = "an expression that Spark refuses" if is_expression else "'uzer', which its records do not have"
    env = environment(spark, job_dir)
    totals = env.from_dataframe(ticks(spark), uid="ticks").key_by(key).sum("amount", uid="totals")
    totals.sink_to(MemorySink(job_dir.name), uid="out")
    assert_refused(env, GraphError, job_dir, f"'totals' is keyed by {says}", "user, amount")


def test_a_number_of_tasks_between_keyed_operators(spark, job_dir) -> None:
    env = environment(spark, job_dir)
    totals = env.from_dataframe(ticks(spark), uid="ticks").key_by("user").sum("amount", uid="totals")
    mapped = totals.map(lambda total: total, output="user STRING, amount LONG").set_parallelism(31)
    mapped.key_by("user").max("amount", uid="most").sink_to(MemorySink(job_dir.name), uid="out")
    assert_refused(
        env,
        ConfigError,
        job_dir,
        "between the keyed operator 'most' and an earlier one",
        "set_parallelism(31)",
    )


def test_a_sink_topic_that_is_a_source_topic(spark, job_dir) -> None:
    env = environment(spark, job_dir)
    stream = env.from_source(orders_source(NO_BROKER, "orders"), uid="orders")
    stream.sink_to(KafkaSink(NO_BROKER, "orders"), uid="out")
    assert_refused(env, GraphError, job_dir, "'orders' is read and written", "'out'")


def test_a_key_that_the_stream_does_not_have(spark, job_dir) -> None:
    env = environment(spark, job_dir)
    env.from_dataframe(ticks(spark), uid="ticks").sink_to(KafkaSink(NO_BROKER, "out", key="users"), uid="out")
    error = failure_of(env)
    assert type(error) is SchemaError and "choose from user, amount" in str(error)
    assert not job_dir.exists()


def test_a_job_without_a_sink(spark, job_dir) -> None:
    env = environment(spark, job_dir)
    env.from_dataframe(ticks(spark), uid="ticks")
    assert "no sink" in str(failure_of(env))
    assert not job_dir.exists()


def test_a_uid_used_twice(spark, job_dir, tmp_path) -> None:
    for uids in [("a", "a", "b"), ("a", "b", "a"), ("a", "b", "b")]:
        with pytest.raises(GraphError, match=r"is used twice.*To do: give every source"):
            totals_job(spark, job_dir, tmp_path / "table", uids=uids)


def test_two_sinks_with_one_uid_on_one_table(spark, job_dir, tmp_path) -> None:
    env = totals_job(spark, job_dir, tmp_path / "table")
    with pytest.raises(GraphError, match="uid 'table' is used twice"):
        env.from_dataframe(ticks(spark), uid="more").sink_to(DeltaSink(str(tmp_path / "table")), uid="table")


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "file://{0}", "file:{0}", "{0}/../table"])
def test_two_sinks_on_one_table(spark, job_dir, tmp_path, spelling) -> None:
    table = tmp_path / "table"
    env = totals_job(spark, job_dir, table)
    other = DeltaSink(spelling.format(table))
    env.from_dataframe(ticks(spark), uid="more").sink_to(other, uid="other")
    assert_refused(env, GraphError, job_dir, "'table' and 'other'", "same Delta table", "two tables")
    assert not table.exists()


def test_a_relative_table_path() -> None:
    with pytest.raises(ConfigError, match="relative"):
        DeltaSink("table")


def test_a_schema_that_the_table_refuses(spark, job_dir, tmp_path) -> None:
    table = tmp_path / "table"
    spark.sql("SELECT 'u' AS user, struct(1 AS x) AS total").write.format("delta").save(str(table))
    before = sorted(p.name for p in table.rglob("*"))
    assert_refused(totals_job(spark, job_dir, table), SchemaError, job_dir, "'table'", "total", "ALTER TABLE")
    assert sorted(p.name for p in table.rglob("*")) == before


def test_a_column_that_the_table_does_not_have(spark, job_dir, tmp_path) -> None:
    table = tmp_path / "table"
    spark.sql("SELECT 'u' AS user").write.format("delta").save(str(table))
    assert_refused(totals_job(spark, job_dir, table), SchemaError, job_dir, "'table'", "ALTER TABLE")


def test_other_partition_columns_than_the_tables(spark, job_dir, tmp_path) -> None:
    table = tmp_path / "table"
    spark.sql("SELECT 'u' AS user, 1L AS total").write.format("delta").partitionBy("user").save(str(table))
    env = environment(spark, job_dir)
    frame = ticks(spark).selectExpr("user", "amount AS total")
    env.from_dataframe(frame, uid="ticks").sink_to(
        DeltaSink(str(table), partition_by=("total",)), uid="table"
    )
    assert_refused(env, SchemaError, job_dir, "artition")


def test_a_function_that_cannot_be_serialised(spark, job_dir) -> None:
    for function in (HoldsALock(), HoldsASession(spark)):
        env = environment(spark, job_dir)
        keyed = env.from_dataframe(ticks(spark), uid="ticks").key_by("user")
        with pytest.raises(UserFunctionError, match=r"'totals' cannot be sent.*To do: .*open\(\)"):
            keyed.process(function, output=TOTAL, uid="totals")
    assert not job_dir.exists()


def test_a_transform_that_spark_cannot_stream(spark, job_dir, tmp_path) -> None:
    env = environment(spark, job_dir)
    stream = env.from_dataframe(ticks(spark), uid="ticks").transform(lambda df: df.groupBy("user").count())
    stream.sink_to(DeltaSink(str(tmp_path / "table")), uid="table")
    assert_refused(env, GraphError, job_dir, "in a streaming query", "watermark")


# -- a job directory that another job wrote ---------------------------------------------------------


@pytest.fixture(scope="module")
def written(spark, tmp_path_factory):
    """A job directory with a checkpoint in it, and its table."""
    base = tmp_path_factory.mktemp("written")
    with running(totals_job(spark, base / "job", base / "table")) as client:
        await_that(lambda: rows(client, "table") > 0, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
        return base


@pytest.fixture
def copy(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def edit_job(base: Path, **changes) -> None:
    key = base / "job" / "job.json"
    key.write_bytes(seal("job", {**unseal("job", key.read_bytes()), **changes}))


def snapshot(folder: Path) -> dict[str, bytes]:
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "owner.lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def assert_dir_refused(base: Path, env, *parts: str, kind: type[FlinkishError] = JobDirError) -> None:
    before = snapshot(base)
    error = failure_of(env)
    assert type(error) is kind, repr(error)
    assert all(part in str(error) for part in parts), str(error)
    assert error.what and error.why and error.what_to_do
    assert snapshot(base) == before


def test_a_directory_of_another_job(spark, copy) -> None:
    env = totals_job(spark, copy / "job", copy / "table", job="payments")
    assert_dir_refused(copy, env, "job = 'orders'", "'payments'", "new job_dir")


def test_a_directory_of_a_later_spark_version(spark, copy) -> None:
    edit_job(copy, spark="4.99.1")
    env = totals_job(spark, copy / "job", copy / "table")
    assert_dir_refused(copy, env, "Spark 4.99.1 has run", spark.version, "savepoint")


def test_a_directory_of_a_newer_format(spark, copy) -> None:
    key = copy / "job" / "job.json"
    head, rest = key.read_bytes().split(b"\n", 1)
    key.write_bytes(json.dumps({**json.loads(head), "format": FORMAT + 1}).encode() + b"\n" + rest)
    env = totals_job(spark, copy / "job", copy / "table")
    assert_dir_refused(copy, env, f"format {FORMAT + 1}", "newer version of flinkish_spark")


def test_changed_max_parallelism(spark, copy) -> None:
    env = totals_job(spark, copy / "job", copy / "table", max_parallelism=64)
    assert_dir_refused(copy, env, "max_parallelism", "128", "64")
    env = totals_job(spark, copy / "job", copy / "table", max_parallelism=0 or None)
    assert env.graph.operators[0].max_parallelism == 128


def test_an_operator_whose_state_would_mean_something_else(spark, copy) -> None:
    env = environment(spark, copy / "job")
    amounts = env.from_dataframe(ticks(spark), uid="ticks").key_by("user")
    totals = amounts.fold(AggregateColumn("total", Fold.COUNT, "amount"), uid="totals")
    totals.sink_to(DeltaSink(str(copy / "table")), uid="table")
    parts = ("'totals'", "operator: a function of the program -> FoldingColumns", "non_restored")
    assert_dir_refused(copy, env, *parts)


@pytest.mark.parametrize("groups", [0, -1, 100_000, True])
def test_a_max_parallelism_that_cannot_be(spark, job_dir, tmp_path, groups) -> None:
    with pytest.raises(ConfigError, match="max_parallelism is"):
        totals_job(spark, job_dir, tmp_path / "table", max_parallelism=groups)


def test_changed_shuffle_partitions_of_a_source_that_cannot_follow(spark, copy) -> None:
    """Key groups move only where every source can be told where to begin; a DataFrame cannot."""
    spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        env = totals_job(spark, copy / "job", copy / "table")
        parts = ("2 shuffle partitions", "to 3", "'ticks'", "DataFrame")
        assert_dir_refused(copy, env, *parts, kind=UserError)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")


def test_a_corrected_job_goes_on(spark, copy) -> None:
    """A refusal blocks nothing: the same directory, asked again with the right settings, continues."""
    wrong = totals_job(spark, copy / "job", copy / "table", max_parallelism=64)
    assert isinstance(failure_of(wrong), JobDirError)
    before = len(read_delta(copy / "table"))
    with running(totals_job(spark, copy / "job", copy / "table")) as client:
        await_that(lambda: rows(client, "table") > 0, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
        found = read_delta(copy / "table")
        assert len(found) > before
        assert len({(r["user"], r["total"]) for r in found}) == len(found)
