"""Committing checkpoints into a table: compare-and-set, rows, refused records, in one transaction."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flinkish_spark.errors import EnvironmentFault, FlinkishError
from flinkish_spark.forks import Connected, never_finalized
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sinks.base import SinkContext
from flinkish_spark.sinks.buffer import Applied, BufferedCommitter, BufferedRows
from flinkish_spark.sinks.buffer_files import BufferedFileGone
from flinkish_spark.sinks.jdbc.control import TIMELINE, ControlTable, Turn
from flinkish_spark.sinks.jdbc.dialect import Dialect, Session, TransactionLost, Trouble
from flinkish_spark.sinks.jdbc.refused import DeadLetterTable
from flinkish_spark.sinks.jdbc.settings import JdbcSettings
from flinkish_spark.sinks.jdbc.writing import CheckpointWrite, Written


class DatabaseUnavailable(EnvironmentFault):
    """The database does not answer, or cannot do it now."""

    restartable = True


class DatabaseRefused(EnvironmentFault):
    """The database refuses what the sink does; somebody has to see to it."""


class Database(Connected):
    """One connection at a time, made anew when it is lost; errors as this package's, without secrets.

    Parameters
    ----------
    settings
        Of the sink.
    uid
        Of the sink, for messages.
    connect
        Returns a connection of the driver.
    """

    def __init__(self, settings: JdbcSettings, uid: str, connect: Callable[[], Any] | None = None) -> None:
        self._settings, self._uid = settings, uid
        self._connect = connect or settings.connect
        self._session: Session | None = None
        self._is_prepared = False
        self.keep_from_children()

    def leave_to_parent(self) -> None:
        """Forget the connection, in a child: closing it would end the parent's session, or roll it back."""
        if self._session is not None:
            never_finalized(self._session.connection)
            self._session = None

    @property
    def dialect(self) -> Dialect:
        """Of the database."""
        return self._settings.dialect

    @contextlib.contextmanager
    def use(self, prepare: Callable[[Session], None] = lambda session: None) -> Iterator[Session]:
        """Give the connection; whatever goes wrong in the block closes it.

        Parameters
        ----------
        prepare
            Called with the first connection.

        Raises
        ------
        DatabaseUnavailable, DatabaseRefused
            For an error of the driver. Errors of this package pass.
        """
        # Without `from`: the driver's error may show how it was called.
        failed: FlinkishError
        try:
            if self._session is None:
                self._session = Session(self._connect())
            with _Patience(self._settings.timeout_ms, self.dialect, self._session):
                if not self._is_prepared:
                    prepare(self._session)
                    self._is_prepared = True
                yield self._session
            return
        except (FlinkishError, BufferedFileGone):
            self.close()
            raise
        except Exception as error:
            self.close()
            failed = self._fault(error)
        raise failed

    def _fault(self, error: Exception) -> FlinkishError:
        if isinstance(error, TransactionLost):
            is_about_values = self.dialect.trouble(error.first) is Trouble.REFUSED
            return self._fault(error.second if is_about_values else error.first)
        trouble = self.dialect.trouble(error)
        why = self._settings.scrubbed(self.dialect.reason(error))
        place = f"the database {self._settings.url} of sink '{self._uid}'"
        if trouble is Trouble.PASSING:
            return DatabaseUnavailable(
                f"{place} cannot be used now", why=why, what_to_do="see whether it runs and can be reached"
            )
        return DatabaseRefused(
            f"{place} refuses a statement",
            why=why,
            what_to_do="see to tables and rights, then start the job again; what is decided is kept",
        )

    def close(self) -> None:
        """Close the connection; the next use makes a new one."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _Patience:
    """Ends statements that take longer than they may, so that a silent server is a lost connection."""

    def __init__(self, timeout_ms: int, dialect: Dialect, session: Session) -> None:
        self._dialect, self._session = dialect, session
        self._lock, self._is_over = threading.Lock(), False
        self._timer = threading.Timer(timeout_ms / 1000, self._interrupt)
        self._timer.daemon = True

    def _interrupt(self) -> None:
        with self._lock:
            if not self._is_over:
                self._dialect.interrupt(self._session.connection)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:  # behind this the connection may be closed, and its number be somebody else's
            self._is_over = True


class JdbcCommitter(BufferedCommitter):
    """Commits out of the write-ahead buffer.

    Parameters
    ----------
    settings
        Of the sink.
    context
        Whose sink it is.
    connect
        Replaces the making of connections; for tests.
    """

    def __init__(
        self, settings: JdbcSettings, context: SinkContext, connect: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._database = Database(settings, context.uid, connect)
        self._control = ControlTable(
            settings.dialect, settings.control_table, context.job, context.uid, context.owner_epoch
        )

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Write all rows with the checkpoint's id, or find that it was done."""
        dialect, settings = self._settings.dialect, self._settings
        with self._database.use(self._prepare) as session, session.transaction(dialect.begin):
            # This order matters: behind the claim nobody else changes the row until this transaction ends.
            if self._control.claim(session) is not None:
                self._require_ours(self._control.mark(session), checkpoint)
            turn = self._control.take_turn(session, checkpoint)
            if turn is Turn.FENCED:
                return CommitAnswer(Outcome.FENCED, "a newer owner has written to the control table")
            if turn is Turn.DONE:
                return self._repeated(session, checkpoint)
            # Asked each time: somebody may have changed the table.
            settings.require_upsert(session, self._context.schema, self._context.uid)
            write = CheckpointWrite(
                session,
                dialect,
                settings.target(self._context.schema),
                settings.delete_when,
                settings.on_refused,
                self._context.uid,
                settings.ties(session, self._context.schema),
                settings.scrubbed,
            )
            done = write.run(rows)
            if done.refusals and isinstance(settings.on_refused, DeadLetterTable):
                settings.on_refused.write(session, self._control, checkpoint, done.refusals)
            facts = _facts(done, settings)
            self._control.note(session, facts, self._context.timeline.mark_of(checkpoint).token)
        return CommitAnswer(Outcome.COMMITTED, facts=facts)

    def newest_marks(self) -> Sequence[Mark]:
        """Ask the control table."""
        with self._database.use(self._prepare) as session:
            mark = self._control.mark(session)
        return (mark,) if mark.checkpoint > CheckpointId(0) else ()

    def _require_ours(self, mark: Mark, checkpoint: CheckpointId) -> None:
        if mark.checkpoint > CheckpointId(0):
            self._context.require_ours(mark, checkpoint)

    def _repeated(self, session: Session, checkpoint: CheckpointId) -> CommitAnswer:
        newest, _, facts = self._control.read(session)
        facts.pop(TIMELINE, None)
        return CommitAnswer(Outcome.ALREADY_COMMITTED, facts=facts if newest == int(checkpoint) else {})

    def has_applied(self, checkpoint: CheckpointId) -> Applied:
        """Ask the control table, behind any older owner that is still at it."""
        with self._database.use(self._prepare) as session, session.transaction(self._settings.dialect.begin):
            newest = self._control.claim(session)
            if newest is not None:
                self._require_ours(self._control.mark(session), checkpoint)
        if newest is None:
            return Applied.UNKNOWN
        return Applied.YES if newest >= checkpoint else Applied.NO

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Return that rows cannot be taken back, if any were committed after `target`."""
        with self._database.use(self._prepare) as session:
            newest, _, _ = self._control.read(session)
        if newest <= int(target):
            return ""
        return (
            f"the table {self._settings.table_name} of sink '{self._context.uid}' holds rows of checkpoint "
            f"{newest}, and a database keeps no older versions that could be taken back"
        )

    def close(self) -> None:
        """Close the connection."""
        self._database.close()

    def _prepare(self, session: Session) -> None:
        settings = self._settings
        settings.create_tables(session, self._context.schema)
        self._control.require_row(session, self._control.note_in(self._context.folder, str(settings.url)))


def _facts(done: Written, settings: JdbcSettings) -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": done.written}
    if settings.key:
        facts |= {"deleted": done.deleted, "superseded": done.superseded}
    if done.refusals:
        facts["refused"] = len(done.refusals)
    return facts
