"""The REST server in a thread, for `flinkish ui` or a job's driver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.durations import PathText

if TYPE_CHECKING:
    import uvicorn

#: Time limits for the server's start and end.
_STARTED_WITHIN_S, _ENDED_WITHIN_S = 20.0, 5.0
_MOST_PORT = 65_535


@dataclass(frozen=True)
class UiConfig:
    """The configuration of a job's web page and REST server.

    Parameters
    ----------
    host
        The address on which it listens. By default loopback, which other machines cannot reach, and where
        reading needs no token. On any other address reading needs the token, too; put a proxy with TLS before
        the server.
    port
        The port; 0 picks a free one.
    token
        The token that changes must have as `Authorization: Bearer TOKEN`. None makes a new one at each start.
    names
        Further host names of the server, for example a proxy's.
    can_change
        True if the page may trigger checkpoints and savepoints, and stop, cancel and rewind the job.
    savepoint_dir
        Parent directory of savepoints for requests without one: an absolute path, or a URL.

    Examples
    --------
    >>> UiConfig(port=8081, savepoint_dir="/data/savepoints").host
    '127.0.0.1'
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, _MOST_PORT)] = 0
    token: str | None = field(default=None, repr=False)
    names: Sequence[str] = ()
    can_change: bool = True
    savepoint_dir: PathText = ""

    def __post_init__(self) -> None:
        check_fields(
            self,
            host='give an address like "127.0.0.1"',
            port="give a number from 1 to 65535, or 0 for a port that is free",
        )
        if self.token is not None and (not isinstance(self.token, str) or len(self.token) < 16):
            raise ConfigError(
                "the token cannot be used",
                why="it must be a text of 16 characters or more, so that nobody guesses it",
                what_to_do="leave it out for a new one",
            )
        if self.savepoint_dir:
            StoreSpec.parse(self.savepoint_dir)


class UiServer:
    def __init__(self, places: Sequence[StoreSpec], config: UiConfig) -> None:
        self._server, self._closing, self.token = _server(places, config)
        self._socket = _listening(config.host, config.port)
        host = config.host.strip("[]")
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{self._socket.getsockname()[1]}/"
        self._thread = threading.Thread(target=self._run, name="flinkish-ui", daemon=True)
        self._thread.start()
        clock, began_ms = SystemClock(), SystemClock().monotonic_ms()
        while not self._server.started and self._thread.is_alive():
            if clock.monotonic_ms() - began_ms > _STARTED_WITHIN_S * 1_000:
                break
            clock.sleep_ms(10)
        if not self._server.started:
            self.stop()
            raise EnvironmentFault(
                f"the page of the job did not start at {self.url}",
                what_to_do="look at the log of this process, or leave ui out",
            )

    @property
    def url(self) -> str:
        return self._url

    @property
    def link(self) -> str:
        # Browsers do not send the part after `#`: whoever has the link may change jobs, but no proxy sees the
        # token.
        return f"{self.url}#token={self.token}"

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        """End the server, and release its port; a second call does nothing."""
        self._closing.set()
        self._server.should_exit = True
        self._thread.join(_ENDED_WITHIN_S)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])


def _server(places: Sequence[StoreSpec], config: UiConfig) -> tuple[uvicorn.Server, threading.Event, str]:
    try:
        import uvicorn

        from flinkish_spark.rest.access import Access, new_token
        from flinkish_spark.rest.app import ServedJobs, application
    except ImportError as error:
        raise ConfigError(
            f"the page needs the package {error.name}",
            why="it is not installed in this Python",
            what_to_do=how_to_install("ui"),
        ) from None
    from flinkish_spark.rest.jobs import JobsInPlaces

    token = config.token or new_token()
    access = Access(config.host, token, frozenset(config.names), config.can_change)
    served = ServedJobs(JobsInPlaces(places, SystemClock()), access, config.savepoint_dir)
    settings = uvicorn.Config(
        application(served),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(settings), served.closing, token


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(128)
        return listening
    except OSError as error:
        raise EnvironmentFault(
            f"the server cannot listen on port {port} of {host}",
            why=str(error),
            what_to_do="choose another port, or 0 for one that is free",
        ) from None
