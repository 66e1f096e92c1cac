"""The job directory as one process reaches it: over a disk that does not always obey."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flinkish_spark.core import store as product
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import CreateResult, ObjectMissing
from tests.simulation.bucket import Tries, is_away
from tests.simulation.clock import SimClock
from tests.simulation.faults import FaultKind as K
from tests.simulation.scenario import StoreKind, Tearing
from tests.simulation.scheduler import US_PER_MS, Process
from tests.simulation.world import World

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Moment(enum.Enum):
    """When a change happens."""

    #: While its caller waits.
    CALLED = "called"
    #: After the caller was told that it failed.
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the job directory that has happened.

    Parameters
    ----------
    began_in_time
        Whether its process had the job, or none yet, when it began.
    """

    process: Process
    verb: str
    key: str
    moment: Moment
    began_in_time: bool


class Effect(Protocol[T_co]):
    """Does a change."""

    def __call__(self, moment: Moment = Moment.CALLED) -> T_co:
        """Do it now."""


class Witness(Protocol):
    """Looks at what happens to the job directory."""

    def wrote(self, change: Change) -> None:
        """Look at a change."""

    def reads(self, process: Process, key: str) -> None:
        """Look at a read."""


class SimStore:
    """A :class:`~flinkish_spark.core.store.Store` of one process on the run's one disk.

    Parameters
    ----------
    process
        Who calls; dies of a torn write.
    witness
        Told of every change, after it, and of every read.
    is_lost
        Whether a process has lost the job.
    """

    def __init__(
        self,
        world: World,
        process: Process,
        witness: Witness,
        is_lost: Callable[[Process], bool],
    ) -> None:
        self._world, self._process, self._is_lost = world, process, is_lost
        self._wrote, self._reads = witness.wrote, witness.reads
        self._disk = world.disk
        self._is_bucket = world.scenario.store is StoreKind.BUCKET
        self._clock = SimClock(world.scheduler, world.stream(f"{process.name}/store"))

    def read(self, key: str) -> bytes:
        """Return the object; raise ObjectMissing if there is none."""
        self._world.step("store read", key)
        if self._world.struck(K.FAILED_READ) or self._is_away():
            raise _failed("read", key)
        self._reads(self._process, key)
        return self._disk.read(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys directly below a folder."""
        self._world.step("store list", prefix)
        if self._world.struck(K.FAILED_LIST) or self._is_away():
            raise _failed("list", prefix)
        listed = self._disk.list(prefix)
        if self._is_bucket and self._world.struck(K.SLOW_LIST):
            # Nothing is missing of what was there, and it comes when others have gone on.
            self._world.scheduler.pause(self._world.chance.choice((2, 50, 600)) * US_PER_MS)
        return listed

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one."""
        has_job = not self._is_lost(self._process)

        def effect(moment: Moment = Moment.CALLED) -> None:
            self._disk.put(key, data)
            self._world.write_ids.pop(key, None)
            self._wrote(Change(self._process, "put", key, moment, has_job))

        self._change("put", key, effect, data)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free."""
        has_job = not self._is_lost(self._process)

        def effect(moment: Moment = Moment.CALLED) -> CreateResult:
            result = self._disk.create_if_absent(key, data)
            if result is CreateResult.CREATED:
                self._wrote(Change(self._process, "create", key, moment, has_job))
            return result

        if self._is_bucket:
            return self._change("create", key, self._decided_by_id(key, data, effect), data)
        return self._change("create", key, effect, data)

    def _decided_by_id(self, key: str, data: bytes, effect: Effect[CreateResult]) -> Effect[CreateResult]:
        """Return the create as the product does it in a bucket: in tries, and by the id of what is there."""
        world = self._world
        write_id = f"{world.chance.getrandbits(64):016x}"
        tries = Tries(world, effect, lambda: effect(Moment.LATE))

        def create(moment: Moment = Moment.CALLED) -> CreateResult:
            if moment is Moment.LATE:
                return tries.arrive(key, write_id)
            patience_ms = world.scenario.store_patience_ms
            tries.is_waited_for = True
            try:
                return product.create_by_id(tries, key, data, write_id, self._clock, patience_ms)
            finally:
                tries.is_waited_for = False

        return create

    def _is_away(self) -> bool:
        return self._is_bucket and is_away(self._world)

    def delete(self, key: str) -> None:
        """Delete the object; a missing one is no error."""
        has_job = not self._is_lost(self._process)

        def effect(moment: Moment = Moment.CALLED) -> None:
            is_there = key in self._disk.objects
            self._disk.delete(key)
            if is_there:
                self._wrote(Change(self._process, "delete", key, moment, has_job))

        self._change("delete", key, effect, None)

    # -- what is asked of many files at once --------------------------------------------------------
    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return everything below a folder with its size."""
        self.list(folder)
        return self._disk.sizes_below(folder)

    def read_start(self, key: str, most_bytes: int) -> bytes:
        """Return the first bytes of the object."""
        return self.read(key)[:most_bytes]

    def copy(self, key: str, other: str) -> None:
        """Copy an object; raise ObjectMissing if there is none."""
        data = self._disk.objects.get(key)
        if data is None:
            raise ObjectMissing(key)
        self.put(other, data)

    def delete_all(self, keys: Collection[str]) -> None:
        """Delete objects one after the other, as far as it goes."""
        for key in sorted(keys):
            self.delete(key)

    def delete_folder(self, folder: str) -> None:
        """Delete everything below `folder`, one after the other, as far as it goes."""
        for key in self._disk.below(folder):
            has_job = not self._is_lost(self._process)
            self._world.step("store delete", key)
            self._disk.delete(key)
            self._wrote(Change(self._process, "delete", key, Moment.CALLED, has_job))

    def rename_folder(self, folder: str, other: str) -> None:
        """Move everything below `folder` at once."""

        def effect(moment: Moment = Moment.CALLED) -> None:
            self._disk.rename_folder(folder, other)

        self._change("rename", folder, effect, None)

    def _change(self, verb: str, key: str, effect: Effect[T], data: bytes | None) -> T:
        world = self._world
        if verb != "delete":
            world.destroyer.about_to_write(self._process, key)
        world.step(f"store {verb}", key)
        if data is None:
            trouble = world.struck(K.LOST_REPLY, K.REFUSED_WRITE)
        else:
            trouble = world.struck(
                K.TORN_WRITE, K.TORN_OBJECT, K.LOST_REPLY, K.REFUSED_WRITE, K.DELAYED_RENAME
            )
        if trouble in (K.TORN_WRITE, K.TORN_OBJECT):
            assert data is not None
            if self._is_bucket:
                self._die_during(effect)
            self._tear(verb, key, data, trouble)
        if trouble is K.DELAYED_RENAME:
            delay_ms = world.chance.choice((3, 30, 300, 2_000))
            world.later_in_directory(delay_ms, lambda: self._appear(key, effect))
        if trouble is K.LOST_REPLY:
            effect()
        # A create in a bucket is tried again, and finds out by itself.
        if trouble is not None or (verb != "create" and self._is_away()):
            raise _failed(verb, key)
        return effect()

    def _appear(self, key: str, effect: Effect[T]) -> None:
        self._world.note("appears late", key)
        effect(Moment.LATE)

    def _die_during(self, effect: Effect[T]) -> None:
        """Die in the middle of a request: all of it is carried out, or nothing."""
        if self._world.chance.random() < 0.5:
            effect(Moment.LATE)
        self._world.scheduler.kill(self._process)
        self._world.scheduler.check()

    def _tear(self, verb: str, key: str, data: bytes, kind: K) -> None:
        """Die in the middle of a write; only a bad disk shows half an object under its name."""
        is_bad = kind is K.TORN_OBJECT and self._world.scenario.tearing is Tearing.VISIBLE
        if is_bad and key.endswith(".json") and (verb == "put" or key not in self._disk.objects):
            self._disk.put(key, data[: len(data) // 2])
            if key.startswith("owners/"):
                # Its name alone takes the job over.
                self._wrote(Change(self._process, verb, key, Moment.CALLED, True))
        else:
            folder, _, name = key.rpartition("/")
            self._disk.put(f"{folder}/.{name}.torn.tmp", data[: len(data) // 2])
        self._world.scheduler.kill(self._process)
        self._world.scheduler.check()


def _failed(verb: str, key: str) -> StoreError:
    return StoreError(f"cannot {verb} {key}", why="the simulated disk refuses", key=key)
