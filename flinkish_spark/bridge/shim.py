"""Calls into the JAR of this package: the transactional Kafka writer, the row tap, the parser of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import ArrowUDFType, arrow_udf
from pyspark.sql.types import StructType

from flinkish_spark.bridge.session import JSON_ROWS, has_class, jvm
from flinkish_spark.errors import InternalError
from flinkish_spark.protocol.records import TaskAck


@cache
def _found(view: Any) -> tuple[Any, Any]:
    """Return KafkaStager.stage and RowTap.tap; finding a class takes a call into the JVM for every dot."""
    shim = view.io.github.flinkishspark.shim
    return shim.KafkaStager.stage, shim.RowTap.tap


def stage_kafka(rows: DataFrame, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write rows, by default into one open transaction per task, and return what each task reports.

    Parameters
    ----------
    rows
        kind, checkpoint, channel, hash, key BINARY, value BINARY, topic STRING; behind them, where
        `options` say, partition INT, timestamp BIGINT, headers ARRAY<STRUCT<key, value>>, misfit STRING.
    options
        See `KafkaStager` in jvm-shim. May hold secrets; they travel in the task only.
    """
    stage, _ = _found(jvm(rows.sparkSession))
    answer: list[dict[str, Any]] = json.loads(stage(rows._jdf, json.dumps(options)))
    return answer


def refused_producer_setting(spark: SparkSession, options: Mapping[str, Any]) -> str:
    """Return which producer setting Kafka's client would refuse, as the end of a sentence; empty if none.

    Parameters
    ----------
    options
        As for :func:`stage_kafka`.
    """
    shim = jvm(spark).io.github.flinkishspark.shim
    return str(shim.KafkaStager.refusedSetting(json.dumps(options)))


def from_json(spark: SparkSession, text: Column, schema: StructType, options: Mapping[str, str]) -> Column:
    """Return the fields of JSON objects, by our parser if the JAR is there, by Spark's if not.

    Both take values exactly as they stand there, or for malformed: see `docs/sources.md`.

    Parameters
    ----------
    text
        Strings that are UTF-8; what comes of others is not defined.
    options
        As of from_json, with a mode.
    """
    if getattr(spark, "_jvm", None) is None or not has_class(spark, JSON_ROWS):
        return F.from_json(_looked_at(text, schema), schema, dict(options))
    from pyspark.sql.classic.column import Column as ClassicColumn

    time_zone = spark.conf.get("spark.sql.session.timeZone")
    rows = jvm(spark).io.github.flinkishspark.shim.JsonRows
    return ClassicColumn(rows.column(text._jc, schema.json(), json.dumps(dict(options)), time_zone))


def _looked_at(text: Column, schema: StructType) -> Column:
    """Return texts that Spark's own parser reads exactly; what is bad is malformed there."""

    def looked_at(values: Any) -> Any:
        import pyarrow as pa

        from flinkish_spark.sources.exact_json import exact_text

        return pa.array(map(exact_text(schema), values.to_pylist()), pa.string())

    # As bytes: of a text that is no UTF-8 Arrow could not give any.
    look: Callable[..., Column] = arrow_udf(looked_at, "string", ArrowUDFType.SCALAR)
    return look(text.cast("binary"))


class TappedRows:
    """A DataFrame that counts its records and takes the barriers out while it is written.

    Use :attr:`records` in exactly one action, then ask for :meth:`acks`.
    """

    def __init__(self, rows: DataFrame, name: str) -> None:
        _, tap = _found(jvm(rows.sparkSession))
        self._tapped = tap(rows._jdf, name)
        self.records = DataFrame(self._tapped.records(), rows.sparkSession)

    def acks(self) -> Sequence[TaskAck]:
        """Return one ack per task of the finished action.

        Raises
        ------
        InternalError
            The action did not read all partitions to their end, so its counts mean nothing.
        """
        acks = json.loads(self._tapped.acksJson())
        if len(acks) != self._tapped.partitions():
            raise InternalError(
                f"a writer read {len(acks)} of {self._tapped.partitions()} partitions to their end"
            )
        return tuple(TaskAck.from_json(a) for a in acks)
