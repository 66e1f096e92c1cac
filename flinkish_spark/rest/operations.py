"""Asynchronous operations triggered over REST; clients poll for their end by trigger id.

As in Flink, a trigger is answered at once, and clients poll its state until it is COMPLETED. Only this server
knows the running operations. If it ends, they are forgotten, but the job still carries them out.
"""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flinkish_spark.core.clock import Threads
from flinkish_spark.core.errors import FlinkishError

LOG = logging.getLogger(__name__)
#: Limits of remembered ended operations, and of running ones.
_MOST_KEPT, _MOST_RUNNING = 1_000, 32
_ID = re.compile(r"[0-9a-f]{32}")


class RequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(slots=True)
class Operation:
    #: Job and kind of the operation; a trigger id is valid for these only.
    job_id: str
    kind: str
    #: The result; None until the end, and if it failed.
    result: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.result is not None or self.failure is not None


class Operations:
    """The operations of a server; thread-safe."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Operation] = OrderedDict()

    def begin(
        self, job_id: str, kind: str, work: Callable[[], dict[str, Any]], trigger_id: str | None = None
    ) -> str:
        name = uuid.uuid4().hex if trigger_id is None else trigger_id
        if not _ID.fullmatch(name):
            raise RequestError(400, f"a trigger id is 32 lower-case hexadecimal digits, got {name[:80]!r}")
        operation = Operation(job_id, kind)
        with self._lock:
            known = self._known.get(name)
            if known is not None:
                # A repeated request with the client's own trigger id starts no new operation.
                if (known.job_id, known.kind) != (job_id, kind):
                    raise RequestError(409, "that trigger id belongs to another operation")
                return name
            if sum(not one.has_ended for one in self._known.values()) >= _MOST_RUNNING:
                raise RequestError(503, "too many operations are under way; ask again when some have ended")
            self._known[name] = operation
            self._forget()
        self._threads.start(f"flinkish-rest-{kind}", lambda: self._run(operation, work))
        return name

    def find(self, job_id: str, kinds: frozenset[str], trigger_id: str) -> Operation | None:
        with self._lock:
            found = self._known.get(trigger_id)
        return found if found is not None and found.job_id == job_id and found.kind in kinds else None

    def _forget(self) -> None:
        ended = [name for name, one in self._known.items() if one.has_ended]
        for name in ended[: max(0, len(ended) - _MOST_KEPT)]:
            del self._known[name]

    @staticmethod
    def _run(operation: Operation, work: Callable[[], dict[str, Any]]) -> None:
        try:
            operation.result = work()
        except (RequestError, FlinkishError) as error:
            operation.failure = str(error)
        except Exception as error:
            LOG.exception("an operation of the REST server failed")
            operation.failure = f"{type(error).__name__}: {error}"
