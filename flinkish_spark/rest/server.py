"""The REST server in a thread, for `flinkish ui` or a job's driver."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import UiConfig
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.store_spec import StoreSpec

if TYPE_CHECKING:
    import uvicorn

#: Time limits for the server's start and end.
_STARTED_WITHIN_S, _ENDED_WITHIN_S = 20.0, 5.0


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
            f"the page needs the package {error.name}", what_to_do=how_to_install("ui")
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
