"""The control table: the newest committed checkpoint of each sink, and the owner epoch that wrote it.

It has one row per job and sink, written in the transaction of the checkpoint's rows, so it names exactly what
is visible. A transaction that changes the row locks it until its end, so of two processes one waits for the
other, and the older owner is turned away.

A note in the sink's folder records that the row was created: a row that is deleted later is missing evidence,
and must not be created again as if nothing had been committed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flinkish_spark.connectors.jdbc.dialect import Dialect, Session
from flinkish_spark.connectors.jdbc.names import TableName
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.timeline import Mark, find_token

_JOB, _SINK = "job_uuid", "sink_uid"
_CHECKPOINT, _EPOCH, _FACTS = "checkpoint_id", "owner_epoch", "facts"
_COLUMNS = (_JOB, _SINK, _CHECKPOINT, _EPOCH, _FACTS)
#: Key of the timeline's token among the facts.
TIMELINE = "timeline"


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
        """Return names and types of the columns; the first two are the key."""
        kinds = (dialect.name_text, dialect.name_text, dialect.number, dialect.number, dialect.text)
        return [(name, f"{kind} NOT NULL") for name, kind in zip(_COLUMNS, kinds, strict=True)]

    @classmethod
    def create(cls, session: Session, dialect: Dialect, table: TableName) -> None:
        session.run(dialect.create_table(table, cls.columns(dialect), (_JOB, _SINK)))

    def claim(self, session: Session) -> Mark | None:
        """Fence older owners; return what is visible, or None if a newer owner has claimed the row."""
        # This waits for a running transaction of an older owner. After that, only this owner or a newer one
        # can make more rows visible.
        self._update(session, {_EPOCH: int(self.epoch)}, (_EPOCH, "<=", int(self.epoch)))
        mark = self.mark(session)
        return None if mark.owner_epoch is None or mark.owner_epoch > self.epoch else mark

    def take_turn(self, session: Session, checkpoint: CheckpointId) -> bool:
        """Set the row to `checkpoint` if it holds an older one of an owner that is not newer."""
        is_older, is_ours = (_CHECKPOINT, "<", int(checkpoint)), (_EPOCH, "<=", int(self.epoch))
        sets: dict[str, int | str] = {_CHECKPOINT: int(checkpoint), _EPOCH: int(self.epoch), _FACTS: "{}"}
        return bool(self._update(session, sets, is_older, is_ours))

    def mark(self, session: Session) -> Mark:
        checkpoint, epoch, facts = self.read(session)
        return Mark(CheckpointId(checkpoint), find_token([str(facts.get(TIMELINE, ""))]), OwnerEpoch(epoch))

    def try_out(self, session: Session) -> None:
        self._make_row(session)
        _, _, facts = self.read(session)
        self.note(session, facts)

    def note(self, session: Session, facts: Mapping[str, Any], token: str | None = None) -> None:
        """Store the facts that a repeated commit of the checkpoint returns."""
        self._update(session, {_FACTS: json.dumps({**facts, **({TIMELINE: token} if token else {})})})

    def _update(self, session: Session, sets: Mapping[str, int | str], *limits: tuple[str, str, int]) -> int:
        """Set columns of the row if it meets the limits; return the number of updated rows."""
        mark, quote = self.dialect.marker, self.dialect.quote
        columns = ", ".join(f"{quote(name)} = {mark}" for name in sets)
        within = "".join(f" AND {quote(name)} {operator} {mark}" for name, operator, _ in limits)
        return session.run(
            f"UPDATE {self.dialect.table(self.table)} SET {columns} {self._where}{within}",
            (*sets.values(), *self._key, *(value for *_, value in limits)),
        )

    def read(self, session: Session) -> tuple[int, int, dict[str, Any]]:
        """Return checkpoint, owner epoch and facts; raise EnvironmentFault if there is no row."""
        names = self.dialect.list_of((_CHECKPOINT, _EPOCH, _FACTS))
        found = session.rows(f"SELECT {names} FROM {self.dialect.table(self.table)} {self._where}", self._key)
        if not found:
            raise EnvironmentFault(
                f"the row of sink '{self.uid}' is gone from the control table {self.table}",
                why="without it, it is unknown which checkpoints are in the database, and they could be "
                "written twice",
                what_to_do=f"restore it; or insert one with job_uuid '{self.job}', sink_uid '{self.uid}', "
                "the newest checkpoint_id whose rows are in, owner_epoch 0 and facts '{}'",
            )
        checkpoint, epoch, facts = found[0]
        return int(checkpoint), int(epoch), json.loads(facts)

    def require_row(self, session: Session, place: StoreSpec, database: str) -> None:
        """Create the row if this sink never had one; call it first, outside of a transaction."""
        store = place.open()
        # A separate note for each database and row.
        row = f"{database} {self.table} {self.job} {self.uid}"
        note = f"control-row-{hashlib.sha256(row.encode()).hexdigest()[:16]}"
        try:
            store.read(note)
        except ObjectMissing:
            self._make_row(session)
            # This order matters: the note exists before anything is committed.
            store.put(note, b"")
        else:
            self.read(session)

    def _make_row(self, session: Session) -> None:
        row = (*self._key, 0, 0, "{}")
        session.run(self.dialect.insert_if_absent(self.table, _COLUMNS, (_JOB, _SINK)), row)

    @property
    def _where(self) -> str:
        mark, quote = self.dialect.marker, self.dialect.quote
        return f"WHERE {quote(_JOB)} = {mark} AND {quote(_SINK)} = {mark}"

    @property
    def _key(self) -> tuple[str, str]:
        return str(self.job), self.uid
