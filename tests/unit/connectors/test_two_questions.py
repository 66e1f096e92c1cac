"""What is asked in two requests while the world moves on between them; brokers and tables are stubs.

A stub does what the test says behind each request that it has answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KafkaSource, StartingOffsets
from flinkish_spark.connectors.delta import source as delta_records_module
from flinkish_spark.connectors.delta.log import commit_path
from flinkish_spark.connectors.delta.source import DeltaSource, DeltaTableSource
from flinkish_spark.connectors.kafka.source import to_subscription_options
from flinkish_spark.connectors.kafka.stream_offsets import OffsetFinder
from flinkish_spark.connectors.kafka.stream_options import FIRST_OFFSETS, parse_batch, parse_stream
from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader
from flinkish_spark.contracts.source import JobPlace
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.sources import EndAtLatest, EndAtTimestamp, KafkaRecordsSource, StartAtTimestamp

PLACE = ("in", 0)


class Log:
    """One partition with the times of its records; each request moves it on by one step of a script.

    Stands in for KafkaAdmin.
    """

    def __init__(self, *times_ms: int, then: list[list[int]] | None = None) -> None:
        self.times_ms, self.then = list(times_ms), then or []

    def _answered(self, answer: Any) -> Any:
        if self.then:
            self.times_ms += self.then.pop(0)
        return answer

    def end_offsets(self, places, isolation=None):
        return self._answered({place: len(self.times_ms) for place in places})

    def offsets_at(self, wanted, isolation=None):
        def first(at_ms):
            return next((at for at, time_ms in enumerate(self.times_ms) if time_ms >= at_ms), None)

        return self._answered({place: first(at_ms) for place, at_ms in wanted.items()})

    def partition_counts(self, names):
        return dict.fromkeys(names, 1)


def source_start(log: Log) -> int:
    return StartAtTimestamp(1_000).offsets(log, [PLACE])[PLACE]


def records_start(log: Log) -> int:
    source = KafkaRecordsSource("nowhere:1", ["in"], starting_at_ms=1_000)
    source.__dict__["_planning_admin"] = log
    return source.first("in:0")


def door_start(log: Log) -> int:
    options = {
        "kafka.bootstrap.servers": "nowhere:1",
        "subscribe": "in",
        "startingTimestamp": "1000",
        "startingOffsetsByTimestampStrategy": "latest",
    }
    return OffsetFinder(log, parse_stream(options)).starting()[PLACE]


def source_end(log: Log) -> int:
    return EndAtTimestamp(1_000).offsets(log, [PLACE])[PLACE]


def door_end(log: Log) -> int:
    options = {"kafka.bootstrap.servers": "nowhere:1", "subscribe": "in", "endingTimestamp": "1000"}
    return OffsetFinder(log, parse_batch(options)).ending()[PLACE]


Ask = Callable[[Log], int]
STARTS, ENDS = [source_start, records_start, door_start], [source_end, door_end]


@pytest.mark.parametrize("ask", STARTS)
def test_the_first_record_that_comes_while_we_ask_is_read(ask: Ask) -> None:
    # 900 is at 0. 1001 comes behind the first answer, at 1: whichever was asked first, it is read.
    assert ask(Log(900, then=[[1_001]])) == 1
    # An older one comes before it: 950 at 1, 1001 at 2. What is as late begins at 2.
    assert ask(Log(900, then=[[950, 1_001]])) == 2
    # Nothing as late before the second answer: begun is where there was none yet, and 1001 at 1 comes.
    assert ask(Log(900, then=[[], [1_001]])) == 1


@pytest.mark.parametrize("ask", ENDS)
def test_the_first_record_that_comes_while_we_ask_is_not_read(ask: Ask) -> None:
    # Up to what there is, without the record of 1001 at 1.
    assert ask(Log(900, then=[[1_001]])) == 1
    assert ask(Log(900, then=[[950, 1_001]])) == 2, "up to the first that is as late, which is exact"
    assert ask(Log(900, then=[[], [1_001]])) == 1


@pytest.mark.parametrize("ask", [*STARTS, *ENDS])
def test_what_is_there_and_as_late_is_found(ask: Ask) -> None:
    assert ask(Log(900, 1_000, 950, 2_000)) == 1
    assert ask(Log(900, 950)) == 2


# -- one place to begin at, for all who ask ----------------------------------------------------------------
def test_records_and_dead_letters_begin_at_one_end(tmp_path: Path) -> None:
    """Each is a scan of its own, which would ask for the end at another moment."""
    JobDir(LocalStore(tmp_path)).read_or_create_job({"job": "it"}, {"uuid": str(JobUuid("0" * 31 + "1"))})
    place = JobPlace(StoreSpec(str(tmp_path)), "1-0.json")
    source = KafkaSource("nowhere:1", ["in"], starting_offsets=StartingOffsets.LATEST)
    log = Log(1, 2, 3)

    def begin(**more: str) -> Any:
        options = parse_stream(
            {
                "kafka.bootstrap.servers": "nowhere:1",
                "startingOffsets": source.starting_option(place),
                FIRST_OFFSETS: place.beginnings(None),
                **to_subscription_options(source.wanted),
                **more,
            }
        )
        return KafkaStreamReader(options, OffsetFinder(log, options)).initialOffset()  # type: ignore[arg-type]

    assert begin() == {"in": {"0": 3}}
    log.times_ms += [4, 5]
    assert begin(includeHeaders="true") == begin() == {"in": {"0": 3}}, "also of the next start"


# -- which partitions there are, and where they end --------------------------------------------------------
class Growing(Log):
    """Gets a second partition, with records, behind the first answer to which ones there are."""

    partitions = 1

    def partition_counts(self, names):
        found = dict.fromkeys(names, self.partitions)
        self.partitions = 2
        return found


def test_every_partition_that_has_an_end_is_read() -> None:
    source, brokers = KafkaRecordsSource("nowhere:1", ["in"], ending=EndAtLatest()), Growing(1, 2, 3)
    source.__dict__.update(_planning_admin=brokers, _admin=brokers)
    splits = source.splits()
    assert set(source._ends) <= set(splits), "or the job ends without it"


# -- Delta -------------------------------------------------------------------------------------------------
def write(table: Path, version: int, *actions: dict[str, Any]) -> None:
    log = table / "_delta_log"
    log.mkdir(parents=True, exist_ok=True)
    (log / f"{version:020}.json").write_text("".join(f"{json.dumps(one)}\n" for one in actions))


def fields(**types: str) -> dict[str, Any]:
    own = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in types.items()]
    schema = json.dumps({"type": "struct", "fields": own})
    return {
        "protocol": {"minReaderVersion": 1, "minWriterVersion": 2},
        "metaData": {
            **{"id": "t", "schemaString": schema, "partitionColumns": [], "configuration": {}},
            "format": {"provider": "parquet", "options": {}},
        },
    }


def test_versions_that_are_written_while_we_look_are_not_taken_for_gone(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, 0, fields(n="long"))
    source = DeltaSource(str(tmp_path), starting_version=1)
    real = commit_path

    class Version1:
        """It is not there; behind that answer, it and the next one are written."""

        def exists(self) -> bool:
            there = real(tmp_path, 1).exists()
            write(tmp_path, 1, {"commitInfo": {"timestamp": 1}})
            write(tmp_path, 2, {"commitInfo": {"timestamp": 2}})
            return there

    monkeypatch.setattr(delta_records_module, "commit_path", lambda table, version: Version1())
    source._check_log(1)


@pytest.mark.parametrize("make", [DeltaTableSource, DeltaSource])
def test_a_table_that_got_other_types_behind_the_program_is_refused(make: Any, tmp_path: Path) -> None:
    write(tmp_path / "t", 0, fields(n="long"))
    source = make(str(tmp_path / "t")).bind("in")
    source.__dict__["_fs_folder"] = str(tmp_path / "job")
    write(tmp_path / "t", 1, fields(n="string"))
    with pytest.raises(ConfigError, match=r"version 1 of the Delta table .* has another type or name of 'n'"):
        source._look([])
