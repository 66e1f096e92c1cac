"""What must hold after every event, whoever died and whatever failed.

The rules look at what is on the disk and at the brokers, never at the product's own variables. Each
has a name, which a broken run reports; `docs/simulation.md` explains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flinkish_spark.checkpoint.pins import PINS
from flinkish_spark.checkpoint.spark_log import REPLAY
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.job_dir import REWINDING
from flinkish_spark.protocol.bases import BASES
from flinkish_spark.protocol.lineage import RewindKind
from tests.simulation.decision_checks import DecisionChecks
from tests.simulation.destroying import DESTROYED, Destroyer
from tests.simulation.ledger import DecisionRecord, Ledger, body_of
from tests.simulation.outputs import StagedFile, Transaction, TransactionState
from tests.simulation.replay_checks import ReplayChecks
from tests.simulation.rules import Rule, require
from tests.simulation.scenario import StoreKind
from tests.simulation.scheduler import Process
from tests.simulation.sinks import TIMEOUT
from tests.simulation.spark_files import bases_in
from tests.simulation.store_faults import Change, Moment
from tests.simulation.world import World


class Invariants:
    """Watches one run: its disk, its sinks, who owns the job, what the job tells others."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ledger = Ledger(world.broker, world.tables, world.scenario.sink_uids)
        self.decisions = DecisionChecks(world, self.ledger)
        self.replays = ReplayChecks(world, self.ledger)
        world.destroyer = Destroyer(world, self.ledger)
        world.on_staged_again = self.staged_again
        world.broker.on_end = self._transaction_ended
        world.is_decided = lambda staged: id(staged) in self.ledger.decided
        for table in world.tables.values():
            table.on_commit = self._files_visible
        #: The newest owner whose takeover is done.
        self.owner = 0
        #: By process, the epoch of those that took the job over.
        self.epochs: dict[Process, int] = {}
        self._newest_record = 0
        self._query_of: Process | None = None
        self._folder = ""
        self._offered = 0
        #: By the create that took it, where creates have ids.
        self._taken: dict[int, str] = {}
        #: Whether an entry of Spark's log appeared after its writer was told that it did not.
        self.log_changed_late = False
        #: Kind and first removed micro-batch of the rewinds that are not finished, by object name.
        self._intents: dict[str, tuple[str, int]] = {}

    def _require(self, holds: bool, rule: Rule, detail: str) -> None:
        require(self._world, holds, rule, detail)

    # -- owners ---------------------------------------------------------------------------------
    def took_over(self, process: Process, epoch: int) -> None:
        """Note that a takeover is done: record, seal and fence."""
        if self._is_older:
            return
        self.epochs[process] = epoch
        self.owner = max(self.owner, epoch)

    @property
    def _is_older(self) -> bool:
        """Whether the directory was put back from a copy: what happens to it happens to no history."""
        return self._world.other_timeline is not None and self._world.other_timeline.is_older

    def _is_closed(self, sink: str) -> bool:
        """Whether a copy has committed to a sink what was given up here."""
        return self._world.other_timeline is not None and self._world.other_timeline.sink == sink

    def is_owner(self, process: Process) -> bool:
        """Whether a process is the newest owner."""
        return self.epochs.get(process) == self.owner

    def has_newer_owner(self, process: Process) -> bool:
        """Whether somebody has begun to take the job over from a process."""
        return self._newest_record > self.epochs.get(process, 0)

    def lost_for_good(self) -> DecisionRecord | None:
        """Return the checkpoint that the job has ended with since it cannot be replayed."""
        decision = self.ledger.commits.get(self._world.not_replayable or 0)
        return None if decision is None or decision.has_receipt or decision.is_dead else decision

    def reads(self, process: Process, key: str) -> None:
        """Look at a read of the job directory by a driver."""
        if process in self.epochs:
            self.replays.read(self.epochs[process], key)

    def staged_again(self, owner: int, sink: str, batch: int) -> None:
        """Look at a sink that stages for a replay."""
        if owner == self._newest_record:
            self.replays.staged_again(sink, batch)

    def query_started(self, driver: Process, folder: str) -> None:
        """Note that a recovery is over and a query runs."""
        self._require(not self._is_older, Rule.ONE_TIMELINE, f"{driver.name} starts a query")
        if self.is_owner(driver):
            self._query_of, self._folder = driver, folder
            self._world.in_flight.clear()
            self.decisions.check_kept(folder)

    def query_ended(self, driver: Process) -> None:
        """Note that no query runs any more."""
        if self._query_of is driver:
            self._query_of = None

    @property
    def is_running(self) -> bool:
        """Whether a query of the newest owner runs."""
        return self._query_of is not None and self._query_of.is_alive and self.is_owner(self._query_of)

    # -- the job directory ----------------------------------------------------------------------
    def wrote(self, change: Change) -> None:
        """Look at a change of the job directory."""
        if self._is_older:
            return
        key = change.key
        folder, _, rest = key.partition("/")
        stem = rest.removesuffix(".json")
        if key.rpartition("/")[2].startswith("."):
            return
        if folder == "checkpoints":
            number, _, part = rest.partition("/")
            self._checkpoint_changed(change, int(number), part)
        elif folder == "staged":
            self._staged_changed(change)
        elif folder == "owners" and stem.isdecimal():
            self._newest_record = max(self._newest_record, int(stem))
        elif folder == "restaged" and change.verb != "delete":
            self.replays.restaged(body_of(self._world.disk.objects[key]), change, self.owner)
        elif folder == REPLAY:
            is_too_late = change.moment is Moment.LATE or self.has_newer_owner(change.process)
            self.replays.changed(self.epochs.get(change.process), key, is_too_late=is_too_late)
        elif folder == "rewinds":
            self.decisions.rewound(body_of(self._world.disk.objects[key]))
        elif folder == PINS and change.verb == "delete" and stem.isdecimal():
            # A log that begins anew has no use for pins of the one before.
            is_reseeding = any(kind == RewindKind.RESEED.value for kind, _ in self._intents.values())
            # What was under way when the job was lost cannot be called back; the recovery pins again.
            is_zombie_s = self.has_newer_owner(change.process) and change.began_in_time
            if not is_reseeding and not is_zombie_s:
                self._check_not_newest(int(stem), "the pin of ")
        elif folder == REWINDING:
            self._intent_changed(change, rest)
        elif folder == BASES and change.verb == "delete":
            self._base_deleted(rest)
        elif folder == "spark":
            self._log_changed(change)

    def _base_deleted(self, name: str) -> None:
        """Check that no checkpoint that can be gone back to has a state that names it."""
        objects = self._world.disk.objects
        pinned = [
            d.state
            for d in self.ledger.complete()
            if not d.is_dead and f"{PINS}/{d.checkpoint}.json" in objects
        ]
        for key, data in objects.items():
            state = key.partition("/state/")[2]
            is_needed = state in pinned and name in bases_in(data).values()
            self._require(not is_needed, Rule.NOTHING_REFERENCED, f"the base {name} is deleted: {key}")

    def _log_changed(self, change: Change) -> None:
        is_commit = "/commits/" in change.key
        if change.verb == "create":
            self.log_changed_late |= change.moment is Moment.LATE
            if is_commit:
                self._spark_committed(change)
        elif change.verb == "delete" and is_commit and change.process in self.epochs:
            self._commit_removed(change)

    def _checkpoint_changed(self, change: Change, checkpoint: int, part: str) -> None:
        if change.verb == "delete":
            if part == "decision.json":
                self._decision_deleted(checkpoint)
        elif part == "trigger.json":
            # A try that nobody waits for takes no id: it may come when the checkpoint is deleted already.
            is_taking = change.moment is Moment.CALLED and not self.has_newer_owner(change.process)
            # Nor does one that is asked once more by whoever took the id, and has not been told.
            arriving = self._world.arriving
            is_again = arriving != "" and self._taken.get(checkpoint) == arriving
            is_known = checkpoint in self._taken and is_taking and not is_again
            self._require(not is_known, Rule.IDS_RISE, f"id {checkpoint} is taken a second time")
            self._taken[checkpoint] = arriving
        elif part == "decision.json":
            body = body_of(self._world.disk.objects[change.key])
            if body["verdict"] == "COMMIT":
                self.decisions.decided(self.ledger.decision_record(body), change, self.owner)
        elif part == "receipt.json":
            known = self.ledger.commits.get(checkpoint)
            if change.moment is Moment.LATE and known is not None and known.has_receipt:
                # It has had one meanwhile, and a rewind may have set back since what that one was about.
                return
            self.decisions.confirmed(checkpoint)

    def _decision_deleted(self, checkpoint: int) -> None:
        decision = self.ledger.commits.get(checkpoint)
        if decision is None:
            return
        decision.is_deleted = True
        self._require(decision.has_receipt, Rule.NOTHING_REFERENCED, f"decision {checkpoint} has no receipt")
        self._check_not_newest(checkpoint, "")

    def _check_not_newest(self, checkpoint: int, what: str) -> None:
        newest = max((d.checkpoint for d in self.ledger.complete() if not d.is_dead), default=0)
        self._require(
            checkpoint != newest, Rule.ONE_RETAINED, f"{what}the newest checkpoint {checkpoint} was deleted"
        )

    def _staged_changed(self, change: Change) -> None:
        if change.verb != "delete":
            record = self.ledger.staged_record(body_of(self._world.disk.objects[change.key]))
            is_late, is_deposed = change.moment is Moment.LATE, record.owner < self.owner
            self.ledger.staged[change.key] = replace(record, is_late=is_late, is_deposed=is_deposed)
            self._world.in_flight -= {id(staged) for staged in record.all()}
            return
        gone = self.ledger.staged.pop(change.key, None)
        for staged in gone.all() if gone is not None else ():
            decision = self.ledger.decision_of(staged) or self.ledger.replaced.get(id(staged))
            if decision is not None:
                may_go = decision.has_receipt
            elif isinstance(staged, Transaction):
                may_go = not staged.is_open
            else:
                # A table's file that nobody decides is forgotten, which is how it is aborted.
                may_go = not self.is_running
            self._require(
                may_go,
                Rule.NOTHING_REFERENCED,
                f"{change.key} is deleted, and {staged.name} has neither a receipt nor an end",
            )

    def _spark_committed(self, change: Change) -> None:
        folder, _, name = change.key.rpartition("/")
        if change.moment is Moment.LATE:
            # Of an earlier attempt; the next start tells what it is worth.
            self.decisions.late_commits.add(int(name))
        elif self.is_running and folder == f"{self._folder}/commits":
            self.decisions.spark_committed(self._folder, int(name), self.owner)

    def _commit_removed(self, change: Change) -> None:
        """Check that a driver takes back only what an intent names, or is old; on a disk Spark purges."""
        batch = int(change.key.rpartition("/")[2])
        reseed = RewindKind.RESEED.value
        is_named = any(first <= batch or kind == reseed for kind, first in self._intents.values())
        is_old = self._world.scenario.store is StoreKind.BUCKET and self._is_old(change, batch)
        self._require(
            is_named or is_old, Rule.INTENT_FIRST, f"commits/{batch} is removed and no intent names it"
        )

    def _is_old(self, change: Change, batch: int) -> bool:
        """Whether an entry is of an earlier owner, or older than all checkpoints that can be gone back to."""
        epoch = int(change.key.split("/")[1])
        if epoch < self.epochs[change.process]:
            return True
        objects = self._world.disk.objects
        live = [d for d in self.ledger.complete() if not d.is_dead]
        pinned = [d.batches[-1].batch for d in live if f"{PINS}/{d.checkpoint}.json" in objects]
        return bool(pinned) and batch < min(pinned)

    def _intent_changed(self, change: Change, name: str) -> None:
        """Check that an intent goes only when what it names is done, or has become void."""
        if change.verb != "delete":
            body = body_of(self._world.disk.objects[change.key])
            self._intents[name] = (body["kind"], int(body["first_removed"]))
            return
        kind, first = self._intents.pop(name)
        is_done = f"rewinds/{name}" in self._world.disk.objects
        is_void = kind == "PLAIN" and first < self.decisions.next_batch
        self._require(
            is_done or is_void, Rule.NOTHING_REFERENCED, f"the intent {name} is deleted before it is finished"
        )

    # -- sinks ----------------------------------------------------------------------------------
    def _transaction_ended(self, transaction: Transaction, cause: str) -> None:
        name, decision = transaction.name, self.ledger.decision_of(transaction)
        self._world.note("transaction", f"{name} {transaction.state.value}: {cause}")
        is_by_itself = cause in (TIMEOUT, DESTROYED)
        self._require(is_by_itself or not self._is_older, Rule.ONE_TIMELINE, f"{name} was ended: {cause}")
        if transaction.state is TransactionState.COMMITTED:
            self._require(not self._is_closed(transaction.sink), Rule.ONE_TIMELINE, f"{name} is committed")
            self._require(decision is not None, Rule.DECISION_FIRST, f"{name} is committed by {cause}")
            is_meant = decision is None or decision.shows(transaction)
            self._require(
                is_meant, Rule.BARRIERS_BOUND, f"the barrier record {transaction.barrier_of} is visible"
            )
            return
        is_needed = decision is not None and decision.shows(transaction) and cause != DESTROYED
        is_needed = is_needed and not self.replays.may_abort(transaction)
        self._require(not is_needed, Rule.NOTHING_REFERENCED, f"{name} is decided and was aborted: {cause}")
        if decision is not None:
            return
        if cause == TIMEOUT or not self.is_running:
            return
        is_mine = int(transaction.id.owner_epoch) == self.owner
        is_in_flight = is_mine and id(transaction) in self._world.in_flight
        self._require(
            not is_in_flight, Rule.NOTHING_REFERENCED, f"{name} is being staged and was aborted: {cause}"
        )
        pending = [
            r
            for r in self.ledger.pending(transaction)
            if r.lineage == self.decisions.lineage
            and r.batch >= self.decisions.next_batch
            and not r.is_deposed
        ]
        self._require(
            not pending,
            Rule.NOTHING_REFERENCED,
            f"{name} is staged and was aborted while the query runs: {cause}",
        )

    def _files_visible(self, files: Sequence[StagedFile]) -> None:
        self._require(not self._is_older, Rule.ONE_TIMELINE, f"{len(files)} files were committed")
        for file in files:
            sink = next(
                uid for uid, table in self._world.tables.items() if table.files.get(file.name) is file
            )
            self._require(not self._is_closed(sink), Rule.ONE_TIMELINE, f"{file.name} is committed")
            is_decided = self.ledger.decision_of(file) is not None
            self._require(is_decided, Rule.DECISION_FIRST, f"{file.name} is visible")
            self._require(file.is_there, Rule.NOTHING_REFERENCED, f"{file.name} is visible and gone")
            self._require(
                not file.is_visible, Rule.EXACTLY_ONCE, f"{file.name} is added to its table a second time"
            )
            file.is_visible = True

    # -- what the job tells others --------------------------------------------------------------
    def offered(self, process: Process, checkpoint: int) -> None:
        """Check an id that is given to Spark."""
        if self.is_owner(process):
            highest = max(self._offered, max(self.ledger.commits, default=0))
            self._require(checkpoint > highest, Rule.IDS_RISE, f"id {checkpoint} is offered after {highest}")
            self._offered = checkpoint

    def offsets_raised(self, ends: Mapping[int, int]) -> None:
        """Check what the consumer group is told."""
        self.decisions.offsets_raised(ends)

    def notified(self, checkpoint: int) -> None:
        """Check a notification that a checkpoint is complete."""
        is_complete = any(d.checkpoint == checkpoint for d in self.ledger.complete())
        self._require(is_complete, Rule.NOTIFIED_LAST, f"checkpoint {checkpoint} has no receipt")

    def exported(self, process: Process, checkpoint: int) -> None:
        """Check that a savepoint is made of a confirmed checkpoint."""
        if self.has_newer_owner(process):
            # Spark's folder was renamed: there is no state to read.
            raise EnvironmentFault("the simulated state is gone")
        is_there = any(d.checkpoint == checkpoint and not d.is_deleted for d in self.ledger.complete())
        self._require(is_there, Rule.NOTIFIED_LAST, f"savepoint of checkpoint {checkpoint}")
