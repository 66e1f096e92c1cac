"""What the sinks write to: a broker with transactions, and tables with versions. No rules of ours."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flinkish_spark.connectors.delta.table import TableCommit
from flinkish_spark.protocol.ids import TransactionalId
from flinkish_spark.protocol.timeline import Mark
from tests.simulation.input_topic import Row


class MicroBatch(NamedTuple):
    """Which micro-batch wrote something; numbers repeat from one lineage to the next."""

    lineage: int
    batch: int


class TransactionState(enum.Enum):
    """What became of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class Transaction:
    """One transaction. `serial` finds it again, as the offset of a record does in Kafka."""

    serial: int
    name: str
    id: TransactionalId
    epoch: int
    sink: str
    origin: MicroBatch
    began_us: int
    rows: list[Row] = field(default_factory=list)
    state: TransactionState = TransactionState.OPEN
    #: The checkpoint whose barrier record it holds; None for data.
    barrier_of: int | None = None
    #: Of a micro-batch with a barrier: the mark and the input's position that show with it.
    beside: tuple[Mark, Mapping[int, int]] | None = None
    #: Until when it is taken to live, because somebody is about to decide it.
    safe_until_us: int = 0
    #: Whether its records can still be read: they tell what became of it.
    has_evidence: bool = True

    @property
    def is_open(self) -> bool:
        """Whether it can still be ended."""
        return self.state is TransactionState.OPEN


class Broker:
    """Transactions by id and epoch, as Kafka keeps them.

    :attr:`on_end` is told of each end, with who or what brought it about.
    """

    def __init__(self) -> None:
        self.transactions: list[Transaction] = []
        self.newest: dict[str, Transaction] = {}
        self.on_end: Callable[[Transaction, str], None] = lambda transaction, cause: None

    def begin(self, name: TransactionalId, sink: str, origin: MicroBatch, now_us: int) -> Transaction:
        """Open a transaction with a new epoch; an older one under the same id is aborted."""
        text = str(name)
        older = self.newest.get(text)
        if older is not None:
            self.end(older, TransactionState.ABORTED, "its id was used again")
        epoch = 0 if older is None else older.epoch + 1
        begun = Transaction(len(self.transactions), text, name, epoch, sink, origin, now_us)
        self.transactions.append(begun)
        self.newest[text] = begun
        return begun

    def end(self, transaction: Transaction, state: TransactionState, cause: str) -> None:
        """End a transaction that is open; others stay as they are."""
        if transaction.is_open:
            transaction.state = state
            self.on_end(transaction, cause)

    def open_ones(self) -> list[Transaction]:
        """Return what hides later records from readers, oldest first."""
        return [one for one in self.transactions if one.is_open]


@dataclass(eq=False, slots=True)
class StagedFile:
    """A data file that no version of its table names yet."""

    name: str
    origin: MicroBatch
    rows: list[Row]
    is_there: bool = True
    #: Whether a version has added it.
    is_visible: bool = False


@dataclass(slots=True)
class TableVersion:
    """One version: what it added and, for a restore, what it went back to."""

    number: int
    app_id: str
    epoch: int
    operation: str
    note: str
    content: tuple[StagedFile, ...]

    def described(self) -> TableCommit:
        """Return the row of the table's history."""
        return TableCommit(self.number, self.operation, self.note)


class Table:
    """Versions that are sets of files, with Delta's marker of the last epoch per application.

    :attr:`on_commit` is told of the files that become visible.
    """

    def __init__(self) -> None:
        self.files: dict[str, StagedFile] = {}
        self.versions: list[TableVersion] = []
        self._epochs: dict[str, int] = {}
        self.on_commit: Callable[[Sequence[StagedFile]], None] = lambda files: None

    @property
    def content(self) -> tuple[StagedFile, ...]:
        """Return the files that a reader sees."""
        return self.versions[-1].content if self.versions else ()

    def stage(self, origin: MicroBatch, rows: Sequence[Row]) -> StagedFile:
        """Write a file that nobody sees."""
        staged = StagedFile(f"part-{len(self.files)}", origin, list(rows))
        self.files[staged.name] = staged
        return staged

    def committed_epoch(self, app_id: str) -> int:
        """Return the last epoch of an application; -1 if none."""
        return self._epochs.get(app_id, -1)

    def commit(self, names: Sequence[str], app_id: str, epoch: int, note: str) -> None:
        """Add files as one version."""
        added = [self.files[name] for name in names]
        self._epochs[app_id] = epoch
        self._add(app_id, epoch, "STREAMING UPDATE", note, (*self.content, *added))
        self.on_commit(added)

    def commit_elsewhere(self, app_id: str, epoch: int, note: str) -> Callable[[], None]:
        """Add a version of somebody else under an application's id; return what takes it back."""
        before = self._epochs.get(app_id)
        self._epochs[app_id] = epoch
        self._add(app_id, epoch, "STREAMING UPDATE", note, self.content)
        foreign = self.versions[-1]

        def undo() -> None:
            foreign.app_id, foreign.epoch, foreign.operation, foreign.note = "", 0, "OPTIMIZE", ""
            if before is None:
                self._epochs.pop(app_id, None)
            else:
                self._epochs[app_id] = before

        return undo

    def restore(self, number: int, note: str) -> None:
        """Add a version with the content of an older one; of none, if `number` is below 0."""
        content = self.versions[number].content if number >= 0 else ()
        self._add("", 0, "RESTORE", note, content)

    def _add(
        self, app_id: str, epoch: int, operation: str, note: str, content: tuple[StagedFile, ...]
    ) -> None:
        self.versions.append(TableVersion(len(self.versions), app_id, epoch, operation, note, content))
