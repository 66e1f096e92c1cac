"""What must hold of decisions and micro-batches: which rows, which state, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flinkish_spark.protocol.lineage import RewindKind, Tables
from tests.simulation.ledger import DecisionRecord, Ledger, StagedRecord
from tests.simulation.outputs import Transaction
from tests.simulation.replay_checks import is_alive, is_visible
from tests.simulation.rules import Rule, require
from tests.simulation.spark_files import BatchOffsets
from tests.simulation.store_faults import Change, Moment
from tests.simulation.world import World

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RewindRecord:
    """A finished rewind."""

    kind: RewindKind
    first_removed: int
    target: str
    tables: Tables


class DecisionChecks:
    """Follows the live line of checkpoints: what is decided, and what comes next.

    Parameters
    ----------
    ledger
        Knows what decisions and staged files stand for.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger
        #: The first micro-batch that no decision covers.
        self.next_batch = 0
        #: Micro-batches whose commits/N appeared late: the recovery may not have seen them.
        self.late_commits: set[int] = set()
        #: By the lineage that they began.
        self.rewinds: dict[int, RewindRecord] = {}
        self._ends: Mapping[int, int] = dict.fromkeys(range(world.scenario.partitions), 0)
        self._counts: Mapping[int, int] = {}
        #: Where Spark's present log began to read.
        self._log_began_at: Mapping[int, int] = self._ends

    def _require(self, holds: bool, rule: Rule, detail: str) -> None:
        require(self._world, holds, rule, detail)

    # -- decisions ------------------------------------------------------------------------------
    def decided(self, decision: DecisionRecord, change: Change, owner: int) -> None:
        """Look at a COMMIT; `owner` is the newest one whose takeover is done."""
        number, newest = decision.checkpoint, max(self._ledger.commits, default=0)
        if decision.owner < owner:
            # What was under way when it lost the job cannot be called back. Where a seal is in its
            # way it fails; where the seal was deleted as old, nobody may believe it.
            self._require(
                change.began_in_time and number < newest,
                Rule.ZOMBIE_HARMLESS,
                f"owner {decision.owner} decided checkpoint {number} after owner {owner} had taken over",
            )
            return
        if number < newest and change.moment is Moment.LATE:
            return
        self._require(number > newest, Rule.IDS_RISE, f"checkpoint {number} is decided after {newest}")
        waiting = [d.checkpoint for d in self._ledger.commits.values() if not d.has_receipt and not d.is_dead]
        self._require(not waiting, Rule.ONE_UNCONFIRMED, f"{number} is decided, {waiting} not confirmed")
        batches = [record.batch for record in decision.batches]
        self._require(
            batches == list(range(self.next_batch, self.next_batch + len(batches))),
            Rule.DECISIONS_FOLLOW,
            f"checkpoint {number} decides {batches}, next is {self.next_batch}",
        )
        for staged in decision.all():
            is_free = self._ledger.decision_of(staged) is None
            self._require(is_free, Rule.ONE_DECISION, f"{staged.name} is in {number} and in another one")
            self._ledger.decided[id(staged)] = decision
        self._check_barriers(decision)
        self._check_rows(decision)
        self._check_state(decision)
        self._ledger.commits[number], decision.starts = decision, self._ends
        self.next_batch = batches[-1] + 1
        self._ends = decision.ends

    def _check_barriers(self, decision: DecisionRecord) -> None:
        channels = list(range(self._world.scenario.tasks))
        for sink in self._ledger.sinks:
            seen = [record.channels(sink, decision.checkpoint) for record in decision.batches]
            if self._world.scenario.checkpoint.is_exactly_once:
                holds = channels in seen
            else:
                holds = any(set(one) == set(channels) for one in seen)
            self._require(holds, Rule.BARRIERS_COUNTED, f"{sink} showed {seen} for {decision.checkpoint}")

    def _check_rows(self, decision: DecisionRecord) -> None:
        expected = _places(self._ends, decision.ends)
        for sink in self._ledger.sinks:
            found = sorted(row.place for record in decision.batches for row in record.rows(sink))
            self._require(
                found == expected,
                Rule.ROWS_STAGED_ONCE,
                f"checkpoint {decision.checkpoint}, {sink}: {_difference(found, expected)}",
            )

    def _check_state(self, decision: DecisionRecord) -> None:
        counts = dict(self._counts)
        for record in decision.batches:
            for row in sorted(record.rows(self._ledger.sinks[0])):
                before = counts.get(row.key, 0)
                self._require(
                    row.nth == before + 1,
                    Rule.STATE_FOLLOWS,
                    f"{row} of micro-batch {record.batch} follows count {before}",
                )
                counts[row.key] = row.nth
        self._counts = decision.counts = counts

    # -- receipts -------------------------------------------------------------------------------
    def confirmed(self, checkpoint: int) -> None:
        """Look at a receipt."""
        decision = self._ledger.commits.get(checkpoint)
        if decision is None:
            self._require(False, Rule.RECEIPT_LAST, f"checkpoint {checkpoint} was not decided")
            return
        self._check_visible(decision, Rule.RECEIPT_LAST)
        committed = self._world.input.committed
        behind = {p: end for p, end in decision.ends.items() if committed.get(p, 0) < end}
        self._require(not behind, Rule.RECEIPT_LAST, f"group offsets {committed} are behind {behind}")
        decision.has_receipt = True

    def offsets_raised(self, ends: Mapping[int, int]) -> None:
        """Check that what the consumer group is told is visible in every sink."""
        decided = [d for d in self._ledger.commits.values() if d.ends == ends]
        self._require(bool(decided), Rule.OFFSETS_LAST, f"no checkpoint ends at {ends}")
        for decision in decided[-1:]:
            self._check_visible(decision, Rule.OFFSETS_LAST)

    def _check_visible(self, decision: DecisionRecord, rule: Rule) -> None:
        for staged in decision.all():
            is_meant = decision.shows(staged)
            if isinstance(staged, Transaction) and staged.barrier_of is not None:
                # One that is lost alone is given up: readers go by the next one.
                is_meant = is_meant and id(staged) not in self._ledger.destroyed
            text = f"{staged.name} of {decision.checkpoint} is {'not ' if is_meant else ''}committed"
            self._require(is_visible(staged) is is_meant, rule, text)

    # -- micro-batches --------------------------------------------------------------------------
    def spark_committed(self, folder: str, batch: int, owner: int) -> None:
        """Look at a micro-batch for which Spark wrote commits/N."""
        records = [r for r in self._ledger.staged.values() if r.batch == batch and r.owner == owner]
        lineage = max((r.lineage for r in records), default=0)
        live = [r for r in records if r.lineage == lineage and not r.is_late]
        self._require(
            len(live) == 1,
            Rule.ROWS_STAGED_ONCE,
            f"micro-batch {batch} is committed and has {len(live)} staged files of owner {owner}",
        )
        if live:
            self._check_batch(folder, batch, live[0])

    def check_kept(self, folder: str) -> None:
        """Check what a recovery has kept: undecided micro-batches that Spark will not run again."""
        for key in self._world.disk.list(f"{folder}/commits"):
            batch = int(key.rpartition("/")[2])
            if batch < self.next_batch or batch in self.late_commits:
                continue
            records = [
                r for r in self._ledger.staged.values() if (r.lineage, r.batch) == (self.lineage, batch)
            ]
            whole = [r for r in records if all(is_alive(one) for one in r.data())]
            # A zombie may have added one since the recovery looked; a later one finds both, and goes back.
            alive = [r for r in whole if not r.is_deposed] or whole
            self._require(
                len(alive) == 1,
                Rule.ROWS_STAGED_ONCE,
                f"micro-batch {batch} is kept, and {len(alive)} of {len(records)} staged files are alive",
            )
            if alive:
                self._check_batch(folder, batch, alive[0])

    def _check_batch(self, folder: str, batch: int, record: StagedRecord) -> None:
        objects = self._world.disk.objects
        end = BatchOffsets.parse(objects[f"{folder}/offsets/{batch}"].decode()).ends
        before = objects.get(f"{folder}/offsets/{batch - 1}")
        start = BatchOffsets.parse(before.decode()).ends if before is not None else self._log_began_at
        expected = _places(start, end)
        for sink in self._ledger.sinks:
            found = sorted(row.place for row in record.rows(sink))
            self._require(
                found == expected,
                Rule.ROWS_STAGED_ONCE,
                f"micro-batch {batch}, {sink}: {_difference(found, expected)}",
            )

    # -- rewinds --------------------------------------------------------------------------------
    def rewound(self, body: Mapping[str, object]) -> None:
        """Look at a rewind that was finished: what it left behind is dead."""
        lineage, first = int(str(body["lineage"])), int(str(body["first_removed"]))
        kind, tables = RewindKind(body["kind"]), Tables(body["tables"])
        rewind = RewindRecord(kind, first, str(body["target"]), tables)
        if lineage in self.rewinds:
            is_same = self.rewinds[lineage] == rewind
            self._require(is_same, Rule.REWIND_KEEPS, f"lineage {lineage} began twice")
            return
        self.rewinds[lineage] = rewind
        if kind is not RewindKind.TO_CHECKPOINT:
            self._require(
                first >= self.next_batch,
                Rule.REWIND_KEEPS,
                f"micro-batch {first} is removed, {self.next_batch - 1} is decided",
            )
            if kind is RewindKind.RESEED:
                self.next_batch, self._log_began_at = 0, self._ends
            return
        target = int(str(body["target"]))
        for decision in self._ledger.commits.values():
            if decision.checkpoint > target and decision.lineage < lineage:
                decision.is_dead = True
        self.next_batch = first
        self._counts = self._ledger.commits[target].counts
        self._ends = self._ledger.commits[target].ends

    @property
    def lineage(self) -> int:
        """The live lineage."""
        return max(self.rewinds, default=0)

    def newest_live(self) -> DecisionRecord | None:
        """Return the decision that the job goes on from."""
        live = [d for d in self._ledger.commits.values() if not d.is_dead]
        return max(live, key=lambda d: d.checkpoint, default=None)


def _places(start: Mapping[int, int], end: Mapping[int, int]) -> list[Place]:
    return [(p, offset) for p in sorted(end) for offset in range(start[p], end[p])]


def _difference(found: Iterable[Place], expected: Iterable[Place]) -> str:
    missing, extra = sorted(set(expected) - set(found))[:4], sorted(set(found) - set(expected))[:4]
    if missing or extra:
        return f"missing {missing}, too many {extra}"
    return "some are there twice"
