"""Puts a switch into Py4J's connection: each call into the JVM that a checkpoint makes can fail.

What fails is the call itself, inside of whatever the product has around it, and it fails as the JVM lets it
fail: Py4J is answered that a Java exception was thrown, which has another one as its cause.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flinkish_spark
from tests.crash.sweep.files import OUTAGE
from tests.crash.sweep.points import Call, Effect, Fault, Layer
from tests.crash.sweep.switch import Switch, switch_of_this_thread

_PACKAGE = str(Path(flinkish_spark.__file__).parent)
#: Where calls into the JVM are made that a checkpoint needs.
_CALLERS = tuple(
    str(Path(_PACKAGE, *parts))
    for parts in (("bridge",), ("connectors", "delta"), ("connectors", "row_count.py"))
)
#: How Py4J's answer begins that is an exception, and its command that calls a method.
_THROWN, _CALL = "xr", "c"
#: Methods that change something outside of the JVM: they can also be done, and their answer be lost.
_WRITES = frozenset({"commit", "save", "parquet", "write", "delete", "stage"})


def hook_gateway(spark: Any) -> Callable[[], None]:
    """Watch the connection of a session; return what takes the hook out again.

    Only calls within a call of the switch's are seen (see `Switch.around`), by the thread that makes it.
    """
    client, thrown = spark._jvm._gateway_client, []
    original = client.send_command

    def answer_of_exception(switch: Switch) -> str:
        with switch.looking_away():
            java = spark._jvm.java.io.IOException(OUTAGE)
            # Kept: with its last object here the JVM would let it go, before Py4J has made another one of it.
            thrown.append(spark._jvm.org.apache.spark.SparkException("Job aborted.", java))
        return f"{_THROWN}{thrown[-1]._target_id}"

    @functools.wraps(original)
    def send_command(command: str, *args: Any, **kwargs: Any) -> Any:
        call = None if switch_of_this_thread() is None else call_of(command, sys._getframe(1))
        if call is None:
            return original(command, *args, **kwargs)
        switch = switch_of_this_thread()
        assert switch is not None
        fault = switch.passing(call)
        if fault is Fault.FAIL:
            return answer_of_exception(switch)
        answer = original(command, *args, **kwargs)
        return answer_of_exception(switch) if fault is Fault.LOST else answer

    client.send_command = send_command
    return lambda: setattr(client, "send_command", original)


def call_of(command: str, frame: Any) -> Call | None:
    """Return a command as a call at the boundary; None if it is of somebody else, and writes nothing.

    It is named by the function of the product that makes it, and by the method.
    """
    kind, _, rest = command.partition("\n")
    if kind != _CALL:
        return None
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    if frame is None:
        return None
    method = rest.split("\n", 2)[1]
    if not frame.f_code.co_filename.startswith(_CALLERS) and method not in _WRITES:
        # What PySpark asks the JVM to make a column, for example.
        return None
    name = f"jvm.{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name} {method}"
    return Call(name, Layer.JVM, Effect.WRITE if method in _WRITES else Effect.READ)
