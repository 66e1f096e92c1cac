"""The jobs of a server by id, found in job directories and in folders of job directories."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flinkish_spark.core.clock import Clock
from flinkish_spark.core.errors import ConfigError, FlinkishError
from flinkish_spark.core.job_dir import JOB_KEY, open_job_dir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.stored_job import StoredJob

#: Maximum age of the list of jobs; in a bucket a new list costs a request per job.
_LOOK_MS, _LOOK_IN_BUCKET_MS = 2_000, 30_000
_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class FoundJobs:
    #: Jobs in the order of their names. The id is the job's uuid; for a copied directory, which has the same
    #: uuid, it is derived from the path.
    by_id: Mapping[str, StoredJob]
    #: Errors of unreadable job directories, by path.
    unreadable: Mapping[str, str] = field(default_factory=dict)


class JobsInPlaces:
    """Finds jobs in directories, at most every two seconds; thread-safe."""

    def __init__(self, places: Iterable[StoreSpec], clock: Clock) -> None:
        self._places, self._clock = tuple(places), clock
        self._lock = threading.Lock()
        self._found = FoundJobs({})
        self._looked_ms: int | None = None
        is_local = all(place.is_local for place in self._places)
        self._look_ms = _LOOK_MS if is_local else _LOOK_IN_BUCKET_MS

    def list_jobs(self) -> FoundJobs:
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if self._looked_ms is None or now_ms - self._looked_ms >= self._look_ms:
                self._found = self._look()
                self._looked_ms = self._clock.monotonic_ms()
            return self._found

    def find(self, job_id: str) -> StoredJob | None:
        return self.list_jobs().by_id.get(job_id) if _ID.fullmatch(job_id) else None

    def _look(self) -> FoundJobs:
        jobs: list[StoredJob] = []
        unreadable: dict[str, str] = {}
        for place in _job_places(self._places, unreadable):
            try:
                jobs.append(StoredJob.read(place))
            except FlinkishError as error:
                unreadable[place.url] = str(error)
        by_id: dict[str, StoredJob] = {}
        for job in sorted(jobs, key=lambda one: (one.name, one.place.url)):
            by_id[str(job.uuid) if str(job.uuid) not in by_id else _id_of_copy(job)] = job
        return FoundJobs(by_id, unreadable)


def _id_of_copy(job: StoredJob) -> str:
    return hashlib.blake2b(f"{job.uuid} {job.place.url}".encode(), digest_size=16).hexdigest()


def _job_places(places: Iterable[StoreSpec], unreadable: dict[str, str]) -> Iterator[StoreSpec]:
    for place in places:
        try:
            found = list(_scan_folder(place.folder) if place.is_local else _scan_bucket(place))
        except (FlinkishError, OSError) as error:
            unreadable[place.url] = str(error)
            continue
        yield from found


def _scan_folder(folder: Path) -> Iterator[StoreSpec]:
    if _has_job(folder):
        yield StoreSpec(str(folder))
        return
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    for name in names:
        if not name.startswith(".") and _has_job(folder / name):
            yield StoreSpec(str(folder / name))


def _has_job(folder: Path) -> bool:
    # Reading a named pipe would block.
    return (folder / JOB_KEY).is_file()


def _scan_bucket(place: StoreSpec) -> Iterator[StoreSpec]:
    if open_job_dir(place).find_settings() is not None:
        yield place
        return
    parent, _, name = place.url.rpartition("/")
    try:
        above = StoreSpec.parse(parent, dict(place.options)).open_bucket()
    except ConfigError:
        # The place is the bucket itself, which has no parent.
        return
    for key in above.list(name):
        below = place.to_child(key.rpartition("/")[2])
        if open_job_dir(below).find_settings() is not None:
            yield below
