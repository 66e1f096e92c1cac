"""A job directory in a bucket, broken on purpose; see :mod:`tests.simulation.variants`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from flinkish_spark.checkpoint import retention
from flinkish_spark.checkpoint.spark_log import BucketLog
from flinkish_spark.core import store
from flinkish_spark.core.store import CachedReads, CreateResult, ObjectMissing
from tests.simulation.engine import SimEngine
from tests.simulation.patching import Patch, Variant
from tests.simulation.spark_files import SimBucketPins


def _exists_believed() -> Sequence[Patch]:
    """As it is without ids: whatever is there is somebody else's."""
    return [mock.patch.object(store, "compare_write_ids", lambda found, write_id: CreateResult.EXISTS)]


def _conflict_believed() -> Sequence[Patch]:
    """Without looking: the bucket says that the key is taken, so it is."""
    original = store.create_by_id

    class Believing:
        def __init__(self, puts: Any) -> None:
            self._puts, self._is_refused = puts, False

        def put_new(self, key: str, data: bytes, write_id: str) -> bool:
            is_created: bool = self._puts.put_new(key, data, write_id)
            self._is_refused = not is_created
            return is_created

        def write_id_at(self, key: str) -> str | None:
            found: str | None = "somebody else's" if self._is_refused else self._puts.write_id_at(key)
            return found

    def create(puts: Any, *args: Any) -> CreateResult:
        return original(Believing(puts), *args)

    return [mock.patch.object(store, "create_by_id", create)]


def _own_id_for_each_try() -> Sequence[Patch]:
    original = store.create_by_id

    class Forgetful:
        def __init__(self, puts: Any) -> None:
            self._puts, self._tries = puts, 0

        def put_new(self, key: str, data: bytes, write_id: str) -> bool:
            self._tries += 1
            is_created: bool = self._puts.put_new(key, data, f"{write_id}-{self._tries}")
            return is_created

        def write_id_at(self, key: str) -> str | None:
            found: str | None = self._puts.write_id_at(key)
            # It knows the last one only.
            return None if found is None else found.removesuffix(f"-{self._tries}")

    def create(puts: Any, *args: Any) -> CreateResult:
        return original(Forgetful(puts), *args)

    return [mock.patch.object(store, "create_by_id", create)]


def _what_is_there_is_ours() -> Sequence[Patch]:
    return [mock.patch.object(store, "compare_write_ids", lambda found, write_id: CreateResult.CREATED)]


def _lost_answers_mean_done() -> Sequence[Patch]:
    """Without looking: it will have been carried out."""
    original = store.create_by_id

    def create(puts: Any, *args: Any) -> CreateResult:
        try:
            return CreateResult.CREATED if puts.put_new(*args[:3]) else original(puts, *args)
        except store.UnknownOutcomeError:
            return CreateResult.CREATED

    return [mock.patch.object(store, "create_by_id", create)]


def _missing_kept() -> Sequence[Patch]:
    original = CachedReads.read

    def read(self: Any, key: str) -> bytes:
        missing: set[str] = self.__dict__.setdefault("missing", set())
        if key in missing:
            raise ObjectMissing(key)
        try:
            return original(self, key)
        except ObjectMissing:
            missing.add(key)
            raise

    return [mock.patch.object(CachedReads, "read", read)]


def _one_folder_for_all() -> Sequence[Patch]:
    """A new owner goes on in the folder in which an older JVM may still write."""
    original = SimEngine.fence_log

    def fence_log(self: Any, ownership: Any) -> Any:
        log = original(self, ownership)
        return log.open_sibling("spark/1") if isinstance(log, BucketLog) else log

    return [mock.patch.object(SimEngine, "fence_log", fence_log)]


def _newer_than_pins_cleaned() -> Sequence[Patch]:
    """What no pin names is needed by nobody, however new it is, and goes at once."""

    def clean(self: Any, require_owner: Any) -> None:
        self._files.delete_all(self._find_unneeded())

    return [
        mock.patch.object(retention, "_is_older", lambda name, oldest: name.startswith("state/")),
        mock.patch.object(SimBucketPins, "_snapshots_behind", lambda self, pinned: frozenset()),
        mock.patch.object(SimBucketPins, "clean", clean),
    ]


def _state_left_behind() -> Sequence[Patch]:
    """A new owner takes the log along, and not the state."""
    original = SimBucketPins.restore

    def restore(self: Any, checkpoint: Any) -> None:
        with mock.patch.object(self, "each", lambda do, items: []):
            original(self, checkpoint)

    return [mock.patch.object(SimBucketPins, "restore", restore)]


def _bases_go_when_unnamed() -> Sequence[Patch]:
    """Whatever no checkpoint names goes, without a look at what it has in its place."""

    def find_superseded(found: Any, newest: Any, checkpoints: Any) -> frozenset[str]:
        return frozenset(name for name in found if not any(name in one.names for one in checkpoints))

    return [mock.patch.object(retention, "find_superseded", find_superseded)]


def _bases_of_one_pin_alone() -> Sequence[Patch]:
    """What the newest checkpoint has a later one of goes, whoever can be gone back to."""
    original = retention.find_superseded

    def find_superseded(found: Any, newest: Any, checkpoints: Any) -> frozenset[str]:
        return original(found, newest, [])

    return [mock.patch.object(retention, "find_superseded", find_superseded)]


#: Of a job directory in a bucket.
BUCKETS = (
    Variant("exists is believed", _exists_believed),
    Variant("conflicts are believed", _conflict_believed),
    Variant("another id for each try", _own_id_for_each_try),
    Variant("what is there is ours", _what_is_there_is_ours),
    Variant("lost answers mean done", _lost_answers_mean_done),
    Variant("what is missing is kept", _missing_kept),
    Variant("one folder for all owners", _one_folder_for_all),
    Variant("newer than the pins is cleaned", _newer_than_pins_cleaned),
    Variant("state is left behind", _state_left_behind),
    Variant("bases go when unnamed", _bases_go_when_unnamed),
    Variant("bases of one checkpoint", _bases_of_one_pin_alone),
)
