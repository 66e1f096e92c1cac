"""What readers of a sink's system see; nothing here asks the job or shares code with it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import psycopg
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from kafka import TopicPartition
from pyarrow import parquet

from demo.delta_log import DeltaLog
from demo.orders import Total
from demo.topics import consumer_of
from flinkish_spark.core.store_spec import StoreSpec
from tests.crash.sweep.places import PARTITIONS, Database

#: What sinks of databases write into.
TABLE = "totals"
_COLUMNS = '"user", total, orders'


class Looker(Protocol):
    """Sees what a reader may see now; used by one thread."""

    def look(self) -> Counter[Total]:
        """Return all visible rows."""

    def close(self) -> None:
        """Let go of connections."""


class TopicLooker:
    """A read_committed consumer that has read on since it last looked.

    Attributes
    ----------
    by_batch
        Visible rows by the micro-batch that they name.
    """

    def __init__(self, servers: str, topic: str) -> None:
        self._consumer = consumer_of(servers, topic, PARTITIONS)
        self._places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        self._rows: Counter[Total] = Counter()
        self.by_batch: Counter[str] = Counter()

    def look(self) -> Counter[Total]:
        ends = self._consumer.end_offsets(self._places)
        quiet = 0
        # Behind the last record may be markers, which do not move the position: silence ends it, too.
        while quiet < 2 and any(self._consumer.position(place) < ends[place] for place in self._places):
            polled = self._consumer.poll(timeout_ms=200)
            quiet = 0 if polled else quiet + 1
            for records in polled.values():
                for record in records:
                    body = json.loads(record.value)
                    self._rows[body["user"], body["total"], body["orders"]] += 1
                    self.by_batch[dict(record.headers).get("flinkish-batch", b"").decode()] += 1
        return Counter(self._rows)

    def close(self) -> None:
        self._consumer.close()


class DeltaLooker:
    """Follows a table's log; a file's rows are read once."""

    def __init__(self, table: Path) -> None:
        self._table, self._log = table, DeltaLog(table)
        self._files: dict[str, Counter[Total]] = {}
        self._rows: Counter[Total] = Counter()

    def look(self) -> Counter[Total]:
        for version in self._log.new_versions():
            for name in version.removed:
                self._rows.subtract(self._files.pop(name, Counter()))
            for name in version.added:
                self._files[name] = self._read(name)
                self._rows.update(self._files[name])
        return +self._rows

    def _read(self, name: str) -> Counter[Total]:
        content = parquet.ParquetFile(self._table / name).read(columns=["user", "total", "orders"])
        columns = (content.column(column).to_pylist() for column in ("user", "total", "orders"))
        return Counter(zip(*columns, strict=True))

    def close(self) -> None:
        pass


class StoredTableLooker:
    """Reads a table in a bucket, or on HDFS; a file's rows are read once."""

    def __init__(self, table: StoreSpec) -> None:
        self._place = {"table_uri": table.url, "storage_options": table.resolve()}
        self._files: dict[str, Counter[Total]] = {}

    def look(self) -> Counter[Total]:
        try:
            table = DeltaTable(**self._place)
        except TableNotFoundError:
            return Counter()
        content = table.to_pyarrow_dataset()
        rows: Counter[Total] = Counter()
        for fragment in content.get_fragments():
            if fragment.path not in self._files:
                columns = fragment.to_table(content.schema, columns=["user", "total", "orders"]).columns
                own = Counter(zip(*(column.to_pylist() for column in columns), strict=True))
                self._files[fragment.path] = own
            rows.update(self._files[fragment.path])
        return rows

    def close(self) -> None:
        pass


class FilesLooker:
    """Reads files of JSON lines below a folder; those that begin with a dot or an underscore are hidden."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Counter[Total]] = {}

    def look(self) -> Counter[Total]:
        rows: Counter[Total] = Counter()
        for name in self._visible():
            if name not in self._files:
                self._files[name] = self._read(name)
            rows.update(self._files[name])
        return rows

    def _visible(self) -> Iterator[str]:
        """Yield the files; hidden folders are not entered: in them a job makes and removes others."""
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if name[0] not in "._"]
            for name in files:
                if name[0] not in "._":
                    yield str((Path(folder) / name).relative_to(self._folder))

    def _read(self, name: str) -> Counter[Total]:
        lines = (self._folder / name).read_text(encoding="utf-8").splitlines()
        return Counter((row["user"], row["total"], row["orders"]) for row in map(json.loads, lines))

    def close(self) -> None:
        pass


class SqliteLooker:
    """Reads a table of a database file.

    Parameters
    ----------
    columns
        What makes a row of the three that all sinks have.
    """

    def __init__(self, file: str, columns: str = _COLUMNS) -> None:
        self._file, self._rows = file, f"SELECT {columns} FROM {TABLE}"

    def look(self) -> Counter[Total]:
        if not Path(self._file).exists():
            return Counter()
        with closing(sqlite3.connect(f"file:{self._file}?mode=ro", uri=True, timeout=30)) as database:
            there = "SELECT 1 FROM sqlite_master WHERE name = ?"
            if not database.execute(there, (TABLE,)).fetchall():
                return Counter()
            return Counter(database.execute(self._rows).fetchall())

    def close(self) -> None:
        pass


class PostgresLooker:
    """Reads a table of a server's database, each time on a connection of its own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def look(self) -> Counter[Total]:
        url = self._database.url.removeprefix("jdbc:")
        login = {"user": self._database.user, "password": self._database.password}
        with psycopg.connect(url, **login) as connection:
            if not connection.execute("SELECT to_regclass(%s) IS NOT NULL", (TABLE,)).fetchall()[0][0]:
                return Counter()
            return Counter(connection.execute(f"SELECT {_COLUMNS} FROM {TABLE}").fetchall())

    def close(self) -> None:
        pass
