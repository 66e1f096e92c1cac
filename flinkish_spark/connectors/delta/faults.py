"""How a Delta table refuses, out of delta-rs and out of the JVM."""

from __future__ import annotations

from typing import Any


class DeltaRefused(Exception):
    """Delta refused; the message is Delta's own, without the stack."""


class DeltaViolated(DeltaRefused):
    """A row breaks a rule of the table; the message names both."""


class DeltaConflict(Exception):
    """Another writer was faster; the same call may be repeated."""


_CONFLICTS = (
    "ConcurrentTransactionException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "ConcurrentAppendException",
    "ConcurrentWriteException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentModificationException",
)
#: Starts the message of a check of ours in a task; what follows says which rule and which row.
VIOLATION_MARKER = "[FLINKISH_DELTA_RULE]"
_VIOLATIONS = ("DeltaInvariantViolationException", "InvariantViolationException")
#: Delta's own that are no refusals: a file or a disk that is not as it should be.
_FAILURES = ("DeltaIOException", "DeltaFileNotFoundException", "DeltaChecksumException")
_MOST_CAUSES = 12


def translated(error: Exception) -> Exception:
    """Return one of the exceptions above for one of the JVM's, or the same if none fits."""
    # The same is what a full disk or a failed task comes to; `raise_translated` raises it.
    causes = list(_causes(error))
    for _, message in causes:
        if VIOLATION_MARKER in message:
            return DeltaViolated(message.split(VIOLATION_MARKER, 1)[1].split("SQLSTATE", 1)[0].strip()[:2000])
    for name, message in causes:
        if name in _VIOLATIONS:
            return DeltaViolated(message[:2000].strip())
    for name, message in causes:
        if any(conflict in name for conflict in _CONFLICTS):
            return DeltaConflict(f"{name}: {message[:500]}")
    name, message = causes[0]
    if "AnalysisException" in name or (name.startswith("Delta") and name not in _FAILURES):
        return DeltaRefused(message[:2000])
    return error


def condition_of(error: Exception) -> str:
    getter = getattr(error, "getCondition", None)
    return str(getter() or "") if getter is not None else ""


def _causes(error: Exception) -> list[tuple[str, str]]:
    """Return class and message of an exception and of all that caused it."""
    java: Any = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if java is None:
        return [(type(error).__name__, str(error).split("\n\tat ")[0])]
    found: list[tuple[str, str]] = []
    # A chain of Java's, too, can come back to where it was.
    while java is not None and len(found) < _MOST_CAUSES:
        message = str(java.getMessage()).split("\n\tat ")[0]
        found.append((str(java.getClass().getSimpleName()), message))
        java = java.getCause()
    return found


class NotAsFiles(Exception):
    """Staged files cannot be named in the table as it is now; their rows may still fit."""
