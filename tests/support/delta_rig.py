"""A Delta sink without a job: stage micro-batches, commit checkpoints, look at the table."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark import CheckpointConfig, DeltaSink
from flinkish_spark.connectors.delta import committing, staging
from flinkish_spark.contracts.sink import StageRequest
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quote_name
from tests.support.sinks import sink_context_of

JOB = JobUuid("d" * 32)
UID = "table"


class Way(enum.Enum):
    """Who commits: delta-rs, or Spark's Delta as for a table with a feature that delta-rs does not know."""

    DELTA_RS = enum.auto()
    SPARK = enum.auto()


def _unknown(*given: Any) -> str:
    return "the table feature of a test"


class DeltaRig:
    """One sink of one owner.

    Parameters
    ----------
    schema
        DDL of the stream's fields.
    settings
        Of the sink.
    """

    def __init__(
        self,
        spark: Any,
        table: Path,
        schema: str,
        *,
        epoch: int = 1,
        way: Way = Way.DELTA_RS,
        **settings: Any,
    ) -> None:
        self.way = way
        self.spark, self.table, self.schema = spark, table, schema
        self.sink = DeltaSink(str(table), **settings)
        fields = T.DataType.fromDDL(schema)
        checkpoint = settings.pop("checkpoint", CheckpointConfig())
        self.context = sink_context_of(JOB, OwnerEpoch(epoch), UID, fields, checkpoint)
        self.writer = self.sink.create_writer(spark, self.context)
        self.committer = self.sink.create_committer(spark, self.context)
        self._blocks = itertools.count()

    @contextmanager
    def its_way(self) -> Iterator[None]:
        if self.way is Way.DELTA_RS:
            yield
            return
        unknown = {"why_by_spark": _unknown, "why_not_made": _unknown}
        with patch.multiple(staging, **unknown), patch.multiple(committing, **unknown):
            yield

    def preflight(self, checkpoint: CheckpointConfig | None = None) -> None:
        context = self.context
        if checkpoint is not None:
            context = sink_context_of(JOB, context.owner_epoch, UID, context.schema, checkpoint)
        with self.its_way():
            self.sink.preflight(self.spark, context)

    def stage(self, batch: int, rows: Sequence[tuple[Any, ...]]) -> list[Committable]:
        """Stage rows, whose order is their order in the stream."""
        frame = self.spark.createDataFrame(list(rows), self.schema).coalesce(1)
        return self.stage_frame(batch, frame, len(rows))

    def stage_frame(self, batch: int, frame: Any, count: int) -> list[Committable]:
        # Maps have no hash.
        hashed = F.xxhash64(F.to_json(F.struct(*[F.col(quote_name(n)) for n in frame.columns])))
        control = [
            F.lit(int(C.Kind.RECORD)).alias(C.KIND),
            F.lit(0).cast("long").alias(C.CHECKPOINT),
            F.lit(0).cast("long").alias(C.CHANNEL),
            hashed.alias(C.HASH),
        ]
        rows = frame.select(*control, *[F.col(quote_name(n)) for n in frame.columns])
        request = StageRequest(rows, Lineage(0), BatchId(batch), next(self._blocks), CheckpointId(1))
        with self.its_way():
            result = self.writer.stage(request)
        assert sum(ack.rows for ack in result.tasks) == count
        return [Committable(UID, payload) for payload in result.payloads]

    def commit(self, checkpoint: int, committables: Sequence[Committable]) -> CommitAnswer:
        """Commit through the stored form, as another process would."""
        stored = [Committable.from_json(c.to_json()) for c in committables]
        with self.its_way():
            answers = self.committer.commit(CheckpointId(checkpoint), stored)
        assert len(answers) == len(committables) and len(set(map(id, answers))) == 1
        return answers[0]

    def put(self, checkpoint: int, *batches: Sequence[tuple[Any, ...]]) -> CommitAnswer:
        """Stage and commit one checkpoint."""
        staged = [c for n, rows in enumerate(batches) for c in self.stage(checkpoint * 100 + n, rows)]
        return self.commit(checkpoint, staged)

    def other(self, **settings: Any) -> DeltaRig:
        """The same sink in another process, perhaps under other settings."""
        own = {name: getattr(self.sink, name) for name in ("partition_by", "options", "mode")}
        own["schema_evolution"] = self.sink.schema_evolution
        own["way"] = self.way
        schema = settings.pop("schema", self.schema)
        return DeltaRig(self.spark, self.table, schema, **{**own, "epoch": 2, **settings})

    def rows(self, *columns: str) -> Counter[tuple[Any, ...]]:
        frame = self.spark.read.format("delta").load(str(self.table))
        return Counter(tuple(row) for row in frame.select(*columns or ["*"]).collect())

    @property
    def versions(self) -> int:
        """How many versions the table has."""
        return len(list((self.table / "_delta_log").glob("*.json")))

    def sql(self, text: str) -> None:
        """Run SQL, with {t} for the table."""
        self.spark.sql(text.format(t=f"delta.`{self.table}`"))
