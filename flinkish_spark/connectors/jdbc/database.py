"""One connection to a database, with translated errors and a time limit for a silent server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from flinkish_spark.connectors.buffer import BufferedFileError
from flinkish_spark.connectors.jdbc.dialect import LostTransaction, Session, Trouble
from flinkish_spark.connectors.jdbc.settings import JdbcSettings
from flinkish_spark.core.errors import EnvironmentFault, FlinkishError, UnavailableError
from flinkish_spark.core.forks import ProcessConnection, keep_forever

#: Checks of a silent server within the timeout; it ends at most one check later.
_LOOKS = 4


class Database(ProcessConnection):
    """One connection at a time, reopened when it is lost; errors are translated and contain no secrets."""

    def __init__(self, settings: JdbcSettings, uid: str, connect: Callable[[], Any] | None = None) -> None:
        self._settings, self._uid = settings, uid
        self._connect = connect or settings.connect
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._is_prepared = False
        self.keep_from_children()

    def leave_to_parent(self) -> None:
        # Closing it in a child process would end the parent's session, or roll it back.
        if self._session is not None:
            keep_forever(self._session.connection)
            self._session = None

    @contextlib.contextmanager
    def use(self, prepare: Callable[[Session], None] = lambda session: None) -> Iterator[Session]:
        """Yield the connection; an error in the block closes it."""
        # Raised without `from`: the driver's error may show the arguments of its call.
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
        except (FlinkishError, BufferedFileError):
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
        """Ask the server, over a second connection, if it is executing this connection's statement."""
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
        if isinstance(error, LostTransaction):
            is_about_values = self._settings.dialect.trouble(error.first) is Trouble.REFUSED
            return self._fault(error.second if is_about_values else error.first, is_ours=is_ours)
        trouble = self._settings.dialect.trouble(error)
        why = self._settings.scrub(self._settings.dialect.reason(error))
        place = f"the database {self._settings.url} of sink '{self._uid}'"
        if is_ours:
            return UnavailableError(
                f"{place} was silent for {self._settings.timeout_ms} ms, so this sink ended the connection",
                why=f"{why}; the server sent no answer, and does not say that it is executing a statement",
                what_to_do="see whether it can be reached; if its answers take longer, raise timeout_ms",
            )
        if trouble is Trouble.PASSING:
            return UnavailableError(
                f"{place} cannot be used now", why=why, what_to_do="see whether it runs and can be reached"
            )
        return EnvironmentFault(
            f"{place} refuses a statement",
            why=why,
            what_to_do="check tables and rights, then start the job again; decided checkpoints are kept",
        )

    def close(self) -> None:
        with self._lock:  # after this its file descriptor may belong to another connection
            if self._session is not None:
                self._session.close()
                self._session = None


class _Patience:
    """Ends the connection to a silent server; a server that is executing a statement has no time limit."""

    # The time starts again with each answer. Without an answer the server is asked if it is executing the
    # statement: a trigger may take longer than any limit, and the next try would start the same work again.

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
            # Time between two statements does not count as silence.
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
        with self._lock:  # after this the watching thread interrupts nothing
            self._left.set()
