"""What the planner, the preflight and the confirmation need of a source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """Records that leave a source beside its stream, with the sink that takes them."""

    uid: str
    frame: DataFrame
    sink: Sink


@dataclass(frozen=True)
class JobPlace:
    """The place where a job's sources find their facts, in any process of the driver's host."""

    #: The job directory; None for a plan that belongs to no job.
    job_dir: StoreSpec | None
    #: File in which the coordinator offers the next checkpoint, in a scratch folder of this process; files
    #: of the same name lie beside it. For a plan that belongs to no job a file that is never there.
    control_path: str

    def beginnings(self, start: SourceStart | None) -> str:
        """Return where is kept at which offsets a source began: the job's, or of the lineage that it began.

        Empty for a plan that belongs to no job.
        """
        if start is not None:
            return start.folder
        return "" if self.job_dir is None else self.job_dir.to_child(BEGINNINGS).to_text()


#: A plan that belongs to no job.
NO_JOB = JobPlace(None, "/nonexistent/no-control")


@dataclass(frozen=True)
class SourceStart:
    """Where a scan begins in a lineage that was seeded."""

    #: As the source of the savepoint logged it.
    position: Position
    #: The lineage's own folder for what a source has to note about its beginning.
    folder: str
    #: Tells this start from others of the same source in the same plan.
    label: str


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of an input lies before a position, for people."""

    #: Before it. Counted from anywhere, as offsets are: only differences mean something, unless
    #: `all_records` is known.
    records: int
    #: Before the end of a bounded input; None where that is not known.
    all_records: int | None = None


class Source(ABC):
    """A replayable input. All methods are called on the driver, in the user's process."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuse a parameter that is misspelt."""
        refuse_unknown_parameters(cls, settings)
        return super().__new__(cls)

    #: Kafka topics it reads; empty for others.
    topics: tuple[str, ...] = ()
    #: In place of topics, a regular expression that the whole name of each matches; empty for others.
    topic_pattern: str = ""
    #: Whether ``_fs_channel`` means the same in every micro-batch.
    has_channels: bool = True
    #: What its positions are positions in; part of savepoints.
    kind: str = "dataframe"

    def bound(self, uid: str) -> Source:
        """Return the source with that uid, this one or the one that it stands for; before anything else."""
        return self

    @property
    def is_bounded(self) -> bool:
        """Whether it can come to an end. A job ends when all of its sources have."""
        return False

    def has_ended(self, position: LoggedOffsets) -> bool:
        """Whether a bounded source has nothing behind `position`, now and for ever.

        Called behind each micro-batch, in the query's thread, with the offsets that it was read up to.
        """
        return False

    def newest(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> Any:
        """Return where the input ends now, as :meth:`has_reached` takes it; no query of the job runs.

        `position` is how far the job has read; None before its first micro-batch. A source that does not
        override this cannot be read until a job has caught up.
        """
        raise NotImplementedError

    def has_reached(self, end: Any, position: LoggedOffsets) -> bool:
        """Return whether `position` lies at or behind an end that :meth:`newest` returned."""
        raise NotImplementedError

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return how much lies before a position (None: where a new job begins); in any thread.

        None where a source cannot say it without asking a system.
        """
        return None

    def datasets(self) -> tuple[Dataset, ...]:
        """Return what it reads, for who follows data through systems; empty where nobody else knows it."""
        return ()

    def with_own_time(self) -> Source | None:
        """Return this source with each record's time (ms) in ``_fs_time``; None if they have none."""
        return None

    def channels_in(self, position: LoggedOffsets) -> frozenset[int] | None:
        """Return the channels that may still bring records behind `position`: numbers in ``_fs_channel``.

        One that has not brought anything yet is waited for. None: they are known from their first records on.
        """
        return None

    def check_alignable(self, uid: str) -> None:
        """Raise GraphError for a source that cannot hold back what is ahead of the others.

        Who can reads `checkpoint/control.py` each time it is asked for new offsets.
        """
        raise GraphError(
            f"the source '{uid}' cannot be aligned with others",
            why="Spark's own reader reads it, which cannot hold back what is ahead",
            what_to_do="read files with FileSource, a Delta table with DeltaSource, "
            "Kafka with KafkaSource(...); or leave with_watermark_alignment() out",
            uid=uid,
        )

    @property
    def is_positionable(self) -> bool:
        """Whether :meth:`starting_at` makes it begin at a position of a savepoint."""
        return False

    def starting_at(self, start: SourceStart) -> Source:
        """Return this source so that a query without a log begins at `start`.

        Called once per scan whose start differs, at each start of the query. Inputs that the position does
        not name are read from their beginning: they were added since.
        """
        return self

    def check_start(self, uid: str, position: Position) -> None:
        """Raise InputLostError if input from a savepoint's position on is gone. Called before a restore."""

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return what the job recorded to know its input again, for savepoints.

        By the names of `JobDir.record_fact`, so that a restored job finds an input that was replaced.
        """
        return {}

    @property
    def is_checked_apart(self) -> bool:
        """Return whether preflight and :meth:`check_retention` may run in a thread beside the plan.

        Only if they ask nothing of Spark, and change nothing that the plan looks at.
        """
        return False

    @property
    def has_side_outputs(self) -> bool:
        """Whether :meth:`side_outputs` returns any."""
        return False

    @property
    def plan_name(self) -> str:
        """What tells its plan from another one of the same source; recorded with the job."""
        return ""

    @property
    def drops_records(self) -> bool:
        """Whether it leaves out bad records and counts them in an observed metric."""
        return False

    @abstractmethod
    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream, at each start of the query: own columns, ``_fs_channel`` and ``_fs_seq``."""

    def load_marked(self, spark: SparkSession, place: JobPlace) -> DataFrame | None:
        """Return, in place of :meth:`load`, the stream with barriers if the source injects them itself.

        Own columns and the control columns kind, checkpoint, channel, sequence. Every channel of a barrier
        announces how many there are (`protocol/alignment.py`).
        """
        return None

    def known_as(self, uid: str) -> tuple[str, ...]:
        """Return the uids under which the job keeps facts about its input: its own, those of its parts."""
        return (uid,)

    def side_uids(self, uid: str) -> tuple[str, ...]:
        """Return the uids of :meth:`side_outputs`, without planning them."""
        return ()

    def side_outputs(
        self, spark: SparkSession, uid: str, place: JobPlace, peers: Sequence[Sink]
    ) -> tuple[SideOutput, ...]:
        """Return dead-letter streams; what nobody says of their sinks, `peers` say: the sinks of the user."""
        return ()

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse what cannot work, before anything starts. Called once per process."""

    def check_retention(self, uid: str, needed_ms: int) -> None:
        """Raise ConfigError for an input that does not keep its records for `needed_ms`.

        So long (interval + restart budget) after it was read a record may have to be read again.
        """

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Raise InputLostError if input from `position` on is gone. Called before each start."""

    def check_identity(self, job_dir: JobDir, uid: str) -> None:
        """Raise InputLostError if the input is not the one that the job began with.

        Called in the query's thread, after the records of a checkpoint were read and before it can be
        decided: what was read from a replaced input is never committed.
        """

    def group_offsets(self, position: LoggedOffsets) -> GroupOffsets | None:
        """Return what :meth:`commit_offsets` would store, for a sink that commits it with its records.

        Behind the sinks it is stored all the same, which then changes nothing.
        """
        return None

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Tell the source that everything before `position` is committed in every sink.

        Called once per checkpoint after the last sink answered and before the receipt, so again after a crash
        between the two; must be idempotent. Keeps the job's mark (`note`) beside the offsets where the system
        can, and returns for the receipt what was committed: group -> topic -> partition -> offset. A
        restartable EnvironmentFault means: repeat the call.
        """
        return {}

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        """Return the newest mark of `job` that :meth:`commit_offsets` left; behind every takeover.

        Empty if the system keeps none. A restartable EnvironmentFault means: repeat the call.
        """
        return ()

    def lower_offsets(self, position: LoggedOffsets) -> None:
        """Set what :meth:`commit_offsets` stored back to `position`, also downwards; may be repeated.

        Called while an ordered rewind is carried out, with no query running. A restartable EnvironmentFault
        means: repeat the call.
        """


@dataclass(frozen=True, eq=False)
class SourceNode:
    """Where records come in."""

    uid: str
    source: Source
