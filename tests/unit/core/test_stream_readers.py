"""Readers under a Spark that does not say where a micro-batch begins: asked in the order of Spark 4.1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.stream_readers import (
    TELLS_READERS,
    PositionedReader,
    ReadAllAvailable,
    ReadMaxRows,
    adapt_reader,
)


class Numbers(DataSourceStreamReader):
    """Two numbers more for each question; remembers what it was asked."""

    def __init__(self, there_are: int = 100) -> None:
        self.there_are = there_are
        self.asked: list[tuple[Any, Any]] = []
        self.told: list[Any] = []

    def initialOffset(self) -> dict[str, Any]:
        return {"at": 0, "keys": {1: 0}}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        self.asked.append((start, limit))
        return {"at": min(start["at"] + 2, self.there_are), "keys": {1: 0}}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(n) for n in range(start["at"], end["at"])]

    def read(self, partition: InputPartition) -> Any:
        return iter([(partition.value,)])

    def commit(self, end: dict[str, Any]) -> None:
        self.told.append(end)

    def stop(self) -> None:
        self.told.append("stop")


class Limited(Numbers):
    def getDefaultReadLimit(self) -> ReadMaxRows:
        return ReadMaxRows(2)


def logged(offset: dict[str, Any]) -> Any:
    return json.loads(json.dumps(offset))


class Query:
    """What Spark 4.1 does with a reader; its log outlives the reader."""

    def __init__(self) -> None:
        self.offsets: list[Any] = []
        self.commits = 0
        self.read: list[list[int]] = []

    def start(self, reader: Numbers) -> None:
        self.reader = PositionedReader(reader)
        if self.offsets:
            assert self.reader.partitions(self.offsets[-1], self.offsets[-1]) == []
        if self.commits < len(self.offsets):
            self.run()

    def trigger(self) -> bool:
        """Log and run a micro-batch; return whether there was anything new."""
        if not self.log():
            return False
        self.run()
        return True

    def log(self) -> bool:
        end = logged(self.reader.latestOffset())
        if self.offsets and end == self.offsets[-1]:
            return False
        self.offsets.append(end)
        return True

    def run(self) -> None:
        before = self.offsets[-2] if len(self.offsets) > 1 else logged(self.reader.initialOffset())
        pieces = self.reader.partitions(before, self.offsets[-1])
        self.read.append([row[0] for piece in pieces for row in self.reader.read(piece)])
        self.commits += 1


def test_each_micro_batch_begins_where_the_one_before_it_ended() -> None:
    query, numbers = Query(), Numbers(there_are=5)
    query.start(numbers)
    assert [query.trigger() for _ in range(5)] == [True, True, True, False, False]
    assert query.read == [[0, 1], [2, 3], [4]]
    # As Spark 4.2 says it: what has been through JSON.
    assert numbers.asked[0][0] == {"at": 0, "keys": {"1": 0}}
    assert all(limit == ReadAllAvailable() for _, limit in numbers.asked)


def test_behind_a_restart_it_goes_on_at_the_end_of_the_log() -> None:
    query = Query()
    query.start(Numbers())
    query.trigger()
    query.start(Numbers())
    query.trigger()
    assert query.read == [[0, 1], [2, 3]]


def test_a_micro_batch_that_was_logged_and_not_committed_is_run_again_once() -> None:
    query = Query()
    query.start(Numbers())
    query.trigger()
    query.log()
    query.start(Numbers())
    query.trigger()
    assert query.read == [[0, 1], [2, 3], [4, 5]]


def test_the_first_micro_batch_is_run_again_too() -> None:
    query = Query()
    query.start(Numbers())
    query.log()
    query.start(Numbers())
    query.trigger()
    assert query.read == [[0, 1], [2, 3]]


def test_a_question_without_an_answer_moves_nothing() -> None:
    class Failing(Numbers):
        def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
            found = super().latestOffset(start, limit)
            if len(self.asked) == 2:
                raise ConnectionError("for once")
            return found

    query = Query()
    query.start(Failing())
    query.trigger()
    with pytest.raises(ConnectionError):
        query.trigger()
    query.trigger()
    assert query.read == [[0, 1], [2, 3]]


def test_the_readers_own_limit_is_handed_on() -> None:
    numbers = Limited()
    PositionedReader(numbers).latestOffset()
    assert numbers.asked[0][1] == ReadMaxRows(2)


def test_an_end_that_was_asked_for_before_the_end_of_the_log_is_known_is_refused() -> None:
    reader = PositionedReader(Numbers())
    reader.latestOffset()
    with pytest.raises(EnvironmentFault, match="before it said where it begins") as caught:
        reader.partitions(logged({"at": 40}), logged({"at": 40}))
    assert "triggerAvailableNowWrapper" in caught.value.what_to_do


def test_the_rest_is_passed_on() -> None:
    numbers = Numbers()
    reader = PositionedReader(numbers)
    reader.commit({"at": 2})
    reader.stop()
    assert numbers.told == [{"at": 2}, "stop"]


def test_from_4_2_on_spark_asks_a_reader_itself() -> None:
    numbers = Numbers()
    assert (adapt_reader(numbers) is numbers) == TELLS_READERS
