"""Settings of the user's session that a job changes while its query starts.

Spark copies a session's settings into a query inside `start()`, and a query must be started in the session
whose `streams` will show it. So the settings must be in the user's session for that moment. Only this module
puts them there, for one start at a time, and gives the user's own values to all readers in this package
meanwhile.
"""

from __future__ import annotations

import itertools
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import SparkNoSuchElementException

from flinkish_spark.bridge.session import (
    BUCKET_CHECKPOINT_FILES,
    LOCAL_CHECKPOINT_FILES,
    TARGET_SETTING,
    UNTIL_SETTING,
    find_hadoop_setting,
    has_checkpoint_files,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.core.store_spec import StoreSpec


_STATE = "spark.sql.streaming.stateStore."
_RETAINED = "spark.sql.streaming.minBatchesToRetain"

#: Settings during the start of a query, when Spark copies the session's settings.
REQUIRED_CONF = {
    # Commits/N names the state files, so a rewind is exact and zombie tasks overwrite nothing.
    _STATE + "providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    _STATE + "checkpointFormatVersion": "2",
    _STATE + "rocksdb.changelogCheckpointing.enabled": "true",
    # A join of two streams then has one store per partition, as every other stateful operator has.
    "spark.sql.streaming.join.stateFormatVersion": "3",
    # Spark refuses several stateful operators because of its watermark, which our operators do not use. Our
    # own check is in `job/preflight.py`.
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.streaming.asyncProgressTrackingEnabled": "false",
    # With the other policy one DataFrame's watermark would make another's rows late.
    "spark.sql.streaming.multipleWatermarkPolicy": "min",
    # The coordinator's backlog limits depend on this number.
    _RETAINED: "200",
    # A micro-batch is cached for a second or two; compressing it costs more than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # The constraints that Spark infers for a value of all columns, such as a record's hash, double with each
    # renamed column: with twenty columns no micro-batch ended. Our plans gain nothing from them.
    "spark.sql.constraintPropagation.enabled": "false",
    # Spark loses the watermark of an aggregate behind an exchange that it takes from another one.
    "spark.sql.exchange.reuse": "false",
    # Adaptive execution could coalesce the partitions to which barriers are routed.
    "spark.sql.adaptive.enabled": "false",
}
#: The class that writes the query's checkpoint files; the user may have set one.
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
#: Hadoop's class for local files, its default, and the same without checksums. Where Hadoop's native library
#: is missing, as it is in PySpark, a new file costs a process (`chmod`), and its checksum another one; a
#: micro-batch without records has six files. Those of the state have checksums of Spark's own.
_LOCAL_FILES = "fs.AbstractFileSystem.file.impl"
_CHECKED, _UNCHECKED = "org.apache.hadoop.fs.local.LocalFs", "org.apache.hadoop.fs.local.RawLocalFs"


SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
_EXCLUDED_RULES = "spark.sql.optimizer.excludedRules"
_REMOVES_AGGREGATES = "org.apache.spark.sql.catalyst.optimizer.RemoveRedundantAggregates"


@dataclass(frozen=True, slots=True)
class _Loan:
    """A borrowed setting: the job's value, and the session's value (None if unset)."""

    session: Any
    name: str
    ours: str
    before: str | None


class SessionSettings:
    """The borrowed settings of this process; its only instance is `SETTINGS`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset locks and loans; for a forked child, which lacks the threads that held them."""
        #: Held while a query starts; reentrant.
        self._turn = threading.RLock()
        #: Held for a few calls only, never while Spark starts a query: a listener that Spark calls during a
        #: start may read settings.
        self._look = threading.RLock()
        self._loans: list[_Loan] = []

    @contextmanager
    def borrow(self, spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
        """Set `wanted`, for one borrower at a time; restore the session's current own values afterwards."""
        with self._turn, ExitStack() as lent:
            # Callbacks of an ExitStack run even if another one raises.
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
        """Change a setting permanently, from its current or default value, as the user has requested."""
        # A server of Spark Connect 4.3 returns no defaults: then `new` gets an empty text.
        with self._look:
            try:
                now = spark.conf.get(name) or ""
            except SparkNoSuchElementException:
                now = ""
            spark.conf.set(name, new(now))

    def find_changed(self, spark: SparkSession, borrowed: Mapping[str, str]) -> list[str]:
        """Return the borrowed settings that another thread has changed."""
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
            # The earlier value of a nested loan is the outer loan's value.
            if loan.name == name and loan.ours == now and loan.session == session:
                now = loan.before
        return now

    def _give_back(self, spark: SparkSession, loan: _Loan) -> None:
        with self._look:
            self._loans.remove(loan)
            if spark.conf.get(loan.name, None) != loan.ours:
                return  # the user has changed it meanwhile
            if loan.before is None:
                spark.conf.unset(loan.name)
            else:
                spark.conf.set(loan.name, loan.before)


def settings_of(spark: SparkSession) -> dict[str, str]:
    # Not with an iterator: Py4J takes an error of the JVM for its end, and settings would be missing.
    conf = getattr(spark.conf, "_jconf", None)
    if conf is None:
        return dict(spark.conf.getAll)
    entries = conf.getAllAsJava().entrySet().toArray()
    return {str(entry.getKey()): str(entry.getValue()) for entry in entries}


#: Prefix of a job's settings among Spark's; spark-submit passes on no other names than Spark's.
JOB_SETTING = "spark.flinkish."


def find_job_settings(spark: Any) -> dict[str, str]:
    if getattr(spark, "_jsparkSession", None) is None:
        return {}
    return _pick_job_settings(settings_of(spark))


def find_submitted_settings() -> dict[str, str]:
    words = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", ""))
    given = [word.partition("=") for flag, word in itertools.pairwise(words) if flag == "--conf"]
    return _pick_job_settings({name: value for name, _, value in given})


def _pick_job_settings(settings: Mapping[str, str]) -> dict[str, str]:
    others = (TARGET_SETTING, UNTIL_SETTING)
    return {
        name: one for name, one in settings.items() if name.startswith(JOB_SETTING) and name not in others
    }


def _identity(spark: SparkSession) -> Any:
    return getattr(spark, "_jsparkSession", spark)


SETTINGS = SessionSettings()
os.register_at_fork(after_in_child=SETTINGS.forget)


#: Additional settings for a job directory in a bucket: there a checkpoint's files stay where Spark wrote them
#: (`checkpoint/retention.py`), and Spark must not delete any.
IN_BUCKETS_CONF = {_RETAINED: "1000000000"}


@contextmanager
def query_conf(
    spark: SparkSession, shuffle_partitions: int, where: StoreSpec | None = None
) -> Iterator[Mapping[str, str]]:
    """Set the query's settings for the block, and yield them; restore the session afterwards."""
    wanted = _choose_settings(spark, shuffle_partitions, where is None or where.is_local)
    with SETTINGS.borrow(spark, wanted):
        yield wanted


def make_session(spark: SparkSession, shuffle_partitions: int) -> SparkSession:
    """Return a new session with the query's settings, for reading a query's files."""
    own = spark.newSession()
    for name, value in _choose_settings(spark, shuffle_partitions, is_on_disk=True).items():
        own.conf.set(name, value)
    return own


def _choose_settings(spark: SparkSession, shuffle_partitions: int, is_on_disk: bool) -> dict[str, str]:
    wanted = {**REQUIRED_CONF, SHUFFLE_PARTITIONS: str(shuffle_partitions)}
    # Spark numbers the operators of the optimised plan, and ours are found in the analysed one.
    excluded = SETTINGS.get(spark, _EXCLUDED_RULES)
    wanted[_EXCLUDED_RULES] = ",".join(filter(None, (excluded, _REMOVES_AGGREGATES)))
    if not is_on_disk:
        wanted |= IN_BUCKETS_CONF
    if (chosen := SETTINGS.get(spark, _FILE_MANAGER)) is not None:
        return {**wanted, _FILE_MANAGER: chosen}
    if has_checkpoint_files(spark):
        return {**wanted, _FILE_MANAGER: LOCAL_CHECKPOINT_FILES if is_on_disk else BUCKET_CHECKPOINT_FILES}
    # A platform may have a class of its own there.
    is_default = find_hadoop_setting(spark, _LOCAL_FILES) == _CHECKED
    is_ours_to_choose = is_default and SETTINGS.get(spark, _LOCAL_FILES) is None
    return {**wanted, _LOCAL_FILES: _UNCHECKED} if is_on_disk and is_ours_to_choose else wanted
