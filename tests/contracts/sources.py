"""Every source of this package, what is put into each, and what a job over all of them must make of it."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import functions as F

from flinkish_spark import Json, KafkaSource, StreamExecutionEnvironment
from flinkish_spark.connectors.socket import SocketLogReader
from flinkish_spark.sources import (
    CollectionSource,
    Counting,
    DataGeneratorSource,
    DeltaChanges,
    DeltaSource,
    DeltaTableSource,
    Discovery,
    FileSource,
    HybridSource,
    IcebergSource,
    KafkaRecordsSource,
    RateLimit,
    SocketTextSource,
    TextLines,
)
from tests.crash.sources_app import Books
from tests.support import effort
from tests.support.iceberg_rig import catalog_of, catalog_properties
from tests.support.jobs import produce

#: Uids of those that have a place in savepoints; they are read by one operator.
POSITIONED = (
    "kafka", "kafka-records", "files", "delta-feed", "delta-rows", "delta-table", "iceberg",
    "generator", "collection", "hybrid", "own",
)  # fmt: skip
#: Spark's own reader, which cannot be told where to begin: a restored job reads its input anew.
BEGINNING_ANEW = ("dataframe",)
UIDS = (*POSITIONED, *BEGINNING_ANEW, "socket")
#: They end; what they had at the first start is all there is.
BOUNDED = ("delta-table", "generator", "collection")
#: By day these are parts of the hybrid source, in this order behind its history: each source of its own costs
#: a process per start of the query. By night they stand alone.
PARTS = () if effort.is_night else ("delta-table", "collection", "kafka-records")

#: What is put into a growing source at a time, and what a bounded one has.
LINES = 6
PARTITIONS = 2
#: So that a bounded source, or what is in front of the last part of another, takes several micro-batches.
_SLOW, _LESS_SLOW = RateLimit(records_per_batch=LINES // 2), RateLimit(records_per_batch=2 * LINES)

#: Whose values are objects of JSON.
_DECODED = ("kafka",)
#: Whose rows have a field of that name.
_LINES = ("delta-feed", "delta-rows", "iceberg")

#: Lines by where they come from, in their order.
Lines = dict[str, list[str]]


class Peer(threading.Thread):
    """Sends lines to whoever has connected last."""

    def __init__(self) -> None:
        super().__init__(name="peer", daemon=True)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._changed = threading.Condition()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # Closed.
            with self._changed:
                self._connections.append(connection)
                self._changed.notify_all()

    def send(self, lines: Sequence[str], connection: int) -> None:
        """Send by a connection, by number from 1, or a later one, when it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._connections) >= connection, 120)
            self._connections[-1].sendall("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in self._connections:
            connection.close()


class Inputs:
    """The input of every source, which grows in rounds.

    Parameters
    ----------
    topic
        Makes a topic with so many partitions.
    """

    def __init__(self, spark: Any, directory: Path, servers: str, topic: Callable[[int], str]) -> None:
        self._spark, self._directory, self._servers = spark, directory, servers
        self._topics = {uid: topic(PARTITIONS) for uid in UIDS if uid.startswith("kafka")}
        if not PARTS:
            self._topics["hybrid"] = topic(1)
        self._rounds, self._counts = 0, Counter[str]()
        #: All that each source has by now.
        self.lines: dict[str, Lines] = {uid: defaultdict(list) for uid in UIDS}
        self.peer = Peer()
        self.peer.start()
        for name in ("files", "history", "books"):
            self._folder(name).mkdir()
        properties = "'delta.enableChangeDataFeed'='true', 'delta.enableDeletionVectors'='false'"
        for name in ("table", "old-table"):
            column = "line" if name == "table" else "value"
            self._sql(name, f"CREATE TABLE {{}} ({column} STRING) USING delta TBLPROPERTIES ({properties})")
        self._folder("lake").mkdir()
        self._catalog = catalog_of(self._folder("lake"))
        self._catalog.create_table("shop.lines", pa.schema([("line", pa.string())]))
        self._write_bounded()

    def _folder(self, name: str) -> Path:
        return self._directory / name

    def _sql(self, name: str, statement: str) -> None:
        self._spark.sql(statement.format(f"delta.`{self._folder(name)}`"))

    def _write_bounded(self) -> None:
        for uid in BOUNDED:
            if uid == "generator":
                for number in range(LINES):
                    self.lines[uid][str(number % PARTITIONS)].append(str(number))
            else:
                self.lines[uid]["all"] = [f"{uid} {number}" for number in range(LINES)]
        self._append("old-table", self.lines["delta-table"]["all"])
        history = [f"history {number}" for number in range(LINES)]
        self._put(self._folder("history"), "0.txt", history)
        self.lines["hybrid"]["all"] += history

    # -- growing ----------------------------------------------------------------------------------
    def grow(self) -> None:
        """Put more into every source that grows, but for the socket."""
        number, self._rounds = self._rounds, self._rounds + 1
        for uid, topic in self._topics.items():
            self._produce(uid, topic, 1 if uid == "hybrid" else PARTITIONS)
        lines = self._next("files", LINES)
        self._put(self._folder("files"), f"{number}.txt", lines)
        self._add(["files", "dataframe"], "all", lines)
        lines = self._next("delta", LINES)
        self._append("table", lines)
        self._add(["delta-feed", "delta-rows"], "all", lines)
        lines = self._next("iceberg", LINES)
        self._catalog.load_table("shop.lines").append(pa.table({"line": lines}))
        self._add(["iceberg"], "all", lines)
        # A split more in every round.
        for book in range(number + 1):
            lines = self._next(f"book-{book}", LINES // 2)
            with (self._folder("books") / f"book-{book}").open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
            self._add(["own"], f"book-{book}", lines)

    def send(self, connection: int) -> None:
        """Send lines over the socket, by a connection of that number."""
        lines = self._next("socket", LINES)
        self.peer.send(lines, connection)
        self._add(["socket"], "all", lines)

    def received(self, job: Path) -> int:
        """Return how many lines have come over the socket, as the first job's log has them."""
        log = SocketLogReader(job / "sources" / "socket")
        return sum(1 for _ in log.read(0, log.advance(0, None)))

    def _next(self, name: str, count: int) -> list[str]:
        """Return lines that were not there before."""
        self._counts[name] += count
        return [f"{name} {place}" for place in range(self._counts[name] - count, self._counts[name])]

    def _add(self, uids: Sequence[str], origin: str, lines: Sequence[str]) -> None:
        for uid in uids:
            self.lines[uid][origin] += lines

    def _produce(self, uid: str, topic: str, partitions: int) -> None:
        for partition in range(partitions):
            lines = self._next(f"{uid} {partition}", LINES // partitions)
            values = [_as_json(line) if uid in _DECODED else line.encode() for line in lines]
            produce(self._servers, topic, values, partition=partition)
            self._add([uid], "all" if uid == "hybrid" else str(partition), lines)

    def _put(self, folder: Path, name: str, lines: Sequence[str]) -> None:
        """Let a file appear at once."""
        (folder / f".{name}").write_text("".join(f"{line}\n" for line in lines))
        (folder / f".{name}").rename(folder / name)

    def _append(self, table: str, lines: Sequence[str]) -> None:
        values = ", ".join(f"('{line}')" for line in lines)
        self._sql(table, f"INSERT INTO {{}} SELECT /*+ COALESCE(1) */ * FROM VALUES {values}")

    # -- the program ------------------------------------------------------------------------------
    def streams(
        self, env: StreamExecutionEnvironment, uids: Iterable[str], socket_uid: str
    ) -> Iterator[tuple[str, Any]]:
        """Add the sources to a job; yield their streams, with the fields source, origin and line."""
        for uid in uids:
            known = socket_uid if uid == "socket" else uid
            if uid == "dataframe":
                files = env.spark.readStream.text(str(self._folder("files")))
                stream = env.from_dataframe(files, uid=known)
            else:
                stream = env.from_source(self._source(uid), uid=known)
            yield uid, stream.transform(_with_origin(uid))

    def _source(self, uid: str) -> Any:
        if uid in _DECODED:
            value, metadata = Json("line STRING"), ["partition"]
            return KafkaSource(self._servers, [self._topics[uid]], value=value, metadata=metadata)
        folder, table = str(self._folder("files")), str(self._folder("table"))
        history = FileSource(str(self._folder("history")), TextLines(), "value STRING")
        every_ms = {"discovery": Discovery.CONTINUOUS, "discover_every_ms": 200}
        made: dict[str, Callable[[], Any]] = {
            "kafka-records": lambda: KafkaRecordsSource(self._servers, [self._topics[uid]]),
            "files": lambda: FileSource(folder, TextLines(), "value STRING", **every_ms),
            "delta-feed": lambda: DeltaSource(table, DeltaChanges.FEED, starting_version=0),
            "delta-rows": lambda: DeltaSource(table),
            "delta-table": lambda: DeltaTableSource(str(self._folder("old-table"))),
            "iceberg": lambda: IcebergSource(
                "lake.shop.lines", catalog_properties(self._folder("lake")), discover_every_ms=200
            ),
            "generator": lambda: DataGeneratorSource(
                {"id": Counting()}, records=LINES, splits=PARTITIONS, rate=_SLOW
            ),
            "collection": lambda: CollectionSource(self.lines[uid]["all"], "value STRING"),
            "hybrid": lambda: HybridSource(history, *map(self._source, PARTS or ("own-topic",))).limit_rate(
                _LESS_SLOW
            ),
            "own-topic": lambda: KafkaRecordsSource(self._servers, [self._topics["hybrid"]]),
            "own": lambda: self.books,
            "socket": lambda: SocketTextSource("127.0.0.1", self.peer.port, max_retries=100),
        }
        return made[uid]()

    @property
    def books(self) -> Books:
        """The source of one's own, whose notes of checkpoints lie beside its input."""
        return Books(self._folder("books"))

    def told(self) -> dict[str, int]:
        """Return up to where the books were told that their lines are committed."""
        notes = (self._folder("books") / "told").read_text().splitlines()
        return [offsets for what, offsets in map(json.loads, notes) if what == "committed"][-1]


def _as_json(line: str) -> bytes:
    return json.dumps({"line": line}).encode()


def _with_origin(uid: str) -> Callable[[Any], Any]:
    """Return what gives records of a source the fields of all; an origin is what keeps an order."""
    source = F.lit(uid)
    if uid in _DECODED:
        origin, line = F.col("_partition").cast("string"), F.col("line")
    elif uid == "generator":
        origin, line = (F.col("id") % PARTITIONS).cast("string"), F.col("id").cast("string")
    elif uid == "own":
        origin, line = F.col("origin"), F.col("line")
    else:
        origin, line = F.lit("all"), F.col("line" if uid in _LINES else "value")
    if uid in ("hybrid", "kafka-records"):
        # Lines of parts begin with their names, those of Kafka's go on with their partitions.
        words = F.split(line, " ")
        source = F.when(words[0].isin(*PARTS, "kafka-records"), words[0]).otherwise(source)
        origin = F.when(words[0] == "kafka-records", words[1]).otherwise(origin)

    def with_origin(frame: Any) -> Any:
        rows = frame.where("_change_type = 'insert'") if "_change_type" in frame.columns else frame
        return rows.select(source.alias("source"), origin.alias("origin"), line.alias("line"))

    return with_origin
