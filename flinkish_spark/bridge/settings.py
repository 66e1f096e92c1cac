"""Settings of a session that a job borrows while its query starts, and that belong to somebody else.

Spark copies a session's settings into a query inside `start()`, and a query can be started in no other
session than the one whose `streams` are to show it. So they have to stand in the user's session for that
moment. Here is the one place that puts them there: one start after the other, and everybody of this package
who asks meanwhile is told what the owner of the session has set.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import SparkNoSuchElementException

from flinkish_spark.bridge.session import (
    BUCKET_CHECKPOINT_FILES,
    LOCAL_CHECKPOINT_FILES,
    has_checkpoint_files,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.core.store_spec import StoreSpec


_STATE = "spark.sql.streaming.stateStore."
_RETAINED = "spark.sql.streaming.minBatchesToRetain"

#: Set only while the query starts: Spark copies the session's settings then.
REQUIRED_CONF = {
    # State files are named by commits/N, so a rewind is exact and zombie tasks overwrite nothing.
    _STATE + "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    _STATE + "checkpointFormatVersion": "2",
    _STATE + "rocksdb.changelogCheckpointing.enabled": "true",
    # Spark refuses several keyed operators; what it would protect from does not occur, since no
    # operator of ours uses Spark's watermark. Our own check is in `job/preflight.py`.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.streaming.asyncProgressTrackingEnabled": "false",
    # The coordinator's backlog limits are set against this number.
    _RETAINED: "200",
    # A micro-batch is cached for a second or two; compressing it costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # What Spark derives from a value that is made of all columns, as a record's hash is, doubles with each
    # column that is named again: with twenty of them no micro-batch ended. No plan of ours gains by it.
    "spark.sql.constraintPropagation.enabled": "false",
    # An adaptive plan could coalesce the partitions that barriers are routed to.
    "spark.sql.adaptive.enabled": "false",
}
#: Which class writes the query's checkpoint files; a user may have named one.
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"


@dataclass(frozen=True, slots=True)
class _Loan:
    """One setting, as a job needs it and as the session had it; None for not set."""

    session: Any
    name: str
    ours: str
    before: str | None


class SessionSettings:
    """Keeps what is borrowed in this process, in one object: `SETTINGS`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew; in a forked child, where the threads that held something are not."""
        #: Held while a query starts. The thread that has it may borrow again.
        self._turn = threading.RLock()
        #: Held for a few calls only, never while Spark starts something: a listener that Spark calls in
        #: the middle of a start may ask for settings.
        self._look = threading.RLock()
        self._loans: list[_Loan] = []

    @contextmanager
    def borrow(self, spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
        """Set `wanted`, one borrower at a time, and give the session back as its owner has it by then."""
        with self._turn, ExitStack() as lent:
            # Callbacks run even if another of them raises.
            with self._look:
                for name, value in wanted.items():
                    loan = _Loan(_identity(spark), name, value, spark.conf.get(name, None))
                    lent.callback(self._give_back, spark, loan)
                    self._loans.append(loan)
                    spark.conf.set(name, value)
            yield

    def get(self, spark: SparkSession, name: str) -> str | None:
        with self._look:
            return self._owners(spark, name, spark.conf.get(name, None))

    def change(self, spark: SparkSession, name: str, new: Callable[[str], str]) -> None:
        """Change a setting for good, by what it is now or by default; for what a user has asked for."""
        # A server of Spark Connect 4.3 tells no defaults: then `new` is given an empty text.
        with self._look:
            try:
                now = spark.conf.get(name) or ""
            except SparkNoSuchElementException:
                now = ""
            spark.conf.set(name, new(now))

    def find_changed(self, spark: SparkSession, borrowed: Mapping[str, str]) -> list[str]:
        """Return which of the settings that are borrowed somebody else has changed."""
        with self._look:
            return [name for name, value in borrowed.items() if spark.conf.get(name, None) != value]

    def all(self, spark: SparkSession) -> dict[str, str]:
        with self._look:
            found = settings_of(spark)
            asked = {name: self._owners(spark, name, value) for name, value in found.items()}
        return {name: value for name, value in asked.items() if value is not None}

    def _owners(self, spark: SparkSession, name: str, now: str | None) -> str | None:
        if not self._loans:
            return now
        session = _identity(spark)
        for loan in reversed(self._loans):
            # A loan within a loan has the outer one's value as what was before.
            if loan.name == name and loan.ours == now and loan.session == session:
                now = loan.before
        return now

    def _give_back(self, spark: SparkSession, loan: _Loan) -> None:
        with self._look:
            self._loans.remove(loan)
            if spark.conf.get(loan.name, None) != loan.ours:
                return  # the owner has changed it meanwhile
            if loan.before is None:
                spark.conf.unset(loan.name)
            else:
                spark.conf.set(loan.name, loan.before)


def settings_of(spark: SparkSession) -> dict[str, str]:
    # Not by an iterator: Py4J takes an error of the JVM there for the end, and settings would be missing.
    conf = getattr(spark.conf, "_jconf", None)
    if conf is None:
        return dict(spark.conf.getAll)
    entries = conf.getAllAsJava().entrySet().toArray()
    return {str(entry.getKey()): str(entry.getValue()) for entry in entries}


def _identity(spark: SparkSession) -> Any:
    return getattr(spark, "_jsparkSession", spark)


SETTINGS = SessionSettings()
os.register_at_fork(after_in_child=SETTINGS.forget)


#: Set beside them where the job directory is in a bucket: there a checkpoint's files stay where Spark wrote
#: them (`checkpoint/retention.py`), and Spark must not delete any.
IN_BUCKETS_CONF = {_RETAINED: "1000000000"}


@contextmanager
def query_conf(
    spark: SparkSession, shuffle_partitions: int, where: StoreSpec | None = None
) -> Iterator[Mapping[str, str]]:
    """Set what the query needs, and give the session back as it was; yields what was set."""
    wanted = _choose_settings(spark, shuffle_partitions, where is None or where.is_local)
    with SETTINGS.borrow(spark, wanted):
        yield wanted


def session_of_its_own(spark: SparkSession, shuffle_partitions: int) -> SparkSession:
    """Return a new session with what a query needs, in which Spark reads what a query has written."""
    own = spark.newSession()
    for name, value in _choose_settings(spark, shuffle_partitions, is_on_disk=True).items():
        own.conf.set(name, value)
    return own


def _choose_settings(spark: SparkSession, shuffle_partitions: int, is_on_disk: bool) -> dict[str, str]:
    wanted = {**REQUIRED_CONF, SHUFFLE_PARTITIONS: str(shuffle_partitions)}
    if not is_on_disk:
        wanted |= IN_BUCKETS_CONF
    chosen = SETTINGS.get(spark, _FILE_MANAGER)
    if chosen is None and has_checkpoint_files(spark):
        chosen = LOCAL_CHECKPOINT_FILES if is_on_disk else BUCKET_CHECKPOINT_FILES
    return wanted if chosen is None else {**wanted, _FILE_MANAGER: chosen}
