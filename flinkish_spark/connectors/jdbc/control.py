"""The control table: which checkpoint of a sink the database holds, and whose owner was there last.

One row per job and sink. It is written in the transaction of the checkpoint's rows, so it says exactly
what is visible. Whoever changes it has the row locked until the transaction ends, so of two processes
one waits for the other, and the older owner is turned away.

That the row was made is noted in the sink's folder, too: a row that goes away afterwards takes the evidence
with it, and is never made again as if nothing had been committed.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.connectors.jdbc.dialect import Dialect, Session
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.store import ObjectMissing, Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.timeline import Mark, token_in

_JOB, _SINK = "job_uuid", "sink_uid"
_CHECKPOINT, _EPOCH, _FACTS = "checkpoint_id", "owner_epoch", "facts"
#: Among the facts: the token of the timeline.
TIMELINE = "timeline"


class Turn(enum.Enum):
    #: The checkpoint is this transaction's to write.
    MINE = "MINE"
    #: It is visible already.
    DONE = "DONE"
    #: A newer owner of the job was there.
    FENCED = "FENCED"


class ControlRowGone(EnvironmentFault):
    """The evidence of what is in the database has been deleted."""


@dataclass(frozen=True, slots=True)
class RowNote:
    """An object at the sink's place, which says that the row was made."""

    store: Store
    #: Another one for each database and each row.
    key: str

    def is_there(self) -> bool:
        try:
            return self.store.read(self.key) is not None
        except ObjectMissing:
            return False

    def write(self) -> None:
        self.store.put(self.key, b"")


@dataclass(frozen=True)
class ControlTable:
    """The row of one job and sink. Every method runs within the caller's transaction."""

    dialect: Dialect
    table: TableName
    job: JobUuid
    uid: str
    epoch: OwnerEpoch

    @staticmethod
    def columns(dialect: Dialect) -> list[tuple[str, str]]:
        """Return names and types of its columns; the first two are the key."""
        return [
            (_JOB, f"{dialect.name_text} NOT NULL"),
            (_SINK, f"{dialect.name_text} NOT NULL"),
            (_CHECKPOINT, f"{dialect.number} NOT NULL"),
            (_EPOCH, f"{dialect.number} NOT NULL"),
            (_FACTS, f"{dialect.text} NOT NULL"),
        ]

    @classmethod
    def create(cls, session: Session, dialect: Dialect, table: TableName) -> None:
        session.run(dialect.create_table(table, cls.columns(dialect), (_JOB, _SINK)))

    def take_turn(self, session: Session, checkpoint: CheckpointId) -> Turn:
        """Set the row to `checkpoint` if it holds an older one of an owner that is not newer."""
        mark, quoted = self.dialect.marker, self.dialect.quoted
        changed = session.run(
            f"UPDATE {self.dialect.table(self.table)} SET {quoted(_CHECKPOINT)} = {mark}, "
            f"{quoted(_EPOCH)} = {mark}, {quoted(_FACTS)} = {mark} "
            f"{self._where} AND {quoted(_CHECKPOINT)} < {mark} AND {quoted(_EPOCH)} <= {mark}",
            (int(checkpoint), int(self.epoch), "{}", *self._key, int(checkpoint), int(self.epoch)),
        )
        if changed:
            return Turn.MINE
        _, epoch, _ = self.read(session)
        return Turn.FENCED if epoch > int(self.epoch) else Turn.DONE

    def claim(self, session: Session) -> CheckpointId | None:
        """Turn older owners away from now on; return what is visible, or None if a newer one was there."""
        # Waits for a transaction of an older owner that is under way. Behind it the answer stands: what is
        # not visible then can become so only through this owner or a newer one.
        mark, quoted = self.dialect.marker, self.dialect.quoted
        session.run(
            f"UPDATE {self.dialect.table(self.table)} SET {quoted(_EPOCH)} = {mark} "
            f"{self._where} AND {quoted(_EPOCH)} <= {mark}",
            (int(self.epoch), *self._key, int(self.epoch)),
        )
        checkpoint, epoch, _ = self.read(session)
        return None if epoch > int(self.epoch) else CheckpointId(checkpoint)

    def mark(self, session: Session) -> Mark:
        checkpoint, epoch, facts = self.read(session)
        return Mark(CheckpointId(checkpoint), token_in([str(facts.get(TIMELINE, ""))]), OwnerEpoch(epoch))

    def try_out(self, session: Session) -> None:
        self._make_row(session)
        _, _, facts = self.read(session)
        self.note(session, facts)

    def note(self, session: Session, facts: Mapping[str, Any], token: str | None = None) -> None:
        """Write what a repeated commit shall say about the checkpoint whose turn it is."""
        facts = {**facts, **({TIMELINE: token} if token else {})}
        session.run(
            f"UPDATE {self.dialect.table(self.table)} SET {self.dialect.quoted(_FACTS)} = "
            f"{self.dialect.marker} {self._where}",
            (json.dumps(facts), *self._key),
        )

    def read(self, session: Session) -> tuple[int, int, dict[str, Any]]:
        """Return checkpoint, owner epoch and facts; raise ControlRowGone if there is no row."""
        names = self.dialect.list_of((_CHECKPOINT, _EPOCH, _FACTS))
        found = session.rows(f"SELECT {names} FROM {self.dialect.table(self.table)} {self._where}", self._key)
        if not found:
            raise self._gone()
        checkpoint, epoch, facts = found[0]
        return int(checkpoint), int(epoch), json.loads(facts)

    def note_in(self, where: StoreSpec, database: str) -> RowNote:
        place = f"{database} {self.table} {self.job} {self.uid}"
        return RowNote(where.open(), f"control-row-{hashlib.sha256(place.encode()).hexdigest()[:16]}")

    def require_row(self, session: Session, note: RowNote) -> None:
        """Make the row if this sink never had one; call it outside of a transaction, before any other."""
        if note.is_there():
            found = session.rows(f"SELECT 1 FROM {self.dialect.table(self.table)} {self._where}", self._key)
            if not found:
                raise self._gone()
            return
        self._make_row(session)
        # This order matters: whatever is committed later has the note behind it.
        note.write()

    def _gone(self) -> ControlRowGone:
        return ControlRowGone(
            f"the row of sink '{self.uid}' is gone from the control table {self.table}",
            why="without it nobody knows which checkpoints are in the database, and they could get in twice",
            what_to_do=f"restore it; or insert one with job_uuid '{self.job}', sink_uid '{self.uid}', the "
            "newest checkpoint_id whose rows are in, owner_epoch 0 and facts '{}'",
            uid=self.uid,
        )

    def _make_row(self, session: Session) -> None:
        names = [name for name, _ in self.columns(self.dialect)]
        session.run(self.dialect.insert_if_absent(self.table, names, (_JOB, _SINK)), (*self._key, 0, 0, "{}"))

    @property
    def _where(self) -> str:
        mark, quoted = self.dialect.marker, self.dialect.quoted
        return f"WHERE {quoted(_JOB)} = {mark} AND {quoted(_SINK)} = {mark}"

    @property
    def _key(self) -> tuple[str, str]:
        return str(self.job), self.uid
