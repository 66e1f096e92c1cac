"""Faults that destroy what is decided and not committed yet, and what keeps it from being replayed."""

from __future__ import annotations

from flinkish_spark.checkpoint.pins import PINS
from flinkish_spark.core.job_dir import REWIND_ORDER_KEY, REWINDING
from tests.simulation.faults import FaultKind as K
from tests.simulation.ledger import DecisionRecord, Ledger, body_of
from tests.simulation.memory_store import MemoryStore
from tests.simulation.outputs import StagedFile, Transaction, TransactionState
from tests.simulation.scheduler import Process
from tests.simulation.world import World

#: Why a broker aborts a decided transaction: the job was down for too long.
DESTROYED = "decided, and too old"
#: Behind a destruction the next ordinary fault comes within so many steps, in every other case.
_NEXT_FAULT_WITHIN = 60
#: What may happen to the write that finishes a replay.
_TROUBLE = (K.TORN_WRITE, K.LOST_REPLY, K.REFUSED_WRITE, K.DELAYED_RENAME)


def goes_back(disk: MemoryStore) -> bool:
    """Whether an order waits or is carried out: what it was granted must stay."""
    return _order_waits(disk) or any(
        f"rewinds/{key.rpartition('/')[2]}" not in disk.objects for key in disk.list(REWINDING)
    )


def _order_waits(disk: MemoryStore) -> bool:
    """Whether there is an order that was not carried out.

    A bucket may write one again behind that, if it was carried out while its answer was waited for; the
    product knows it by its id, and the next start of the query deletes it.
    """
    if REWIND_ORDER_KEY not in disk.objects:
        return False
    try:
        order_id = body_of(disk.objects[REWIND_ORDER_KEY])["order_id"]
    except (ValueError, LookupError):
        return False  # Torn: nobody can carry it out, and the next start refuses to run.
    return all(body_of(disk.objects[key]).get("order_id") != order_id for key in disk.list("rewinds"))


class Destroyer:
    """Destroys what unconfirmed decisions name; strikes where somebody is about to commit it.

    For the job it is the same as if it had happened at any time since the decision.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger
        self._chance = world.stream("destroyer")
        #: By checkpoint, whether it is left alone.
        self._spared: dict[int, bool] = {}

    def _unconfirmed(self, staged: Transaction | StagedFile) -> DecisionRecord | None:
        decision = self._ledger.decision_of(staged)
        if decision is None or decision.has_receipt or decision.is_dead:
            return None
        # What was armed early must not always strike the first checkpoint.
        is_spared = self._spared.setdefault(decision.checkpoint, self._chance.random() < 0.4)
        return None if is_spared else decision

    def about_to_commit(self, one: Transaction) -> None:
        """Perhaps end decided transactions: this one, those of its task, its sink or of all sinks."""
        decision = self._unconfirmed(one)
        if decision is None:
            return
        if not one.is_open:
            if self._world.struck(K.EVIDENCE_GONE):
                one.has_evidence, decision.is_unproven = False, True
            return
        if not self._world.struck(K.DECIDED_EXPIRED):
            return
        reach = self._chance.choice(("one", "task", "sink", "all"))
        for other in decision.all():
            is_meant = isinstance(other, Transaction) and (
                other is one
                or reach == "all"
                or (reach == "sink" and other.sink == one.sink)
                or (reach == "task" and (other.sink, other.id.task) == (one.sink, one.id.task))
            )
            if isinstance(other, Transaction) and is_meant and other.is_open:
                self._ledger.destroy(other)
                self._world.broker.end(other, TransactionState.ABORTED, DESTROYED)
        self._follow_up(decision)

    def about_to_add(self, one: StagedFile) -> None:
        """Perhaps delete decided files of a table that no version names yet: this one, or all of them."""
        decision = self._unconfirmed(one)
        if decision is None or one.is_visible or not self._world.struck(K.DECIDED_FILE_GONE):
            return
        of_table = decision.of_sink(decision.sink_of(one))
        for file in self._chance.choice(((one,), of_table)):
            assert isinstance(file, StagedFile)
            file.is_there = False
            self._ledger.destroy(file)
        self._follow_up(decision)

    def about_to_write(self, process: Process, key: str) -> None:
        """Perhaps depose whoever is about to name what was staged again, or let the write fail.

        Also a pin, which the next checkpoint needs if it has to be replayed.
        """
        world = self._world
        folder = key.partition("/")[0] if world.destruction.is_on else ""
        if folder == PINS and self._chance.random() < 0.1:
            world.faults.arm(K.REFUSED_WRITE)
        if folder == "restaged":
            self._about_to_finish(process)

    def _about_to_finish(self, process: Process) -> None:
        world, chance = self._world, self._chance.random()
        if chance > 0.6:
            return
        if chance < 0.25:
            world.faults.counts[K.ZOMBIE] += 1
            world.depose(process)
        else:
            world.faults.arm(self._chance.choice(_TROUBLE))

    def _follow_up(self, decision: DecisionRecord) -> None:
        if not goes_back(self._world.disk) and self._world.struck(K.DECIDED_INPUT_GONE):
            self._world.note("people", f"retention deletes input below {decision.ends}")
            self._world.input.expire_to(decision.ends)
        if self._chance.random() < 0.5:
            self._world.faults.hurry(self._chance.randrange(1, _NEXT_FAULT_WITHIN))
