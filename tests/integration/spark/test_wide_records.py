"""Records of many columns: what Spark derives about them must not double with each."""

import pytest
from pyspark.sql import types as T

from flinkish_spark import MemorySink, NoRestart
from tests.support.jobs import environment, running


@pytest.mark.parametrize("prefix", [pytest.param("c", marks=pytest.mark.nightly), "c."])
def test_a_record_of_23_columns_goes_through_two_sinks(spark, tmp_path, prefix) -> None:
    texts = [T.StructField(f"{prefix}{number}", T.StringType()) for number in range(22)]
    schema = T.StructType([*texts, T.StructField("id", T.LongType())])
    rows = [(*(f"{number}-{row}" for number in range(22)), row) for row in range(3)]
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100, restart_strategy=NoRestart())
    stream = env.from_collection(rows, schema, uid="in")
    plain, behind = MemorySink(f"{tmp_path}/plain"), MemorySink(f"{tmp_path}/behind")
    stream.sink_to(plain, uid="plain")
    made = stream.filter(lambda record: record.id >= 0).rebalance().map(tuple, output=schema)
    made.transform(lambda frame: frame.where("id IS NOT NULL")).sink_to(behind, uid="behind")
    with running(env) as client:
        assert client.wait(timeout_ms=200_000), client.progress
    assert sorted(map(tuple, plain.rows())) == sorted(map(tuple, behind.rows())) == rows
