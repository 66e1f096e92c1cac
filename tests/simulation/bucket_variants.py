"""A job directory in a bucket, broken on purpose; see :mod:`tests.simulation.variants`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from flinkish_spark.core import store
from flinkish_spark.core.store import CachedReads, CreateResult, ObjectMissing
from tests.simulation.patching import Patch, Variant


def _exists_believed() -> Sequence[Patch]:
    """As it is without ids: whatever is there is somebody else's."""
    return [mock.patch.object(store, "whose", lambda found, write_id: CreateResult.EXISTS)]


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
    return [mock.patch.object(store, "whose", lambda found, write_id: CreateResult.CREATED)]


def _lost_answers_mean_done() -> Sequence[Patch]:
    """Without looking: it will have been carried out."""
    original = store.create_by_id

    def create(puts: Any, *args: Any) -> CreateResult:
        try:
            return CreateResult.CREATED if puts.put_new(*args[:3]) else original(puts, *args)
        except store.AnswerLost:
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


#: Of a job directory in a bucket.
BUCKETS = (
    Variant("exists is believed", _exists_believed),
    Variant("conflicts are believed", _conflict_believed),
    Variant("another id for each try", _own_id_for_each_try),
    Variant("what is there is ours", _what_is_there_is_ours),
    Variant("lost answers mean done", _lost_answers_mean_done),
    Variant("what is missing is kept", _missing_kept),
)
