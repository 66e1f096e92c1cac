"""The interface of sources for the planner, the preflight and the confirmation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.errors import GraphError
from flinkish_spark.core.job_dir import BEGINNINGS
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import refuse_unknown_parameters
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.plan_layout import Position
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.contracts.sink import GroupOffsets, Sink
    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.core.offset_log import LoggedOffsets


@dataclass(frozen=True)
class SideOutput:
    uid: str
    frame: DataFrame
    sink: Sink


@dataclass(frozen=True)
class JobPlace:
    """Location of the facts that a job's sources store, for any process of the driver's host."""

    #: The job directory; None for a plan without a job.
    job_dir: StoreSpec | None
    #: File in which the coordinator offers the next checkpoint, in a scratch folder of this process, with
    #: related files beside it. For a plan without a job a file that never exists.
    control_path: str

    def beginnings(self, start: SourceStart | None) -> str:
        """Return the folder with the first offsets of sources: the job's, or that of a seeded lineage.

        Empty for a plan without a job.
        """
        if start is not None:
            return start.folder
        return "" if self.job_dir is None else self.job_dir.to_child(BEGINNINGS).to_text()


#: Place of a plan without a job.
NO_JOB = JobPlace(None, "/nonexistent/no-control")


@dataclass(frozen=True)
class SourceStart:
    """The position where a scan begins in a seeded lineage."""

    #: The position in the savepoint.
    position: Position
    #: The lineage's folder for facts about the source's beginning.
    folder: str
    #: Name of this start, unique among those of the same source in a plan.
    label: str


@dataclass(frozen=True, slots=True)
class Extent:
    """Number of records of an input before a position, for display."""

    #: Records before the position. As with offsets only differences are meaningful, unless `all_records` is
    #: known.
    records: int
    #: Records of a bounded input in total; None if unknown.
    all_records: int | None = None
    #: The same as `records` by partition, for inputs that have some.
    partitions: Mapping[Any, int] = field(default_factory=dict, compare=False)


class Source(ABC):
    """A replayable input. All methods are called on the driver."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse misspelt parameters."""
        refuse_unknown_parameters(cls, settings)
        return super().__new__(cls)

    #: Kafka topics it reads; empty for others.
    topics: tuple[str, ...] = ()
    #: Instead of topics, a regular expression for full names of topics; empty for others.
    topic_pattern: str = ""
    #: Whether ``_fs_channel`` identifies the same input in every micro-batch.
    has_channels: bool = True
    #: The mode in which Spark's own aggregates in it return rows: each once it is final, or each change.
    output_mode: str = "append"
    #: Kind of its positions; part of savepoints.
    kind: str = "dataframe"

    def bind(self, uid: str) -> Source:
        """Return the source for a uid: this one or a replacement; called before anything else."""
        return self

    @property
    def is_bounded(self) -> bool:
        """Return whether it can end. A job ends when all of its sources have ended."""
        return False

    def has_ended(self, position: LoggedOffsets) -> bool:
        """Return whether a bounded source will never have records after `position`.

        Called after each micro-batch, in the query's thread, with its end offsets.
        """
        return False

    def newest(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> Any:
        """Return where the input ends now, as :meth:`has_reached` takes it; no query of the job runs.

        `position` is how far the job has read; None before its first micro-batch. A source that does not
        override this cannot be read until a job has caught up.
        """
        raise NotImplementedError

    @property
    def has_ends(self) -> bool:
        """Return whether :meth:`newest` can say where the input ends."""
        return type(self).newest is not Source.newest

    def has_reached(self, end: Any, position: LoggedOffsets) -> bool:
        """Return whether `position` lies at or behind an end that :meth:`newest` returned."""
        raise NotImplementedError

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return the number of records before a position (None: where a new job begins); in any thread.

        None if the source would have to ask a system for it.
        """
        return None

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the data sets it reads, for lineage tools; empty if other systems do not know them."""
        return ()

    def add_own_time(self) -> Source | None:
        """Return a copy with each record's time (ms) in ``_fs_time``; None if records have no time."""
        return None

    def channels_in(self, position: LoggedOffsets) -> frozenset[int] | None:
        """Return the channels (``_fs_channel``) that may still have records after `position`.

        The watermark waits for channels without records. None: channels are known from their first record.
        """
        return None

    def check_alignable(self, uid: str) -> None:
        """Raise GraphError for a source that cannot hold back channels for watermark alignment.

        Other sources read the control file (`checkpoint/control.py`) before they return new offsets.
        """
        raise GraphError(
            f"the source '{uid}' cannot be aligned with others",
            why="Spark's own reader reads it, which cannot hold back channels that are ahead",
            what_to_do="read files with FileSource, a Delta table with DeltaSource, "
            "Kafka with KafkaSource(...); or leave with_watermark_alignment() out",
        )

    @property
    def is_positionable(self) -> bool:
        """Return whether :meth:`starting_at` can start it at the position of a savepoint."""
        return False

    def starting_at(self, start: SourceStart) -> Source:
        """Return a copy that begins at `start` in a query without an offset log.

        Called once per scan with another start, at each start of the query. Inputs that are missing in the
        position were added since; they are read from their beginning.
        """
        return self

    def check_start(self, uid: str, position: Position) -> None:
        """Raise InputLostError if input after a savepoint's position is gone. Called before a restore."""

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return the recorded identity of the job's input, for savepoints.

        Keys are names of `JobDir.record_fact`; with them a restored job detects a replaced input.
        """
        return {}

    @property
    def is_checked_apart(self) -> bool:
        """Return whether preflight and :meth:`check_retention` may run in parallel to planning.

        Only if they do not use Spark, and change nothing that planning reads.
        """
        return False

    @property
    def has_side_outputs(self) -> bool:
        """Return whether :meth:`side_outputs` returns any."""
        return False

    @property
    def plan_name(self) -> str:
        """Return a name that distinguishes alternative plans of the source; recorded with the job."""
        return ""

    @property
    def drops_records(self) -> bool:
        """Return whether it skips bad records and counts them in an observed metric."""
        return False

    @abstractmethod
    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream: own columns, ``_fs_channel``, ``_fs_seq``. Called at each start of the query."""

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame | None:
        """Return the stream with barriers, instead of :meth:`load`, if the source injects them itself.

        It has own columns and the control columns kind, checkpoint, channel, sequence. The channel of each
        barrier also encodes the number of channels (`protocol/alignment.py`).
        """
        return None

    def list_uids(self, uid: str) -> tuple[str, ...]:
        """Return the uids under which the job stores facts about its input: its own or those of its parts."""
        return (uid,)

    def side_uids(self, uid: str) -> tuple[str, ...]:
        """Return the uids of :meth:`side_outputs` without planning them."""
        return ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return dead-letter streams; their sinks copy missing settings from `peers`, the user's sinks."""
        return ()

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Check the settings before anything starts. Called once per process."""

    def check_retention(self, uid: str, needed_ms: int) -> None:
        """Raise ConfigError if the input does not retain its records for `needed_ms`.

        This is interval + restart budget: the time after which a record may have to be read again.
        """

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Raise InputLostError if input after `position` is gone. Called before each start."""

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Raise InputLostError if the input is not the one that the job began with.

        Called in the query's thread, after the records of a checkpoint were read and before it can be
        decided, so records of a replaced input are never committed.
        """

    def group_offsets(self, position: LoggedOffsets) -> GroupOffsets | None:
        """Return the offsets of :meth:`commit_offsets`, for a sink that commits them with its records.

        :meth:`commit_offsets` is called after the sinks all the same, and then changes nothing.
        """
        return None

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Commit offsets: all records before `position` are committed in every sink.

        Called once per checkpoint after the last sink and before the receipt, so again after a crash between
        the two; must be idempotent. Stores the job's mark (`note`) with the offsets if the system can, and
        returns the committed offsets for the receipt: group -> topic -> partition -> offset. The call is
        repeated after a restartable EnvironmentFault.
        """
        return {}

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        """Return the newest mark of `job` that :meth:`commit_offsets` stored; called after every takeover.

        Empty if the system stores none. The call is repeated after a restartable EnvironmentFault.
        """
        return ()

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set the committed offsets to `position`, also to lower ones; must be idempotent.

        Called during an ordered rewind, while no query runs. The call is repeated after a restartable
        EnvironmentFault.
        """


@dataclass(frozen=True, eq=False)
class SourceNode:
    uid: str
    source: Source
