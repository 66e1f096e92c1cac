"""Every sink of this package behind one operator, and what readers of each see."""

from __future__ import annotations

import io
import json
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.orders import Total, expected_totals
from flinkish_spark import (
    ForeachCheckpointSink,
    ForeachSink,
    IcebergSink,
    MemorySink,
    PrintSink,
    SinkWithDeadLetters,
    Upsert,
)
from flinkish_spark.contracts.sink import Sink
from tests.crash.families_rig import Servers
from tests.crash.sweep.looking import TABLE
from tests.crash.sweep.places import Place
from tests.crash.sweep.sinks import SINKS, newest_totals, without_counts
from tests.support import effort
from tests.support.databases import TestDatabase
from tests.support.iceberg_rig import catalog_of, catalog_properties, rows_in
from tests.support.two_phase_app import picky
from tests.support.two_phase_page import Ledger, sqlite_sink_class

#: Behind the last of them the query fails in the middle of a checkpoint's commits.
BEFORE_FAILURE = ("kafka", "delta", "iceberg", "files", "jdbc-postgres", "foreach", "foreach-checkpoint")
BEHIND_FAILURE = (
    "kafka-second",
    "kafka-atomic",
    "delta-upsert",
    "iceberg-upsert",
    "jdbc-sqlite",
    "two-phase",
    "letters",
    "memory",
    "print",
)
BY_NIGHT = ("jdbc-mariadb",)
#: Uids, in the order in which they commit.
UIDS = (*BEFORE_FAILURE, *BEHIND_FAILURE, *(BY_NIGHT if effort.is_night else ()))
#: They call functions, which are called again when a checkpoint is committed again.
CALLING = ("foreach", "foreach-checkpoint")
#: Of those, whose function does not look at the checkpoint's id.
SEEN_AGAIN = ("foreach",)

#: Totals that the sink with dead letters refuses: those that can be divided by it.
_REFUSED = 3
_PREFIX = "contract> "
#: A start of the job, and a checkpoint of it.
Key = tuple[int, int]


@dataclass
class Called:
    """What functions on the driver were called with."""

    start: int = 0
    rows: list[tuple[Key, Total]] = field(default_factory=list)
    checkpoints: dict[Key, list[Total]] = field(default_factory=dict)
    #: Checkpoints that came a second time.
    again: list[Key] = field(default_factory=list)

    def each(self, row: Any, checkpoint: Any) -> None:
        self.rows.append(((self.start, int(checkpoint)), tuple(row)))

    def together(self, rows: Iterator[Any], checkpoint: Any) -> None:
        """Do nothing for a checkpoint that was here: it brings the same rows in the same order."""
        found, key = [tuple(row) for row in rows], (self.start, int(checkpoint))
        if key in self.checkpoints:
            assert found == self.checkpoints[key], key
            self.again.append(key)
        self.checkpoints[key] = found

    def rows_by_checkpoint(self) -> dict[Key, list[Total]]:
        found = defaultdict(list)
        for key, row in self.rows:
            found[key].append(row)
        return dict(found)


class Branches:
    """The sinks: makes them anew for each start of the job, and looks at what they have written.

    Parameters
    ----------
    directory
        For everything that is a file.
    mariadb
        A database of its own; by night.
    """

    def __init__(self, directory: Path, servers: Servers, mariadb: TestDatabase | None = None) -> None:
        self._name = f"contract-{uuid.uuid4().hex[:12]}"
        self._places = {uid: self._place(directory, servers, uid) for uid in UIDS if uid in SINKS}
        self._lookers = {uid: SINKS[uid].looker(place) for uid, place in self._places.items()}
        (directory / "letters").mkdir()
        (directory / "lake").mkdir()
        self._lake = directory / "lake"
        self._catalog = catalog_of(self._lake)
        self._ledger, self._mariadb = Ledger(directory / "letters"), mariadb
        self.memory, self._letters = MemorySink(f"{self._name}-memory"), MemorySink(f"{self._name}-letters")
        self.called, self.printed = Called(), io.StringIO()

    def _place(self, directory: Path, servers: Servers, uid: str) -> Place:
        folder, prefix = directory / uid, f"{self._name}."
        folder.mkdir()
        database = servers.database(self._name.replace("-", "_")) if SINKS[uid].needs_postgres else None
        address = servers.broker.bootstrap_servers
        return Place(uid, folder, servers.port, servers.port, address, database, prefix)

    @property
    def topics(self) -> list[str]:
        """The topics that have to be there."""
        return [place.output_topic for uid, place in self._places.items() if uid.startswith("kafka")]

    def make(self, uid: str) -> Sink:
        """Return a sink as a program makes it."""
        if uid in self._places:
            return SINKS[uid].make(self._places[uid])
        own: dict[str, Callable[[], Sink]] = {
            "iceberg": lambda: IcebergSink(
                "lake.shop.totals", catalog_properties(self._lake), create_table=True, partition_by=("user",)
            ),
            "iceberg-upsert": lambda: IcebergSink(
                "lake.shop.newest", catalog_properties(self._lake), create_table=True, mode=Upsert(("user",))
            ),
            "foreach": lambda: ForeachSink(self.called.each),
            "foreach-checkpoint": lambda: ForeachCheckpointSink(self.called.together),
            "letters": lambda: SinkWithDeadLetters(
                self._ledger.sink(picky(sqlite_sink_class(), _REFUSED)), self._letters
            ),
            "memory": lambda: self.memory,
            "print": lambda: PrintSink(_PREFIX),
            "jdbc-mariadb": lambda: self._database.sink(TABLE, create_table=True),
        }
        return own[uid]()

    @property
    def _database(self) -> TestDatabase:
        assert self._mariadb is not None
        return self._mariadb

    def look(self) -> dict[str, Counter[Any]]:
        """Return what readers see, by sink."""
        seen: dict[str, Counter[Any]] = {uid: looker.look() for uid, looker in self._lookers.items()}
        seen["iceberg"] = rows_in(self._catalog.load_table("shop.totals"))
        seen["iceberg-upsert"] = rows_in(self._catalog.load_table("shop.newest"))
        seen["foreach"] = Counter(row for _, row in self.called.rows)
        seen["foreach-checkpoint"] = _all_of(self.called.checkpoints.values())
        letters = [json.loads(letter.record) for letter in self._letters.rows()]
        refused = [(letter["user"], letter["total"], 0) for letter in letters]
        assert all(total % _REFUSED == 0 for _, total, _ in refused)
        assert all(total % _REFUSED for _, total in self._ledger.rows())
        seen["letters"] = Counter([*((*row, 0) for row in self._ledger.rows()), *refused])
        seen["memory"] = Counter(map(tuple, self.memory.rows()))
        lines = [line for line in self.printed.getvalue().splitlines() if line.startswith(_PREFIX)]
        printed = (json.loads(line.removeprefix(_PREFIX)) for line in lines)
        seen["print"] = Counter(tuple(row.values()) for row in printed)
        if self._mariadb is not None:
            rows = self._mariadb.query(f"SELECT `user`, total, orders FROM {TABLE}")
            seen["jdbc-mariadb"] = Counter(map(tuple, rows))
        return seen

    def close(self) -> None:
        for looker in self._lookers.values():
            looker.close()


def expected(uid: str, values: Sequence[bytes]) -> Counter[Any]:
    """Return what readers of a sink must see once these orders are through."""
    if uid in ("delta-upsert", "iceberg-upsert"):
        return newest_totals(values)
    if uid in ("two-phase", "letters"):
        return without_counts(values)
    return expected_totals(values)


def _all_of(parts: Iterable[Iterable[Total]]) -> Counter[Total]:
    return Counter(row for part in parts for row in part)
