"""One connection to a database: errors as this package's, and a limit for the server's silence."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flinkish_spark.connectors.buffer import BufferedFileGone
from flinkish_spark.connectors.jdbc.dialect import Session, TransactionLost, Trouble
from flinkish_spark.connectors.jdbc.settings import JdbcSettings
from flinkish_spark.core.errors import EnvironmentFault, FlinkishError
from flinkish_spark.core.forks import ProcessConnection, keep_forever

#: How often a silent server is looked at within its time; it may take one look more.
_LOOKS = 4


class DatabaseUnavailable(EnvironmentFault):
    """The database does not answer, or cannot do it now."""

    restartable = True


class DatabaseRefused(EnvironmentFault):
    """The database refuses what the sink does; somebody has to see to it."""


class Database(ProcessConnection):
    """One connection at a time, made anew when it is lost; errors as this package's, without secrets."""

    def __init__(self, settings: JdbcSettings, uid: str, connect: Callable[[], Any] | None = None) -> None:
        self._settings, self._uid = settings, uid
        self._connect = connect or settings.connect
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._is_prepared = False
        self.keep_from_children()

    def leave_to_parent(self) -> None:
        # To close it in a child would end the parent's session, or roll it back.
        if self._session is not None:
            keep_forever(self._session.connection)
            self._session = None

    @contextlib.contextmanager
    def use(self, prepare: Callable[[Session], None] = lambda session: None) -> Iterator[Session]:
        """Give the connection; whatever goes wrong in the block closes it."""
        # Without `from`: the driver's error may show how it was called.
        failed: FlinkishError
        patience: _Patience | None = None
        try:
            if self._session is None:
                self._session = Session(self._connect())
            patience = _Patience(self._settings.timeout_ms, self._session, self._is_at_work, self.interrupt)
            with patience:
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
            failed = self._fault(error, is_ours=patience is not None and patience.is_over)
        raise failed

    def interrupt(self) -> None:
        with self._lock:
            if self._session is not None:
                self._settings.dialect.interrupt(self._session.connection)

    def _is_at_work(self) -> bool:
        """Ask the server, over a connection of its own, whether it works on what it was told."""
        session, other = self._session, None
        try:
            other = Session(self._connect())
            return session is not None and self._settings.dialect.is_at_work(session.connection, other)
        except Exception:
            return False
        finally:
            if other is not None:
                other.close()

    def _fault(self, error: Exception, *, is_ours: bool) -> FlinkishError:
        if isinstance(error, TransactionLost):
            is_about_values = self._settings.dialect.trouble(error.first) is Trouble.REFUSED
            return self._fault(error.second if is_about_values else error.first, is_ours=is_ours)
        trouble = self._settings.dialect.trouble(error)
        why = self._settings.scrubbed(self._settings.dialect.reason(error))
        place = f"the database {self._settings.url} of sink '{self._uid}'"
        if is_ours:
            return DatabaseUnavailable(
                f"{place} was silent for {self._settings.timeout_ms} ms, so this sink ended the connection",
                why=f"{why}; neither did an answer come, nor does the server say that it works on one",
                what_to_do="see whether it can be reached; if its answers take longer, raise timeout_ms",
            )
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
        with self._lock:  # behind this its number may be somebody else's
            if self._session is not None:
                self._session.close()
                self._session = None


class _Patience:
    """Ends the connection to a server that is silent: a limit for silence, not for work."""

    # It begins anew with each answer. Where none came, the server is asked whether it is at work: a trigger
    # may take longer than any limit, and the same work begins with the next try.

    def __init__(
        self, timeout_ms: int, session: Session, is_at_work: Callable[[], bool], end: Callable[[], None]
    ) -> None:
        self._step_s, self._session = timeout_ms / 1000 / _LOOKS, session
        self._is_at_work, self._end = is_at_work, end
        self._lock, self._left = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flinkish-jdbc-patience", daemon=True)
        self.is_over = False

    def _watch(self) -> None:
        seen, silent = -1, 0
        while not self._left.wait(self._step_s):
            # What this process does between two statements is no silence of the server's.
            is_silent = self._session.is_asking and self._session.answers == seen
            seen, silent = self._session.answers, silent + 1 if is_silent else 0
            if silent < _LOOKS:
                continue
            silent = 0
            if self._is_at_work():
                continue
            with self._lock:
                if not self._left.is_set() and self._session.answers == seen:
                    self.is_over = True
                    self._end()
                    return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        with self._lock:  # behind this nobody is interrupted for what is over
            self._left.set()
