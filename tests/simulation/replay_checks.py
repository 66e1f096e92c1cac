"""What must hold of a replay: what it stages again, what that replaces, and when it may give up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from flinkish_spark.checkpoint.spark_log import REPLAY
from tests.simulation.ledger import DecisionRecord, Ledger, Staged, StagedRecord
from tests.simulation.outputs import Transaction, TransactionState
from tests.simulation.rules import Rule, require
from tests.simulation.scheduler import Process
from tests.simulation.store_faults import Change
from tests.simulation.world import World


class ReplayChecks:
    """Looks at what is staged again for decided checkpoints.

    Parameters
    ----------
    ledger
        Knows what decisions stand for.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger
        #: Processes whose replay saw its input in another order than the first run.
        self.confused: set[Process] = set()
        #: Folders of replays into which somebody has written too late.
        self.strays: set[str] = set()

    def _require(self, holds: bool, rule: Rule, detail: str) -> None:
        require(self._world, holds, rule, detail)

    # -- while it runs --------------------------------------------------------------------------
    def staged_again(self, sink: str, batch: int) -> None:
        """Look at a sink that stages for a replay of the newest owner."""
        waiting = [d for d in self._ledger.commits.values() if not (d.has_receipt or d.is_dead)]
        is_lost = any(sink in d.lost_sinks and batch in {r.batch for r in d.batches} for d in waiting)
        self._require(is_lost, Rule.LOST_ALONE, f"{sink} stages micro-batch {batch} again and lost nothing")

    def changed(self, epoch: int | None, key: str, *, is_too_late: bool) -> None:
        """Look at who changes something in the folder of a replay; a JVM has no epoch."""
        if is_too_late:
            # Whoever wrote this has lost the job, or was told that it had not been written.
            self.strays.add(key.rpartition("/")[0])
        owner = int(key.split("/")[1].partition("-")[0])
        is_mine = epoch is None or owner <= epoch
        self._require(is_mine, Rule.REPLAYS_APART, f"owner {epoch} changes {key}")

    def read(self, epoch: int, key: str) -> None:
        """Look at who reads in the folder of a replay."""
        if key.startswith(f"{REPLAY}/"):
            owner = key.split("/")[1].partition("-")[0]
            self._require(owner == str(epoch), Rule.REPLAYS_APART, f"owner {epoch} reads {key}")

    # -- its end --------------------------------------------------------------------------------
    def restaged(self, body: dict[str, Any], change: Change, owner: int) -> None:
        """Look at the object that finishes a replay; `owner` is the newest one whose takeover is done."""
        decision = self._ledger.commits.get(body["checkpoint"])
        if decision is None or decision.is_deleted or decision.is_dead:
            return
        where = f"replay {body['number']} of checkpoint {decision.checkpoint}"
        in_time = body["owner_epoch"] >= owner or change.began_in_time
        self._require(in_time, Rule.ZOMBIE_HARMLESS, f"{where} is of owner {body['owner_epoch']}")
        self._require(not decision.has_receipt, Rule.REPLAY_REPLACES, f"{where} comes behind the receipt")
        is_next = body["number"] == decision.replays + 1
        self._require(is_next, Rule.REPLAY_REPLACES, f"{where} follows number {decision.replays}")
        batches = tuple(self._ledger.staged_record(batch) for batch in body["batches"])
        for sink in self._ledger.sinks:
            self._check_rows(decision, batches, sink, where)
            self._check_replaced(decision, batches, sink, where)
        self._rename(decision, batches)

    def _check_rows(
        self, decision: DecisionRecord, batches: Sequence[StagedRecord], sink: str, where: str
    ) -> None:
        for old, new in zip(decision.batches, batches, strict=True):
            same = Counter(old.rows(sink)) == Counter(new.rows(sink)) and old.batch == new.batch
            self._require(same, Rule.REPLAY_REPLACES, f"{where}: other rows of {sink} in {new.batch}")

    def _check_replaced(
        self, decision: DecisionRecord, batches: Sequence[StagedRecord], sink: str, where: str
    ) -> None:
        before = decision.of_sink(sink)
        after = {id(one) for record in batches for one in record.committables.get(sink, ())}
        replaced = [one for one in before if id(one) not in after]
        lost = [] if not replaced else self.lost(decision, sink)
        self._require(
            replaced == lost, Rule.LOST_ALONE, f"{where} replaces {_names(replaced)}: {_names(lost)}"
        )
        if any(not isinstance(one, Transaction) for one in replaced):
            # A set of files can be committed only as a whole.
            is_over = not all(is_alive(one) for one in replaced)
        else:
            is_over = not any(is_alive(one) for one in replaced)
        is_over = is_over and not any(is_visible(one) for one in replaced)
        detail = f"{where} replaces what can be committed: {_names(replaced)}"
        self._require(is_over or not replaced, Rule.ABORTED_FIRST, detail)

    def _rename(self, decision: DecisionRecord, batches: tuple[StagedRecord, ...]) -> None:
        before = {id(one): one for one in decision.all()}
        decision.batches, decision.replays = batches, decision.replays + 1
        for one in decision.all():
            is_new = before.pop(id(one), None) is None
            if is_new:
                is_free = self._ledger.decision_of(one) is None
                self._require(is_free, Rule.ONE_DECISION, f"{one.name} is in another decision")
                self._ledger.decided[id(one)] = decision
        for gone in before:
            self._ledger.replaced[gone] = self._ledger.decided.pop(gone)

    # -- what may be --------------------------------------------------------------------------------
    def lost(self, decision: DecisionRecord, sink: str) -> list[Staged]:
        """Return what may be staged again of a sink: from the first lost one on, by micro-batch.

        What was staged at once and of which nothing is committed is lost as a whole, a table's files always.
        """
        found: list[Staged] = []
        for _, group in groupby(decision.of_sink(sink), _block):
            ones = list(group)
            dead = [one for one in ones if not _is_barrier(one) and id(one) in self._ledger.destroyed]
            if found or not dead:
                found += ones if found else []
                continue
            is_touched = any(is_visible(one) for one in ones)
            found = ones[ones.index(dead[0]) :] if is_touched else ones
        return found

    def may_abort(self, staged: Transaction) -> bool:
        """Whether something decided may be aborted.

        It is lost, cannot be committed without what is, or a rewind left the checkpoint behind.
        """
        decision = self._ledger.decided[id(staged)]
        is_lost = decision.is_dead or staged in self.lost(decision, staged.sink)
        return not decision.has_receipt and is_lost

    def is_lost(self, checkpoint: int) -> bool:
        """Whether something of a checkpoint was destroyed, or cannot be proven any more."""
        decision = self._ledger.commits.get(checkpoint)
        return decision is not None and (bool(decision.lost_sinks) or decision.is_unproven)

    def why_not(self, checkpoint: int, process: Process) -> str:
        """Return why a checkpoint that has lost something cannot be replayed; empty if it can."""
        decision = self._ledger.commits[checkpoint]
        if decision.is_unproven:
            return "not proven"
        begins = self._world.input.begins
        if any(at < begins.get(partition, 0) for partition, at in decision.starts.items()):
            return "input lost"
        if process in self.confused:
            return "other rows"
        earlier = [d for d in self._ledger.commits.values() if d.checkpoint < checkpoint and not d.is_dead]
        newest = max(earlier, key=lambda d: d.checkpoint, default=None)
        if newest is not None and not self._has_state(newest):
            return "state lost"
        return ""

    def _has_state(self, decision: DecisionRecord) -> bool:
        """Whether the state behind a checkpoint lies anywhere where the job looks for it."""
        return any(key.endswith(f"/state/{decision.state}") for key in self._world.disk.objects)


def is_alive(staged: Staged) -> bool:
    """Whether something staged could still be committed."""
    return staged.is_open if isinstance(staged, Transaction) else staged.is_there


def is_visible(staged: Staged) -> bool:
    """Whether readers see it."""
    if isinstance(staged, Transaction):
        return staged.state is TransactionState.COMMITTED
    return staged.is_visible


def _block(staged: Staged) -> tuple[int, int] | None:
    """Return what all transactions that were staged at once have in common; None for files."""
    return (int(staged.id.owner_epoch), staged.id.block) if isinstance(staged, Transaction) else None


def _is_barrier(staged: Staged) -> bool:
    return isinstance(staged, Transaction) and staged.barrier_of is not None


def _names(ones: Sequence[Staged]) -> list[str]:
    return [one.name for one in ones]
