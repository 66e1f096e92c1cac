"""The sinks under test: how each is made, and how its output is read and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from demo.orders import Total, expected_totals, newest_totals
from flinkish_spark import (
    Append,
    DeltaSink,
    FileFormat,
    FileSink,
    JdbcSink,
    Json,
    KafkaSink,
    RecordHeaders,
    Upsert,
)
from flinkish_spark.connectors.delta.table import WriteMode
from flinkish_spark.contracts.sink import Sink
from tests.crash.sweep.looking import (
    TABLE,
    DeltaLooker,
    FilesLooker,
    Looker,
    PostgresLooker,
    SqliteLooker,
    StoredTableLooker,
    TopicLooker,
)
from tests.crash.sweep.places import Database, Place
from tests.support.two_phase_page import sqlite_sink_class


@dataclass(frozen=True)
class SinkUnderTest:
    """One line of the table.

    Parameters
    ----------
    make
        Makes the sink, in the job's process.
    looker
        Sees what readers see, in another process.
    expected
        From the input's values, by partition in order, to the rows that must be visible.
    weight
        How many staged rows the visible ones stand for.
    needs_postgres
        Whether its place has a database of a server.
    shows_whole
        Whether readers see a checkpoint whole or not at all, whatever dies.
    """

    name: str
    make: Callable[[Place], Sink]
    looker: Callable[[Place], Looker]
    expected: Callable[[Iterable[bytes]], Counter[Total]] = expected_totals
    weight: Callable[[Counter[Total]], int] = Counter.total
    needs_postgres: bool = False
    shows_whole: bool = False


def orders_in(rows: Counter[Total]) -> int:
    """Return how many rows were upserted to leave these: each says how many orders it counts."""
    return sum(orders * times for (_, _, orders), times in rows.items())


def _kafka(*, atomic: bool = False) -> Callable[[Place], Sink]:
    return lambda place: KafkaSink(
        place.servers,
        place.output_topic,
        key="user",
        value=Json(),
        # By which the audit counts partial checkpoints.
        record_headers=RecordHeaders.BATCH,
        atomic=atomic,
    )


def _delta(mode: WriteMode = Append()) -> Callable[[Place], Sink]:  # noqa: B008
    return lambda place: DeltaSink(place.table.url, mode=mode, store_options=dict(place.table.options))


def _sqlite_file(place: Place) -> str:
    return str(place.output.with_suffix(".db"))


def _jdbc_sqlite(place: Place) -> Sink:
    # Rows are added and not upserted: one that comes twice shows.
    return JdbcSink(f"jdbc:sqlite:{_sqlite_file(place)}", TABLE, create_table=True)


def _jdbc_postgres(place: Place) -> Sink:
    database = _database(place)
    return JdbcSink(database.url, TABLE, user=database.user, password=database.password, create_table=True)


def _database(place: Place) -> Database:
    assert place.database is not None
    return place.database


def _topic(place: Place) -> Looker:
    return TopicLooker(place.broker, place.output_topic)


def _table(place: Place) -> Looker:
    return DeltaLooker(place.output) if place.table.is_local else StoredTableLooker(place.table)


def _sqlite_table(place: Place) -> Looker:
    return SqliteLooker(_sqlite_file(place))


def _postgres_table(place: Place) -> Looker:
    return PostgresLooker(_database(place))


def without_counts(values: Iterable[bytes]) -> Counter[Total]:
    """Return the rows of a sink that keeps users and totals only."""
    rows: Counter[Total] = Counter()
    for (user, total, _), times in expected_totals(values).items():
        rows[user, total, 0] += times
    return rows


def _two_phase(place: Place) -> Sink:
    """Return the example of docs/two-phase-sinks.md."""
    place.output.mkdir(parents=True, exist_ok=True)
    sink: Sink = sqlite_sink_class()(str(place.output / "totals.db"), str(place.output / "staged"))
    return sink


def _json_files(place: Place) -> Looker:
    return FilesLooker(place.output)


def _two_phase_table(place: Place) -> Looker:
    return SqliteLooker(str(place.output / "totals.db"), "user, total, 0")


_ALL: Sequence[SinkUnderTest] = (
    SinkUnderTest("kafka", _kafka(), _topic),
    SinkUnderTest("kafka-atomic", _kafka(atomic=True), _topic, shows_whole=True),
    SinkUnderTest("delta", _delta(), _table),
    SinkUnderTest("delta-upsert", _delta(Upsert(keys=("user",))), _table, newest_totals, orders_in),
    SinkUnderTest("files", lambda place: FileSink(str(place.output), FileFormat.JSON), _json_files),
    SinkUnderTest("jdbc-sqlite", _jdbc_sqlite, _sqlite_table),
    SinkUnderTest("jdbc-postgres", _jdbc_postgres, _postgres_table, needs_postgres=True),
    SinkUnderTest("two-phase", _two_phase, _two_phase_table, without_counts),
)
#: Once more, for jobs with several sinks: staged in one pass with the first, committed behind others.
_SECOND = SinkUnderTest("kafka-second", _kafka(), _topic)
#: Names of those that have a sweep of their own.
SWEPT = tuple(one.name for one in _ALL)
SINKS: Mapping[str, SinkUnderTest] = {one.name: one for one in (*_ALL, _SECOND)}
