"""Texts of the errors of Python, PySpark and the JVM, recognized by class names, so without Py4J."""

from __future__ import annotations

from typing import Any

from flinkish_spark.core.errors import causes_of
from flinkish_spark.protocol.errors import Chain

#: Of one failure; a chain that is longer says nothing new.
_MOST_CAUSES = 12


def is_gateway_gone(error: BaseException) -> bool:
    """Return whether `error` means that the JVM died, rather than that it refused something."""
    return any(_says_gateway_gone(one) for one in causes_of(error))


def _says_gateway_gone(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | EOFError):
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "py4j.protocol"]
    if not kinds or type(error).__name__ != "Py4JError":
        return "Py4JNetworkError" in kinds
    text = str(error)
    # What the JVM refuses comes with its trace; a JVM that is gone leaves one bare line.
    is_bare = text.startswith("An error occurred while calling") and "Trace:" not in text
    return is_bare or "Answer from Java side is empty" in text


def describe_failure(error: BaseException) -> str:
    """Return the text of an exception with those of all its causes in the JVM, the innermost last."""
    parts = [_strip_plan(_text(error))]
    seen: Any = error
    # PySpark converts exceptions of the JVM to its own; those that it does not know have no origin.
    while seen is not None and len(parts) < _MOST_CAUSES:
        java = getattr(seen, "java_exception", None) or getattr(seen, "_origin", None)
        if java is not None:
            return "\n".join(parts + _java_causes(java))
        seen = getattr(seen, "_cause", None)
        if seen is not None:
            parts.append(_strip_plan(str(getattr(seen, "_desc", "") or "")))
    return "\n".join(parts)


def describe_error(error: BaseException) -> str:
    """Return class and message of an exception for people, its innermost cause first."""
    inner = _find_root_cause(error, _MOST_CAUSES)
    return (
        _describe_one(error) if inner is error else f"{_describe_one(inner)}, and so {_describe_one(error)}"
    )


def _find_root_cause(error: BaseException, most: int) -> BaseException:
    """Return the root cause of an exception of Python; of a group, that of its first exception."""
    group = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
    cause = error.__cause__ or group
    if cause is None or most == 0 or is_of_the_jvm(error):
        return error
    return _find_root_cause(cause, most - 1)


def _describe_one(error: BaseException) -> str:
    if is_of_the_jvm(error):
        return Chain.of(describe_failure(error)).headline
    return f"{type(error).__name__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of a user's class
        return "<an exception that has no text>"


def is_of_the_jvm(error: BaseException) -> bool:
    return type(error).__module__.startswith(("py4j.", "pyspark."))


def _java_causes(java: Any) -> list[str]:
    found: list[str] = []
    while java is not None and len(found) < _MOST_CAUSES:
        try:
            found.append(_strip_plan(str(java.toString())))
            java = java.getCause()
        except Exception:  # the JVM may be gone; what was read so far is still useful
            break
    return found


def _strip_plan(text: str) -> str:
    # After this line Spark prints the whole plan, with every literal of ours in it.
    return text.split("=== Streaming Query ===", 1)[0]
