"""The checkpoint of a plain Spark query, as far as a job can go on from it; what no job can is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flinkish_spark.checkpoint.state_files import StateOnDisk, StoreVersion
from flinkish_spark.checkpoint.state_transfer import StoreContent, read_hdfs_backed, read_rocksdb
from flinkish_spark.core.errors import CorruptObjectError, JobDirError
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, SINKS, STATE

_STREAMING = "spark.sql.streaming."
PROVIDER, PARTITIONS = f"{_STREAMING}stateStore.providerClass", "spark.sql.shuffle.partitions"
_PROVIDERS = "org.apache.spark.sql.execution.streaming.state."
ROCKSDB, _HDFS_BACKED = f"{_PROVIDERS}RocksDBStateStoreProvider", f"{_PROVIDERS}HDFSBackedStateStoreProvider"
#: Spark takes these from its log and not from the session: what a job can run with.
_REQUIRED = {
    PROVIDER: (ROCKSDB, _HDFS_BACKED),
    f"{_STREAMING}stateStore.compression.codec": ("lz4",),
    f"{_STREAMING}multipleWatermarkPolicy": ("min",),
}
_BEGIN_ANEW = "begin a new job from the query's input, or leave the query as it is"
T = TypeVar("T")


def refuse(what: str, why: str, what_to_do: str) -> JobDirError:
    return JobDirError(what, why=why, what_to_do=what_to_do)


@dataclass(frozen=True, slots=True)
class StatefulOperator:
    number: int
    #: The name that Spark gave to it.
    name: str
    stores: int
    partitions: int
    #: How many columns the rows of a key have in common; 0 for most operators.
    prefix: int
    #: Whether its metadata is of a micro-batch; and the text of it.
    has_batches: bool
    metadata: str


@dataclass(frozen=True, slots=True)
class PlainQuery:
    place: Path
    #: The newest micro-batch, which is committed.
    batch: int
    #: Its entries in the logs; the positions are one per source.
    facts: Mapping[str, Any]
    conf: Mapping[str, str]
    positions: tuple[str, ...]
    commit: Mapping[str, Any]
    operators: tuple[StatefulOperator, ...]

    def read_store(self, operator: StatefulOperator, partition: int) -> StoreContent:
        ids = (self.commit.get("stateUniqueIds") or {}).get(str(operator.number))
        unique_id = "" if ids is None else str(ids[partition][0])
        store = StoreVersion(f"{operator.number}/{partition}", self.batch + 1, unique_id)
        read = read_hdfs_backed if self.conf[PROVIDER] == _HDFS_BACKED else read_rocksdb
        return read(StateOnDisk(self.place / STATE), store)

    def check_unchanged(self) -> None:
        """Refuse a query that has run while its checkpoint was read."""
        if _find_newest(self.place / OFFSETS) != self.batch:
            raise refuse(
                f"the query of {self.place} runs",
                "it planned a micro-batch while its checkpoint was read",
                "stop it, and run the command again",
            )


def _find_newest(folder: Path, upto: float = float("inf")) -> int | None:
    names = [path.name for path in folder.glob("*")]
    return max((int(name) for name in names if name.isdecimal() and int(name) <= upto), default=None)


def read_plain_query(place: Path) -> PlainQuery:
    """Read the checkpoint of a query that is stopped; raise JobDirError if no job can go on from it."""
    planned, committed = _find_newest(place / OFFSETS), _find_newest(place / COMMITS)
    if not (place / "metadata").is_file() or planned is None:
        raise refuse(
            f"{place} is not the checkpoint of a Spark query that has run",
            "it lacks the file metadata, or an entry in offsets",
            "give the checkpointLocation of the query",
        )
    if (place / SINKS).is_dir():
        raise refuse(
            f"the query of {place} writes to sinks of flinkish_spark",
            "its last micro-batch may be decided there and not visible yet",
            "leave the query as it is: its sinks commit together already",
        )
    if planned != committed:
        raise refuse(
            f"micro-batch {planned} of the query of {place} was planned and is not committed",
            "nobody knows whether its sink has taken its rows",
            "start the query once more with trigger(availableNow=True), let it end, and run this again",
        )
    log, commits = place / OFFSETS / str(planned), place / COMMITS / str(planned)
    version, _, body = log.read_text(encoding="utf-8").strip().partition("\n")
    if version != "v1":
        raise refuse(
            f"the query of {place} names its sources",
            f"its offset log has the form {version}, and a job finds positions by their order",
            _BEGIN_ANEW,
        )
    facts, *positions = body.split("\n")
    commit = commits.read_text(encoding="utf-8").partition("\n")[2].strip()
    operators = tuple(read_operators(place, planned))
    parsed, conf = _parse(facts, log, lambda body: (body, dict(body["conf"])))
    of_commit = _parse(commit or "{}", commits, dict)
    query = PlainQuery(place, planned, parsed, conf, tuple(positions), of_commit, operators)
    if operators:
        _check_state(query)
    return query


def read_operators(place: Path, batch: int) -> list[StatefulOperator]:
    """Return the operators with state, from their metadata after a micro-batch."""
    state, found = place / STATE, []
    for number in sorted(int(folder.name) for folder in state.glob("*") if folder.name.isdecimal()):
        folder = state / str(number) / "_metadata"
        newest = _find_newest(folder / "v2", batch)
        path = folder / "metadata" if newest is None else folder / "v2" / str(newest)
        if not path.is_file():
            raise refuse(
                f"Spark's state in {state / str(number)} does not say which operator it belongs to",
                "the query was begun before Spark 3.5",
                _BEGIN_ANEW,
            )
        text = path.read_text(encoding="utf-8")
        body = _parse(text.partition("\n")[2], path, dict)
        stores = body["stateStoreInfo"]
        partitions, prefix = int(stores[0]["numPartitions"]), int(stores[0].get("numColsPrefixKey", 0))
        name = str(body["operatorInfo"]["operatorName"])
        by_batch = newest is not None
        found.append(StatefulOperator(number, name, len(stores), partitions, prefix, by_batch, text))
    return found


def _check_state(query: PlainQuery) -> None:
    for name, wanted in _REQUIRED.items():
        if (found := query.conf.get(name, wanted[0])) not in wanted:
            raise refuse(
                f"the query runs with {name} = {found}",
                f"Spark takes this from the query's log, and a job goes on from {' or '.join(wanted)}",
                _BEGIN_ANEW,
            )
    has_checksums = query.conf.get(f"{_STREAMING}stateStore.rowChecksum.enabled", "false") != "false"
    for one in query.operators:
        if one.stores > 1:
            raise refuse(
                f"{one.name}, a join of two streams, keeps its state in {one.stores} stores per partition",
                "a job needs format 3 of this state, which has one store",
                f"{_BEGIN_ANEW}; a query that began with {_STREAMING}join.stateFormatVersion=3 and RocksDB "
                "can be adopted",
            )
        if query.conf.get(PROVIDER) == _HDFS_BACKED and (one.prefix or has_checksums):
            raise refuse(
                f"the state of {one.name} cannot be moved from the HDFS-backed provider to RocksDB",
                "RocksDB keeps the first columns of its keys apart"
                if one.prefix
                else "its rows have checksums",
                f"{_BEGIN_ANEW}; a query that began with {PROVIDER}={ROCKSDB} can be adopted",
            )


def _parse(text: str, path: Path, read: Callable[[dict[str, Any]], T]) -> T:
    try:
        return read(json.loads(text))
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptObjectError(
            f"the file {path} cannot be read",
            why=f"{type(error).__name__}: {error}",
            what_to_do="restore it from a backup, or give another checkpoint",
        ) from error
