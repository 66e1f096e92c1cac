"""Partitioning of rows over tasks: rebalance, rescale, global and custom partitioners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from pyspark.sql import types as T

from flinkish_spark.bridge.settings import SETTINGS, SHUFFLE_PARTITIONS
from flinkish_spark.core.arrow_pass import map_in_arrow
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.suggestions import describe_choices
from flinkish_spark.core.validation import check_function
from flinkish_spark.functions.keyed import RichFunction
from flinkish_spark.functions.stream import Partitioner
from flinkish_spark.planning.declare import MAX_PARALLELISM_LIMIT, check_can_be_sent, find_callable
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.columns import Origins
from flinkish_spark.types.schemas import PREFIX
from flinkish_spark.worker.functions import AppendColumns, RecordPartitioner, RowFunction

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# A row's target depends on its place, never on a counter or on chance: a task that Spark repeats must send
# the same rows to the same tasks, or rows are lost or doubled if a later task has read the first attempt.
# The place is channel and sequence, so all rows that flat_map made of a record stay together; after a keyed
# operator, where rows have neither, it is the row's number in its task. For the same reason Spark's own
# round robin would have to sort all rows by all columns first.
#
# A task receives shuffled rows in any order. So it sorts them by their position before the shuffle: they are
# in the canonical order again, and steps that depend on the order (a transform that selects its own columns,
# a watermark generator, a sink) see the same order each time.

#: A row's position before the shuffle.
PLACE = f"{PREFIX}place"
#: The partition chosen by a partitioner.
TARGET = f"{PREFIX}target"
_WITH_PLACE = ("*", f"monotonically_increasing_id() AS {PLACE}")
#: Spark's own default for `spark.sql.shuffle.partitions`.
_SPARKS_OWN = 200
_TARGET_FIELDS = T.StructType([T.StructField("partition", T.IntegerType())])


#: A number of tasks.
Parallelism = Annotated[int, Range(1, MAX_PARALLELISM_LIMIT)]
_TASKS = "give one; without it there are as many tasks as shuffle partitions"


@dataclass(frozen=True)
class Rebalance:
    """A shuffle that distributes rows evenly, by a hash of their place."""

    #: Number of tasks; None for the number of shuffle partitions.
    parallelism: Parallelism | None

    def __post_init__(self) -> None:
        check_fields(self, parallelism=_TASKS)

    def __call__(self, frame: DataFrame) -> DataFrame:
        has_place = {C.CHANNEL, C.SEQUENCE} <= set(frame.columns)
        by = (C.CHANNEL, C.SEQUENCE) if has_place else (PLACE,)
        placed = frame.selectExpr(*_WITH_PLACE)
        return _restore_order(placed.repartition(_count_tasks(frame, self.parallelism), *by))


@dataclass(frozen=True)
class Rescale:
    """A merge of several tasks' inputs into fewer tasks, without a shuffle."""

    #: The most tasks; None for the number of shuffle partitions.
    parallelism: Parallelism | None

    def __post_init__(self) -> None:
        check_fields(self, parallelism=_TASKS)

    def __call__(self, frame: DataFrame) -> DataFrame:
        return frame.coalesce(_count_tasks(frame, self.parallelism))


@dataclass(frozen=True)
class CustomPartitioning:
    """A shuffle that sends each row to the task that a function chooses."""

    name: str
    #: From a key and a number of tasks to a task.
    partition: Callable[[Any, int], int]
    #: From a record to its key; or the name of a field.
    key: Callable[[Any], Any] | str
    #: The object to open in each task; None for plain functions.
    rich: RichFunction | None
    #: Number of tasks; None for the number of shuffle partitions.
    parallelism: Parallelism | None
    origins: Origins = field(default_factory=Origins)
    counts_as: str = ""

    def __post_init__(self) -> None:
        check_fields(self, parallelism=_TASKS)

    def replace_origins(self, origins: Origins) -> CustomPartitioning:
        return replace(self, origins=origins)

    def check_key(self, fields: Sequence[str]) -> None:
        if isinstance(self.key, str) and self.key not in fields:
            raise GraphError(
                f"partition_custom() has the key '{self.key}', which the records do not have",
                why=describe_choices(fields, self.key),
                what_to_do="name one of them, or give a function of a record",
            )

    def __call__(self, frame: DataFrame) -> DataFrame:
        tasks = _count_tasks(frame, self.parallelism)
        names = [one for one in frame.columns if not one.startswith(PREFIX)]
        self.check_key(names)
        key = FieldAt(names.index(self.key)) if isinstance(self.key, str) else self.key
        target = RecordPartitioner(self.partition, key, tasks)
        function = RowFunction(self.name, target, self.rich, self.origins, counts_as=self.counts_as)
        worker = AppendColumns(function, frame.schema, _TARGET_FIELDS, (TARGET,))
        placed = map_in_arrow(frame, worker, worker.columns).selectExpr(*_WITH_PLACE)
        # A row that is no record has no target: Spark sends null to the first task.
        return _restore_order(placed.repartitionById(tasks, TARGET)).drop(TARGET)


@dataclass(frozen=True)
class FieldAt:
    """A field of a record by position, since not every field name is a valid attribute name."""

    position: int

    def __call__(self, record: Any) -> Any:
        return record[self.position]


def _restore_order(frame: DataFrame) -> DataFrame:
    return frame.sortWithinPartitions(PLACE).drop(PLACE)


def _count_tasks(frame: DataFrame, parallelism: int | None) -> int:
    if parallelism is not None:
        return parallelism
    spark = frame.sparkSession
    return read_shuffle_partitions(spark) or fit_partitions(spark, MAX_PARALLELISM_LIMIT)


def make_custom_partitioning(partitioner: Any, key: Any, parallelism: int | None) -> CustomPartitioning:
    partition = partitioner.partition if isinstance(partitioner, Partitioner) else partitioner
    if not callable(partition) or isinstance(partition, type):
        raise GraphError(
            f"partition_custom() got a {type(partitioner).__name__} as its partitioner",
            what_to_do="give it a Partitioner, or a function of a key and the number of partitions",
        )
    check_function(partition, "the partitioner of partition_custom()", 2)
    named = getattr(partition, "__name__", type(partitioner).__name__)
    of = type(partitioner).__name__ if isinstance(partitioner, Partitioner) else named
    name = "partition_custom" if of == "<lambda>" else f"partition_custom {of}"
    call, rich = (key, None) if isinstance(key, str) and key else find_callable(key, "partition_custom()")
    check_can_be_sent((partition, call), "of", name)
    return CustomPartitioning(name, partition, call, rich, parallelism)


def shuffle_partitions(spark: SparkSession) -> int:
    return read_shuffle_partitions(spark) or _SPARKS_OWN


def read_shuffle_partitions(spark: SparkSession) -> int | None:
    chosen = SETTINGS.get(spark, SHUFFLE_PARTITIONS)
    return None if chosen is None else int(chosen)


def fit_partitions(spark: SparkSession, most: int) -> int:
    """Return the number of tasks for a session: two per core, and at most Spark's default of 200."""
    return max(1, min(2 * spark.sparkContext.defaultParallelism, _SPARKS_OWN, most))


def check_is_shuffle_partitions(asked: int, partitions: int, what: str) -> None:
    if asked == partitions:
        return
    raise ConfigError(
        f"the parallelism of {what} cannot be {asked}",
        why=f"all keyed operators of a job run in Spark's {partitions} shuffle partitions, by which their "
        "state is stored",
        what_to_do=f'call spark.conf.set("spark.sql.shuffle.partitions", {asked}) before; a job that has '
        "state already moves its key groups when it starts with another number",
    )


def is_partitioning(function: object) -> bool:
    return isinstance(function, Rebalance | Rescale | CustomPartitioning)
