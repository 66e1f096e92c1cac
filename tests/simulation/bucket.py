"""A bucket in place of the disk: what it answers to a create, and for how long it is out of reach."""

from __future__ import annotations

from typing import Protocol

from flinkish_spark.core.store import CreateResult, ObjectMissing, UnknownOutcomeError
from tests.simulation.faults import FaultKind as K
from tests.simulation.scheduler import US_PER_MS
from tests.simulation.world import World

#: How often the bucket is out of reach right when something is to be decided: one write of hundreds, and the
#: one whose outcome counts.
_AWAY_AT_DECISION = 0.08


class Tries:
    """The tries of one create; the product decides what they come to (`create_by_id`).

    Parameters
    ----------
    arrive, arrive_late
        Do the create, while somebody waits for it and when nobody does.
    """

    def __init__(self, world: World, arrive: Arrives, arrive_late: Arrives) -> None:
        self._world, self._in_time, self._late = world, arrive, arrive_late
        #: Whether somebody waits for it; a try may arrive when nobody does any more.
        self.is_waited_for = False

    def put_new(self, key: str, data: bytes, write_id: str) -> bool:
        """Try once; return whether the bucket says that it is done, or that the key is taken."""
        world = self._world
        world.step("bucket create", key)
        if key.endswith("/decision.json") and world.chance.random() < _AWAY_AT_DECISION:
            world.faults.arm_if_drawn(K.STORE_AWAY)
        if is_away(world):
            # Nobody knows which way the network is cut.
            if world.chance.random() < 0.5:
                self.arrive(key, write_id)
            raise UnknownOutcomeError("the simulated bucket is out of reach")
        trouble = world.struck(K.AMBIGUOUS_CREATE, K.CONFLICT, K.LATE_TRY)
        if trouble is K.CONFLICT:
            return False
        if trouble is K.LATE_TRY:
            delay_ms = world.chance.choice((3, 150, 400, 2_000))
            world.later_in_directory(delay_ms, lambda: self._arrive_late(key, write_id))
            raise UnknownOutcomeError("the simulated bucket has not answered")
        is_created = self.arrive(key, write_id) is CreateResult.CREATED
        if trouble is K.AMBIGUOUS_CREATE:
            # A lost answer is waited for; meanwhile others go on, or take the job.
            world.scheduler.pause(world.chance.choice((0, 5, 300, 4_000)) * US_PER_MS)
            if world.chance.random() < 0.5:
                raise UnknownOutcomeError("the simulated bucket answers 500")
            # As a library does that asks again by itself, and is told of its own write.
            return False
        return is_created

    def write_id_at(self, key: str) -> str | None:
        """Return the id of what is there."""
        world = self._world
        world.step("bucket look", key)
        if is_away(world) or world.struck(K.FAILED_READ):
            raise UnknownOutcomeError("the simulated bucket does not say what is there")
        if key not in world.disk.objects:
            raise ObjectMissing(key)
        return world.write_ids.get(key)

    def _arrive_late(self, key: str, write_id: str) -> None:
        self._world.note("arrives late", key)
        self.arrive(key, write_id)

    def arrive(self, key: str, write_id: str) -> CreateResult:
        """Carry a try out."""
        self._world.arriving = write_id
        result = self._in_time() if self.is_waited_for else self._late()
        if result is CreateResult.CREATED:
            self._world.write_ids[key] = write_id
        return result


class Arrives(Protocol):
    """Does a create if its key is free."""

    def __call__(self) -> CreateResult:
        """Do it."""


def is_away(world: World) -> bool:
    """Whether nobody reaches the bucket now."""
    if world.struck(K.STORE_AWAY):
        duration_ms = world.chance.choice((20, 200, 1_500))
        world.bucket_back_us = world.scheduler.now_us + duration_ms * US_PER_MS
    return world.scheduler.now_us < world.bucket_back_us
