"""What a crash point is: one call at the boundary of the product, and what can be done to it.

A call is named by what it does to what, with ids left out, so that its name is the same in every
checkpoint and every run: ``store.create_if_absent checkpoints/*/decision.json``. A point is a call
and its how-manieth occurrence since its window opened.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Fault(enum.Enum):
    """What happens to a call."""

    #: The process dies right before it.
    KILL = "kill"
    #: It fails once, and nothing was done.
    FAIL = "fail"
    #: It is done, and its answer is lost.
    LOST = "reply-lost"
    #: It is done twice; the caller gets the first answer.
    TWICE = "twice"


class Effect(enum.Enum):
    """Whether a call may change something outside the process."""

    READ = "read"
    WRITE = "write"


class Layer(enum.Enum):
    """Where a call was seen."""

    #: A function of the product that touches something outside.
    CALL = "call"
    #: A function of the bridge to the JVM. It is its calls into the JVM that fail.
    BRIDGE = "bridge"
    #: A call into the JVM that Spark's or Delta's classes answer.
    JVM = "jvm"
    #: What the coordinator calls on a sink's committer: idempotent by contract.
    SINK = "sink"
    #: The call that stages a micro-batch. It is not repeated: each attempt has names of its own.
    STAGE = "stage"
    #: A statement to a database. A driver does not repeat statements.
    SQL = "sql"
    #: A system call on a file, inside of such a function.
    INNER = "inner"
    #: A system call on a file of its own.
    FILE = "file"
    #: A request on a connection.
    WIRE = "wire"
    #: Something that Spark does.
    SPARK = "spark"


#: What can be done to calls of a layer in one process. A system call on a local file cannot lose its
#: answer, and what Spark does is not ours to repeat.
IN_PROCESS: Mapping[Layer, tuple[Fault, ...]] = {
    Layer.CALL: (Fault.FAIL, Fault.LOST, Fault.TWICE),
    Layer.BRIDGE: (Fault.LOST, Fault.TWICE),
    Layer.JVM: (Fault.FAIL, Fault.LOST),
    Layer.SINK: (Fault.FAIL, Fault.LOST, Fault.TWICE),
    Layer.STAGE: (Fault.FAIL, Fault.LOST),
    Layer.SQL: (Fault.FAIL, Fault.LOST),
    Layer.INNER: (),
    Layer.FILE: (Fault.FAIL,),
    Layer.WIRE: (Fault.FAIL, Fault.LOST, Fault.TWICE),
    Layer.SPARK: (),
}


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """The how-manieth occurrence of a call, from 1."""

    name: str
    occurrence: int = 1

    def __str__(self) -> str:
        return f"{self.name} #{self.occurrence}"

    @classmethod
    def parse(cls, text: str) -> Point:
        name, _, occurrence = text.rpartition(" #")
        return cls(name, int(occurrence))


@dataclass(frozen=True, slots=True)
class Call:
    """One call at the boundary."""

    name: str
    layer: Layer
    effect: Effect

    def to_json(self) -> list[str]:
        return [self.name, self.layer.value, self.effect.value]

    @classmethod
    def from_json(cls, value: list[str]) -> Call:
        return cls(value[0], Layer(value[1]), Effect(value[2]))


@dataclass(frozen=True, slots=True)
class Run:
    """One fault at one point."""

    point: Point
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault.value} at {self.point}"


#: How the names of calls of a store on a disk begin.
STORE = "store."
TRIGGERS = tuple(f"{store}.create_if_absent checkpoints/*/trigger.json" for store in ("store", "bucket"))
#: In the name of calls that are repeated for every file of Spark's state.
_MANY = "pins/state/*"
#: Read again and again until Spark has written it: how often is chance.
_POLLED = tuple(f"{store}.read spark/*/commits/*" for store in ("store", "bucket"))

_HEX = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*")
#: All files of Spark's state are alike.
_STATE_FILE = re.compile(r"pins/state/.*?((?:\.part)?)$")
_NUMBER = re.compile(r"(?<![A-Za-z])\d+")


def without_ids(text: str) -> str:
    """Return a key or path with an asterisk for every number and every long hexadecimal id.

    >>> without_ids("staged/0/12-3.7.json"), without_ids("checkpoints/7/.decision.json.9f0c2d3e4a.tmp")
    ('staged/*/*-*.*.json', 'checkpoints/*/.decision.json.*.tmp')
    """
    return _STATE_FILE.sub(r"pins/state/*\1", _NUMBER.sub("*", _HEX.sub("*", text)))


def points_of(calls: Iterable[Call]) -> Iterator[tuple[Point, Call]]:
    """Number the calls of a trace."""
    seen: Counter[str] = Counter()
    for call in calls:
        seen[call.name] += 1
        yield Point(call.name, seen[call.name]), call


def kill_runs(calls: Iterable[Call]) -> list[Run]:
    """Return a kill in front of every call of a trace that may change something.

    A kill in front of a call that only reads leaves what the kill in front of the next one that
    writes leaves, so it is that one. A write on a disk begins with a system call that is a point itself,
    and what is called on a committer begins with calls of its own.
    Of the same call on each of a checkpoint's state files, of which there may be dozens, the first and
    the last one are points.
    """
    calls = list(calls)
    last = Counter(call.name for call in calls)
    return [
        Run(point, Fault.KILL)
        for point, call in points_of(calls)
        if call.effect is Effect.WRITE
        and not call.name.startswith(STORE)
        and call.layer is not Layer.SINK
        and _is_point(point, call)
        and (_MANY not in call.name or point.occurrence in (1, last[call.name]))
    ]


def fault_runs(calls: Iterable[Call]) -> list[Run]:
    """Return every other fault of every call of a trace.

    A call that only reads just fails: for its caller that is what a lost answer is, and reading twice
    changes nothing.
    """
    calls = list(calls)
    last = Counter(call.name for call in calls)
    return [
        Run(point, fault)
        for point, call in points_of(calls)
        for fault in IN_PROCESS[call.layer]
        if (call.effect is Effect.WRITE or fault is Fault.FAIL)
        and _is_point(point, call)
        and (_MANY not in call.name or point.occurrence in (1, last[call.name]))
    ]


def _is_point(point: Point, call: Call) -> bool:
    """Whether a call is a point each time: what is read in loops, and the same call into the JVM, is once."""
    return point.occurrence == 1 or (call.name not in _POLLED and call.layer is not Layer.JVM)


def first_checkpoint(calls: list[Call]) -> list[Call]:
    """Return a trace up to the trigger of its second checkpoint, if there was one."""
    triggers = [number for number, call in enumerate(calls) if call.name in TRIGGERS]
    return calls[: triggers[1]] if len(triggers) > 1 else calls


def union(first: list[Call], second: list[Call]) -> list[Call]:
    """Return the first trace and what only the second has, behind it."""
    have = Counter(call.name for call in first)
    more = []
    for point, call in points_of(second):
        if point.occurrence > have[call.name]:
            more.append(call)
    return [*first, *more]


def trace_to_json(calls: Iterable[Call]) -> list[Any]:
    return [call.to_json() for call in calls]


def trace_from_json(value: Iterable[list[str]]) -> list[Call]:
    return [Call.from_json(one) for one in value]
