"""A plain query over files into four systems, which commit together."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException

from flinkish_spark import DeltaSink, FileFormat, FileSink, JdbcSink, KafkaSink, SinkGroup, commit_together
from flinkish_spark.core.steps import SilentObserver, Step
from tests.support.jobs import read_committed

SCHEMA = "user STRING, amount LONG"


class Dies(Exception):
    """In the place of a kill: the driver ends here."""


class DieAt(SilentObserver):
    """Dies when a step begins or has ended."""

    def __init__(self, step: Step, moment: str) -> None:
        self._step, self._moment = step, moment

    def on_step_start(self, step: Any, subject: str) -> None:
        if (step, self._moment) == (self._step, "before"):
            raise Dies

    def on_step_end(self, step: Any, subject: str) -> None:
        if (step, self._moment) == (self._step, "after"):
            raise Dies


class QueryRig:
    """A query over files of JSON into a topic, a Delta table, files and a database."""

    def __init__(self, spark: Any, servers: str, topic: str, folder: Path) -> None:
        self.spark, self.servers, self.topic, self.folder = spark, servers, topic, folder
        self.checkpoint, self._written = folder / "checkpoint", 0
        (folder / "in").mkdir()

    def write(self, *amounts: int) -> None:
        """Add a file, which is a micro-batch."""
        self._written += 1
        lines = [json.dumps({"user": f"u{amount % 3}", "amount": amount}) for amount in amounts]
        (self.folder / "in" / f"{self._written:03}.json").write_text("\n".join(lines))

    def sinks(self) -> dict[str, Any]:
        return {
            "topic": KafkaSink(self.servers, self.topic),
            "table": DeltaSink(str(self.folder / "table")),
            "files": FileSink(str(self.folder / "files"), FileFormat.JSON),
            "rows": JdbcSink(f"jdbc:sqlite:{self.folder}/rows.db", "copies", create_table=True),
        }

    def group(self, **settings: Any) -> SinkGroup:
        return SinkGroup(self.sinks(), checkpoint_location=str(self.checkpoint), **settings)

    def orders(self) -> Any:
        stream = self.spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
        return stream.json(str(self.folder / "in"))

    def run(self, group: Any, frame: Any = None, mode: str = "append") -> None:
        writer = (self.orders() if frame is None else frame).writeStream.outputMode(mode)
        self._run(writer.foreachBatch(group))

    def run_format(self, frame: Any = None, sinks: Any = None, mode: str = "append", **settings: Any) -> None:
        """Write by `format("flinkish")`."""
        writer = (self.orders() if frame is None else frame).writeStream.outputMode(mode)
        options = commit_together(self.sinks() if sinks is None else sinks, **settings)
        self._run(writer.format("flinkish").options(**options))

    def _run(self, writer: Any) -> None:
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        try:
            query.awaitTermination(120)
        finally:
            query.stop()

    def run_until_it_dies(self, at: DieAt) -> None:
        group = self.group()
        group.observer = lambda: at
        with pytest.raises(StreamingQueryException, match="Dies"):
            self.run(group)

    def seen(self) -> dict[str, Counter[int]]:
        table, files = self.folder / "table", self.folder / "files"
        found = {"topic": [json.loads(r.value)["amount"] for r in read_committed(self.servers, self.topic)]}
        is_there = DeltaTable.is_deltatable(str(table))
        found["table"] = DeltaTable(table).to_pyarrow_table()["amount"].to_pylist() if is_there else []
        shown = [*files.glob("part-*")]
        found["files"] = [json.loads(line)["amount"] for one in shown for line in one.read_text().split()]
        with sqlite3.connect(self.folder / "rows.db") as db:
            there = [*db.execute("SELECT name FROM sqlite_master WHERE name = 'copies'")]
            found["rows"] = [row[0] for row in db.execute("SELECT amount FROM copies")] if there else []
        return {uid: Counter(values) for uid, values in found.items()}

    def expect(self, *amounts: int) -> None:
        assert self.seen() == {uid: Counter(amounts) for uid in self.sinks()}
