"""Typed reads and writes of all objects below the job directory.

The only module that knows their keys (layout in `docs/internals.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flinkish_spark.core.errors import ConfigError, CorruptObjectError, JobDirError
from flinkish_spark.core.store import (
    CachedReads,
    CreateResult,
    LocalStore,
    ObjectMissing,
    SealedObjects,
    Store,
)
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import instance_of, to_path
from flinkish_spark.protocol.codec import StoredObject
from flinkish_spark.protocol.decisions import (
    Decision,
    Receipt,
    RestagedEpoch,
    RewindIntent,
    TriggerRecord,
    Verdict,
)
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.job_graph import JobGraph
from flinkish_spark.protocol.job_report import JobReport
from flinkish_spark.protocol.lineage import LineageHistory, RewindOrder
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.series import Series
from flinkish_spark.protocol.statistics import StatisticsHistory
from flinkish_spark.protocol.timeline import Stretch, Timeline

_S = TypeVar("_S", bound=StoredObject)

JOB_KEY = "job.json"
#: Setting of a plain query's sinks, which have no coordinator that takes orders.
BY_MICRO_BATCH = "by_micro_batch"
#: Folder in which sources keep the offsets at which they began.
BEGINNINGS = "control"
#: Folder of unfinished rewinds.
REWINDING = "rewinding"
#: Folder of versions of Spark that ran the job after the one in job.json.
_SPARK_VERSIONS = "spark-versions"
REWIND_ORDER_KEY = "orders/rewind.json"
TIMELINE_ORDER_KEY = "orders/timeline.json"
_STATISTICS_KEY, _SERIES_KEY = "statistics.json", "series.json"
#: Folder of the owners' reports about the job.
_REPORTS = "reports"
#: Folders of the stretch that each takeover began, and of the marks that a user has accepted.
_TIMELINE, _ACCEPTED = "timeline", "timeline/accepted"


#: Ids and lineages are counted up and never used again, so these objects never change. Entries of Spark's log
#: are written anew after a rewind, but only by the process that reads them. Orders and intents are left out:
#: other processes delete them, and their keys are used again.
_WRITTEN_ONCE = re.compile(
    r"checkpoints/\d+/(decision|receipt)\.json|rewinds/\d+\.json|spark/\d+/(offsets|commits)/\d+"
)


def is_written_once(key: str) -> bool:
    return _WRITTEN_ONCE.fullmatch(key) is not None


class JobDir:
    def __init__(self, store: Store, place: StoreSpec | None = None) -> None:
        self.store = store
        self.place = StoreSpec(str(store.root)) if isinstance(store, LocalStore) else place
        self._objects = SealedObjects(store, "the job directory")

    def _create(self, key: str, kind: str, stored: StoredObject) -> CreateResult:
        return self.store.create_if_absent(key, seal(kind, stored.to_json()))

    def _optional(self, key: str, kind: str, stored: type[_S]) -> _S | None:
        return self._objects.optional(key, kind, stored.from_json)

    def read_or_create_job(
        self, wanted: Mapping[str, Any], at_first: Mapping[str, Any] = MappingProxyType({})
    ) -> tuple[JobUuid, dict[str, Any]]:
        """Return the job's uuid and settings: `wanted` must stay, `at_first` is recorded."""
        body = {"uuid": uuid.uuid4().hex, **at_first, **wanted}
        self.store.create_if_absent(JOB_KEY, seal("job", body))
        recorded = self._objects.read(JOB_KEY, "job", dict)
        for name, value in wanted.items():
            if recorded.get(name) != value:
                raise JobDirError(
                    f"this job directory was written with {name} = {recorded.get(name)!r}, "
                    f"and this job has {value!r}",
                    why="it must stay the same for the life of a job directory",
                    what_to_do=f"use {name} = {recorded.get(name)!r} again, or a new job_dir",
                    wanted=value,
                )
        return JobUuid(recorded["uuid"]), recorded

    def find_uuid(self) -> JobUuid | None:
        recorded = self.find_settings()
        return None if recorded is None else JobUuid(recorded["uuid"])

    def find_settings(self) -> dict[str, Any] | None:
        return self._objects.optional(JOB_KEY, "job", dict)

    def spark_versions(self) -> tuple[str, ...]:
        first = (self.find_settings() or {}).get("spark")
        later = [self._objects.read(key, "spark-version", dict) for key in self.store.list(_SPARK_VERSIONS)]
        return (*([] if first is None else [first]), *(one["spark"] for one in later))

    def record_spark(self, version: str) -> None:
        """Record a version of Spark that runs here from now on, in an object of its own."""
        if version not in self.spark_versions():
            name = re.sub(r"[^A-Za-z0-9.-]", "_", version)
            body = seal("spark-version", {"spark": version})
            self.store.create_if_absent(f"{_SPARK_VERSIONS}/{name}.json", body)

    def find_fact(self, name: str) -> dict[str, Any] | None:
        return self._objects.optional(f"facts/{name}.json", "fact", dict)

    def record_fact(self, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Record `value` under ``facts/<name>.json`` at the first call; return what is recorded."""
        key = f"facts/{name}.json"
        self.store.create_if_absent(key, seal("fact", value))
        return self._objects.read(key, "fact", dict)

    def newest_owner(self) -> OwnerEpoch:
        return OwnerEpoch(max(self._objects.numbers("owners"), default=0))

    def create_owner(self, epoch: OwnerEpoch, body: Mapping[str, Any]) -> CreateResult:
        return self.store.create_if_absent(f"owners/{epoch}.json", seal("owner", body))

    def owner(self, epoch: OwnerEpoch) -> dict[str, Any] | None:
        """Return the object in which an owner describes itself; None if there was none with that epoch.

        Epochs are counted up and never deleted: without the next one there is no later one.
        """
        return self._objects.optional(f"owners/{epoch}.json", "owner", dict)

    def note_owner(self, epoch: OwnerEpoch, name: str, text: str) -> None:
        self.store.put(f"owners/{epoch}.{name}", f"{text}\n".encode("ascii"))

    def owner_note(self, epoch: OwnerEpoch, name: str) -> str:
        try:
            return self.store.read(f"owners/{epoch}.{name}").decode("ascii", errors="replace")
        except ObjectMissing:
            return ""

    def newest_report(self) -> JobReport | None:
        newest = max(self._objects.numbers(_REPORTS), default=0)
        return self._optional(f"{_REPORTS}/{newest}.json", "report", JobReport)

    def digest_state(self) -> bytes:
        """Return a digest of statistics, report and lineage, without parsing them."""
        digest = hashlib.blake2b(digest_size=16)
        newest = max(self._objects.numbers(_REPORTS), default=0)
        for key in (_STATISTICS_KEY, f"{_REPORTS}/{newest}.json"):
            with contextlib.suppress(ObjectMissing):
                digest.update(self.store.read(key))
        digest.update(str(self.lineage()).encode())
        return digest.digest()

    def put_report(self, report: JobReport) -> None:
        self.store.put(f"{_REPORTS}/{report.owner_epoch}.json", seal("report", report.to_json()))

    def forget_reports_before(self, epoch: OwnerEpoch) -> None:
        for number in self._objects.numbers(_REPORTS):
            if number < epoch.value:
                self.store.delete(f"{_REPORTS}/{number}.json")

    def begin_stretch(self, epoch: OwnerEpoch, stretch: Stretch) -> CreateResult:
        return self._create(f"{_TIMELINE}/{epoch}.json", "stretch", stretch)

    def _stretch(self, epoch: int) -> Stretch:
        return self._objects.read(f"{_TIMELINE}/{epoch}.json", "stretch", Stretch.from_json)

    def stretches(self) -> dict[OwnerEpoch, Stretch]:
        epochs = sorted(self._objects.numbers(_TIMELINE))
        return {OwnerEpoch(epoch): self._stretch(epoch) for epoch in epochs}

    def timeline(self) -> Timeline:
        accepted = CheckpointId(max(self._objects.numbers(_ACCEPTED), default=0))
        return Timeline(tuple(self.stretches().values()), accepted)

    def forget_stretches(self, oldest: CheckpointId) -> None:
        """Delete the stretches that end before an id; the stretch that contains it stays."""
        epochs = sorted(self._objects.numbers(_TIMELINE))
        for epoch, following in pairwise(epochs):
            if self._stretch(following).first <= oldest:
                self.store.delete(f"{_TIMELINE}/{epoch}.json")

    def accept_marks(self, upto: CheckpointId, why: str) -> None:
        self.store.create_if_absent(f"{_ACCEPTED}/{upto}.json", seal("accepted-marks", {"why": why}))

    def order_timeline(self, ordered_at_ms: int) -> CreateResult:
        """Order the next start to accept the marks of sinks and sources; EXISTS if an order waits already."""
        order = seal("timeline-order", {"ordered_at_ms": ordered_at_ms})
        return self.store.create_if_absent(TIMELINE_ORDER_KEY, order)

    def timeline_is_ordered(self) -> bool:
        return self._objects.optional(TIMELINE_ORDER_KEY, "timeline-order", dict) is not None

    def close_timeline_order(self) -> None:
        self.store.delete(TIMELINE_ORDER_KEY)

    def write_staged(self, staged: StagedBatch) -> None:
        key = self.make_staged_key(staged)
        if self._create(key, "staged", staged) is CreateResult.EXISTS:
            raise CorruptObjectError(
                f"{key} exists already", what_to_do="report it, with the files of the job directory"
            )

    def list_staged(self, lineage: Lineage) -> dict[str, StagedBatch]:
        """Return the staged files of a lineage by attempt name ``<batch>-<owner>.<attempt>``."""
        found = {}
        for key in self.store.list(f"staged/{lineage}"):
            name = key.rsplit("/", 1)[1].removesuffix(".json")
            staged = self._optional(key, "staged", StagedBatch)
            if staged is not None:  # else it was deleted since it was listed
                found[name] = staged
        return found

    def delete_staged(self, lineage: Lineage, attempt: str) -> None:
        self.store.delete(f"staged/{lineage}/{attempt}.json")

    def delete_all(self, keys: Iterable[str]) -> None:
        if isinstance(self.store, CachedReads):
            self.store.delete_all(list(keys))
            return
        for key in keys:
            self.store.delete(key)

    @staticmethod
    def attempt_name(staged: StagedBatch) -> str:
        return f"{staged.batch}-{staged.owner_epoch}.{staged.attempt}"

    def make_staged_key(self, staged: StagedBatch) -> str:
        return f"staged/{staged.lineage}/{self.attempt_name(staged)}.json"

    def statistics(self) -> StatisticsHistory | None:
        return self._optional(_STATISTICS_KEY, "statistics", StatisticsHistory)

    def put_statistics(self, history: StatisticsHistory) -> None:
        self.store.put(_STATISTICS_KEY, seal("statistics", history.to_json()))

    def series(self) -> Series | None:
        return self._optional(_SERIES_KEY, "series", Series)

    def put_series(self, series: Series) -> None:
        self.store.put(_SERIES_KEY, seal("series", series.to_json()))

    def job_graph(self) -> JobGraph | None:
        return self._optional("graph.json", "graph", JobGraph)

    def put_job_graph(self, graph: JobGraph) -> None:
        self.store.put("graph.json", seal("graph", graph.to_json()))

    def create_trigger(self, trigger: TriggerRecord) -> CreateResult:
        """Take a checkpoint id; EXISTS means that somebody else has it."""
        return self._create(f"checkpoints/{trigger.checkpoint}/trigger.json", "trigger", trigger)

    def create_decision(self, decision: Decision) -> CreateResult:
        """Decide a checkpoint id once and for all; EXISTS means somebody else did."""
        return self._create(f"checkpoints/{decision.checkpoint}/decision.json", "decision", decision)

    def first_decision(self, checkpoint: CheckpointId) -> Decision | None:
        return self._optional(f"checkpoints/{checkpoint}/decision.json", "decision", Decision)

    def decision(self, checkpoint: CheckpointId) -> Decision | None:
        """Return the decision, with the files of a later replay; None while the id is open."""
        decision = self.first_decision(checkpoint)
        restaged = None if decision is None else self.find_restaged(checkpoint)
        return decision if decision is None or restaged is None else restaged.apply(decision)

    def find_restaged(self, checkpoint: CheckpointId) -> RestagedEpoch | None:
        number = max(self._objects.numbers(f"restaged/{checkpoint}"), default=0)
        key = f"restaged/{checkpoint}/{number}.json"
        # If it is gone since it was listed, it was deleted with its checkpoint, after the receipt.
        return self._optional(key, "restaged", RestagedEpoch) if number else None

    def create_restaged(self, restaged: RestagedEpoch) -> CreateResult:
        """Finish a replay; EXISTS means that somebody else has finished one with its number."""
        return self._create(f"restaged/{restaged.checkpoint}/{restaged.number}.json", "restaged", restaged)

    def forget_restaged(self, checkpoints: Collection[CheckpointId]) -> None:
        there = self._objects.numbers("restaged", "")
        for checkpoint in (one for one in checkpoints if one.value in there):
            for number in sorted(self._objects.numbers(f"restaged/{checkpoint}")):
                self.store.delete(f"restaged/{checkpoint}/{number}.json")

    def list_checkpoint_ids(self) -> tuple[CheckpointId, ...]:
        return tuple(CheckpointId(n) for n in sorted(self._objects.numbers("checkpoints", "")))

    def live_commits(self) -> tuple[Decision, ...]:
        """Return the COMMIT decisions that no rewind left behind, in order of id."""
        return tuple(reversed(list(self._live_commits())))

    def newest_commit(self) -> Decision | None:
        return next(self._live_commits(), None)

    def _live_commits(self) -> Iterator[Decision]:
        history = self.history()
        for checkpoint in reversed(self.list_checkpoint_ids()):
            decision = self.decision(checkpoint)
            if decision is None or decision.verdict is not Verdict.COMMIT:
                continue
            if history.find_superseding(checkpoint, decision.lineage) is None:
                yield decision

    def create_receipt(self, receipt: Receipt) -> CreateResult:
        """Confirm a checkpoint. EXISTS is harmless: somebody finished the same work."""
        return self._create(f"checkpoints/{receipt.checkpoint}/receipt.json", "receipt", receipt)

    def receipt(self, checkpoint: CheckpointId) -> Receipt | None:
        return self._optional(f"checkpoints/{checkpoint}/receipt.json", "receipt", Receipt)

    def open_rewind(self) -> RewindIntent | None:
        """Return the unfinished rewind, if there is one; a rewind is finished when its lineage has begun."""
        wanted = sorted(n for n in self._objects.numbers(REWINDING) if n > self.lineage().value)
        if not wanted:
            return None
        return self._optional(f"{REWINDING}/{wanted[0]}.json", "rewind", RewindIntent)

    def create_rewind(self, intent: RewindIntent) -> CreateResult:
        """Make a rewind durable before its first delete; EXISTS means that its lineage is taken."""
        # Each intent has its own key: a zombie that closes its intent deletes no other.
        return self._create(f"{REWINDING}/{intent.lineage}.json", "rewind", intent)

    def drop_rewind(self, intent: RewindIntent) -> None:
        """Delete an intent that is not carried out, since the micro-batches it would remove were decided."""
        self.store.delete(f"{REWINDING}/{intent.lineage}.json")

    def close_rewind(self, intent: RewindIntent) -> None:
        """Move the finished rewind to the history, from which the lineage is counted."""
        # This order matters: the new lineage must be durable before the intent disappears, and the
        # order must be gone by then, or it would be carried out a second time.
        self._create(f"rewinds/{intent.lineage}.json", "rewind", intent)
        self.forget_finished_order()
        self.drop_rewind(intent)

    def history(self) -> LineageHistory:
        return LineageHistory.of(intent.to_finished_rewind() for intent in self._read_finished_rewinds())

    def _read_finished_rewinds(self) -> Iterator[RewindIntent]:
        for number in self._objects.numbers("rewinds"):
            key = f"rewinds/{number}.json"
            done = self._optional(key, "rewind", RewindIntent)
            if done is None:
                # Finished rewinds are never deleted, and the lineage is counted from them.
                raise CorruptObjectError(f"{key} is listed and cannot be read", why="it leads to nowhere")
            yield done

    def rewind_order(self) -> RewindOrder | None:
        order = self._optional(REWIND_ORDER_KEY, "rewind-order", RewindOrder)
        return None if order is None or self._is_carried_out(order) else order

    def forget_finished_order(self) -> None:
        """Delete an order that a process carried out before it died, and did not close."""
        order = self._optional(REWIND_ORDER_KEY, "rewind-order", RewindOrder)
        if order is not None and self._is_carried_out(order):
            self.store.delete(REWIND_ORDER_KEY)

    def _is_carried_out(self, order: RewindOrder) -> bool:
        return any(done.order_id == order.order_id for done in self._read_finished_rewinds())

    def create_rewind_order(self, order: RewindOrder) -> CreateResult:
        """Order a rewind; EXISTS means that another order waits."""
        return self._create(REWIND_ORDER_KEY, "rewind-order", order)

    def refuse_rewind_order(self, order: RewindOrder, reason: str) -> None:
        """Close an order that cannot be carried out; it is kept with the reason, for people."""
        refused = {**order.to_json(), "refused": reason}
        self.store.put(f"orders/refused/{order.order_id}.json", seal("refused-order", refused))
        self.store.delete(REWIND_ORDER_KEY)

    def lineage(self) -> Lineage:
        return Lineage(max(self._objects.numbers("rewinds"), default=0))


def answers_folder(uid: str, way: str) -> str:
    return f"answers/{uid}/{way}"


def seed_folder(lineage: Lineage) -> str:
    return f"seeds/{lineage}"


def open_job_dir(place: StoreSpec) -> JobDir:
    if place.is_local:
        return JobDir(LocalStore(place.folder))
    return JobDir(CachedReads(place.open_bucket(), is_written_once), place)


def job_place(given: str | os.PathLike[str], options: Mapping[str, str] = MappingProxyType({})) -> StoreSpec:
    text = to_path(given)
    what_to_do = 'give an absolute path, like "/data/jobs/orders", or "s3://bucket/jobs/orders"'
    instance_of("job_dir", text, str, what_to_do=what_to_do)
    if "://" not in text or text.startswith("file://"):
        place = StoreSpec(str(local_path(text)))
    else:
        place = StoreSpec.parse(text, options)
    # Spark keeps its own checkpoint there.
    _ = place.hadoop_url
    return place


def local_path(text: str) -> Path:
    """Return a job directory on a disk, given as an absolute path or file://..., or raise ConfigError."""
    instance_of("job_dir", text, str, what_to_do='give an absolute path, like "/data/jobs/orders"')
    path = Path(text.removeprefix("file://"))
    if "://" in text.removeprefix("file://") or not path.is_absolute() or "\0" in text:
        raise ConfigError(
            f"the job_dir {text!r} cannot be used",
            why="it must be an absolute path on a file system that driver and executors share, or a folder "
            "in a bucket; half of the code runs in other processes",
            what_to_do='give an absolute path, or a URL like "s3://bucket/jobs/orders"',
        )
    return path
