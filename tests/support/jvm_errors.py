"""What Py4J raises, without a JVM: its own exceptions about throwables that a scripted gateway knows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from py4j.protocol import Py4JJavaError, get_return_value


class Throwables:
    """Answers Py4J's commands about a chain of Java exceptions, as the JVM that has them does.

    Parameters
    ----------
    chain
        Class and message of each, the outermost first; each is caused by the next.
    closed
        Whether the innermost is caused by the outermost, as a wrong `initCause` can make it.
    """

    def __init__(self, chain: Sequence[tuple[str, str]], *, closed: bool = False) -> None:
        self._chain, self._closed = chain, closed
        self.address, self.port, self.is_connected = "127.0.0.1", 0, True
        self.gateway_property = SimpleNamespace(enable_memory_management=False, auto_field=False, pool=None)
        self.converters: tuple[Any, ...] = ()
        self.asked = 0

    def raised(self) -> Py4JJavaError:
        """Return what the call that ended with the outermost raises."""
        try:
            get_return_value("xr0", self, "o7", "commit")
        except Py4JJavaError as error:
            return error
        raise AssertionError("an answer of the JVM that is an error is raised")

    def send_command(self, command: str, **_: Any) -> str:
        """Answer a call of a method of one of them, or the question for the whole trace."""
        self.asked += 1
        kind, target, *rest = command.split("\n")
        if kind == "p":
            return "ys" + "\\nCaused by: ".join(f"{name}: {says}" for name, says in self._chain)
        at, _, part = target.partition(".")
        return self._said(int(at), part, rest[0])

    def _said(self, at: int, part: str, method: str) -> str:
        name, says = self._chain[at]
        match part, method:
            case "", "getCause":
                following = at + 1
                if following == len(self._chain):
                    return "yr0" if self._closed else "yn"
                return f"yr{following}"
            case "", "getMessage":
                return f"ys{says}"
            case "", "toString":
                return f"ys{name}: {says}"
            case "", "getClass":
                return f"yr{at}.class"
            case "class", "getSimpleName":
                return f"ys{name.rpartition('.')[2]}"
            case "class", "getName":
                return f"ys{name}"
        raise AssertionError(f"nothing is known of {method} of {part or 'an exception'}")


#: A write to a disk that is full, as Spark passes it on.
FULL_DISK = (
    (
        "org.apache.spark.SparkException",
        "Job aborted due to stage failure: Task 9 in stage 58.0 failed 4 times",
    ),
    ("java.io.IOException", "No space left on device"),
)
