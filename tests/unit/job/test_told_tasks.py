"""Tasks are told of their micro-batch before anything evaluates its rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.checkpoint.spark_log import SparkLog, place_of_bases
from flinkish_spark.core.distributed_cache import CACHED_FILES_PROPERTY
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.micro_batch import MICRO_BATCH_PROPERTY, MicroBatch
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.spark_engine import SinkStaging
from flinkish_spark.protocol.ids import BatchId, Lineage
from tests.support.null_parts import NO_TALLIES

LOGGED = 'v1\n{{"batchTimestampMs": {at}}}\n{{"flinkish:checkpoint": 3, "flinkish:watermark": {watermark}}}'


class Frame:
    """Notes what it is told, and when it is evaluated."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.sparkSession = self.sparkContext = self

    def setLocalProperty(self, name: str, value: str) -> None:
        self.seen.append((name, value))

    @property
    def write(self) -> Any:
        writer: Any = SimpleNamespace(save=lambda: self.seen.append("evaluated"))
        writer.format = writer.mode = lambda _: writer
        return writer


def staging(folder: Path) -> SinkStaging:
    log = SparkLog(LocalStore(folder), "spark/1", folder / "spark" / "1")
    context: Any = SimpleNamespace(log=log, lineage=Lineage(2))
    bases = place_of_bases(StoreSpec(str(folder)), log)
    made = SinkStaging([], {}, context, NO_TALLIES, bases=bases, cached_files={"word": "flinkish-1/word.txt"})
    made._stage_sinks = lambda *_: "staged"  # type: ignore[assignment, method-assign, misc]
    return made


def test_before_it_is_evaluated_and_anew_for_each(tmp_path: Path) -> None:
    for number in range(2):
        text = LOGGED.format(at=1_000 + number, watermark=60_000 * (1 + number))
        LocalStore(tmp_path).put(f"spark/1/offsets/{number}", text.encode())
    frame, made = Frame(), staging(tmp_path)
    for number in range(2):
        made.stage_only(frame, BatchId(number), 0, frozenset())  # type: ignore[arg-type]
    (name, first), (files, told_first), evaluated, (_, second), (_, told_second), _ = frame.seen
    assert (name, files, evaluated) == (MICRO_BATCH_PROPERTY, CACHED_FILES_PROPERTY, "evaluated")
    assert json.loads(told_first) == json.loads(told_second) == {"word": "flinkish-1/word.txt"}
    told = [MicroBatch.from_json(json.loads(text)) for text in (first, second)]
    assert [(one.lineage, one.number, one.processing_time_ms) for one in told] == [
        (2, 0, 1_000),
        (2, 1, 1_001),
    ]
    assert [one.progress("any").watermark_ms for one in told] == [60_000, 120_000]
    assert told[1].progress("any").watermark_before_ms == 60_000
    assert told[0].bases == str(tmp_path / "spark" / "1" / "state" / "bases")


def test_a_micro_batch_without_an_entry_is_not_evaluated(tmp_path: Path) -> None:
    frame = Frame()
    with pytest.raises(CorruptObjectError, match="runs micro-batch 4, and its log has no entry"):
        staging(tmp_path).stage_only(frame, BatchId(4), 0, frozenset())  # type: ignore[arg-type]
    assert frame.seen == []
