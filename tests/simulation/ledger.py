"""What the run knows about the job directory without asking the product: every object, as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.input_topic import Row
from tests.simulation.outputs import Broker, StagedFile, Table, Transaction
from tests.simulation.spark_files import BatchOffsets, state_key

#: Something staged: a transaction, or a file of a table.
Staged = Transaction | StagedFile


def body_of(data: bytes) -> dict[str, Any]:
    """Return the body of a sealed object; the head line is not looked at."""
    found: dict[str, Any] = json.loads(data.partition(b"\n")[2])
    return found


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A staged file: which attempt of which micro-batch, and what it names by sink."""

    lineage: int
    batch: int
    owner: int
    committables: Mapping[str, tuple[Staged, ...]]
    barriers: Mapping[str, tuple[tuple[int, int], ...]]
    #: Whether it appeared after its writer was told that it did not.
    is_late: bool = False
    #: Whether its writer had been deposed by then: no owner that runs has seen it.
    is_deposed: bool = False

    def all(self) -> Iterable[Staged]:
        """Return everything it names."""
        return (one for found in self.committables.values() for one in found)

    def data(self) -> Iterable[Staged]:
        """Return what it names but barrier records."""
        return (one for one in self.all() if not isinstance(one, Transaction) or one.barrier_of is None)

    def channels(self, sink: str, checkpoint: int) -> list[int]:
        """Return the channels on which a sink showed a barrier, sorted."""
        return sorted(channel for c, channel in self.barriers.get(sink, ()) if c == checkpoint)

    def rows(self, sink: str) -> list[Row]:
        """Return the rows that one sink staged."""
        return [row for one in self.committables.get(sink, ()) for row in one.rows]


@dataclass(slots=True)
class DecisionRecord:
    """A decision that was COMMIT."""

    checkpoint: int
    owner: int
    lineage: int
    #: With what was staged again.
    batches: tuple[StagedRecord, ...]
    ends: Mapping[int, int]
    #: The name of the state behind it.
    state: str
    #: Where its input begins.
    starts: Mapping[int, int] = field(default_factory=dict)
    #: Counts by key behind it, for whoever goes back to it.
    counts: Mapping[int, int] = field(default_factory=dict)
    has_receipt: bool = False
    is_deleted: bool = False
    #: Whether a rewind left it behind.
    is_dead: bool = False
    #: How often it was replayed.
    replays: int = 0
    #: Sinks of which something was destroyed, now or before a replay.
    lost_sinks: set[str] = field(default_factory=set)
    #: Whether the proof is gone of what became of something.
    is_unproven: bool = False

    def all(self) -> Iterable[Staged]:
        """Return everything it names."""
        return (one for record in self.batches for one in record.all())

    def shows(self, staged: Staged) -> bool:
        """Whether committing it makes something visible: all but barrier records of other checkpoints."""
        return not isinstance(staged, Transaction) or staged.barrier_of in (None, self.checkpoint)

    def of_sink(self, sink: str) -> tuple[Staged, ...]:
        """Return what it names of a sink, in the order in which it is committed."""
        return tuple(one for record in self.batches for one in record.committables.get(sink, ()))

    def sink_of(self, staged: Staged) -> str:
        """Return the sink of something that it names."""
        named = (
            sink for record in self.batches for sink, ones in record.committables.items() if staged in ones
        )
        return next(named)


class Ledger:
    """Parses staged files and decisions into what they stand for.

    Parameters
    ----------
    sinks
        Uids, in the order in which they commit.
    """

    def __init__(self, broker: Broker, tables: Mapping[str, Table], sinks: tuple[str, ...]) -> None:
        self._broker, self._tables, self.sinks = broker, tables, sinks
        #: Staged files that are there, by key.
        self.staged: dict[str, StagedRecord] = {}
        #: COMMIT decisions, also those whose files are deleted.
        self.commits: dict[int, DecisionRecord] = {}
        #: What decisions name, by identity.
        self.decided: dict[int, DecisionRecord] = {}
        #: What decisions named until something else was staged in its place, by identity.
        self.replaced: dict[int, DecisionRecord] = {}
        #: What was destroyed although it was decided, by identity.
        self.destroyed: set[int] = set()

    def staged_record(self, body: Mapping[str, Any]) -> StagedRecord:
        """Return what a staged file says."""
        found: dict[str, list[Staged]] = {}
        for one in body["committables"]:
            sink, payload = one["sink"], one["payload"]
            if "evidence" in payload:
                found.setdefault(sink, []).append(self._broker.transactions[payload["evidence"]["offset"]])
            else:
                files = self._tables[sink].files
                found.setdefault(sink, []).extend(files[a["add"]["path"]] for a in payload["actions"])
        barriers = {
            ack["sink"]: tuple((int(c), int(ch)) for task in ack["tasks"] for c, ch in task["barriers"])
            for ack in body["acks"]
        }
        committables = {sink: tuple(ones) for sink, ones in found.items()}
        return StagedRecord(body["lineage"], body["batch"], body["owner_epoch"], committables, barriers)

    def decision_record(self, body: Mapping[str, Any]) -> DecisionRecord:
        """Return what a COMMIT decision says."""
        return DecisionRecord(
            body["checkpoint"],
            body["owner_epoch"],
            body["lineage"],
            tuple(self.staged_record(batch) for batch in body["batches"]),
            BatchOffsets.parse(body["offsets_text"]).ends,
            state_key(body["commits_text"], body["batches"][-1]["batch"]),
        )

    def complete(self) -> Iterable[DecisionRecord]:
        """Return the decisions that have a receipt."""
        return (decision for decision in self.commits.values() if decision.has_receipt)

    def decision_of(self, staged: Staged) -> DecisionRecord | None:
        """Return the decision that names something staged."""
        return self.decided.get(id(staged))

    def destroy(self, staged: Staged) -> None:
        """Note that something decided is destroyed."""
        decision = self.decided[id(staged)]
        self.destroyed.add(id(staged))
        if not isinstance(staged, Transaction) or staged.barrier_of is None:
            decision.lost_sinks.add(decision.sink_of(staged))

    def pending(self, staged: Staged) -> list[StagedRecord]:
        """Return the staged files that name something."""
        return [record for record in self.staged.values() if any(one is staged for one in record.all())]
