"""What went wrong inside: the causes that a text of Spark's, Java's or Python's names, innermost last.

An error inside `foreachBatch` reaches the driver as one text: Spark's own sentence, what Py4J says
about the call into Python, a Python traceback, in that one the text of a Java exception with its
frames, and behind those its causes. What a person needs, the type and the message of the innermost
one, stands at the end. This module finds it, and leaves out what belongs to nobody's program: frames
of Py4J, of PySpark and of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: Longest message of one cause that is kept; Spark prints whole rows and plans into some.
MOST_MESSAGE = 700
#: Longest part of a headline by which a failure is known again.
MOST_IDENTITY = 300
#: Frames of a user's program that are kept of a traceback, the innermost.
MOST_FRAMES = 4
#: Behind such a line Spark prints the query, with every literal of ours in it.
_ASIDE = re.compile(r"\n=== Streaming Query ===|\n== (?:SQL|DataFrame|PySpark)\b")
_CONDITION = re.compile(r"^\s*\[([A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*)\]\s*")
#: The same at the beginning of a line in the middle of a text.
_NAMED_LINE = re.compile(r"^\[[A-Z][A-Z0-9]*_[A-Z0-9_]+(?:\.[A-Z0-9_]+)*\] ")
_SQLSTATE = re.compile(r"\bSQLSTATE: ([0-9A-Z]{5})\b")
_SQLSTATE_AT_END = re.compile(r"\s*\bSQLSTATE: [0-9A-Z]{5}\b\.?\s*$")
_JAVA = re.compile(r"^(?:Caused by: |: )?((?:[a-z_][\w$]*\.)+[A-Z][\w$]*)(?::(?: (.*))?)?$")
_LOST_TASK = re.compile(r"Lost task \S+ in stage .*?\): ((?:[a-z_][\w$]*\.)+[A-Z][\w$]*)(?:: (.*))?$")
_PYTHON = re.compile(r"^([A-Za-z_][\w.]*(?:\.<locals>\.[\w.]+)*)(?:: (.*))?$")
_TRACEBACK = "Traceback (most recent call last):"
_GROUP = f"Exception Group {_TRACEBACK}"
#: What stands before each line of a group of exceptions, and between them.
_MARGIN = re.compile(r"^\s*(?:\+-\+?-{3,}.*|[+|](?: |$))")
_BETWEEN = re.compile(r"^\s*\+-\+-{3,}", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)')
_FROM = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"
_JVM_STACK = "JVM stacktrace:"
#: Lines that end a message: frames of Java, and what stands between two stacks.
_ENDS = re.compile(
    r"^\s+at \S|^\s*\.\.\. \d+ (?:more|common frames omitted)|^\s*Driver stacktrace:|^\s*Suppressed: "
)
#: Where frames are of no use to a user: this package, what calls it, and libraries.
_FOREIGN_FRAMES = re.compile(
    r"(?:^|[/\\])(?:flinkish_spark|py4j|pyspark|site-packages|dist-packages)[/\\]|^<frozen "
    r"|pyspark\.zip|py4j-.*\.zip|\.p[xy][xi]$|[/\\]lib[/\\]python3"
)
_PROXY = re.compile(r"An exception was raised by the Python Proxy\.(?: Return Message:?)?\s*")
_CALLING = re.compile(r"An error occurred while calling \S+\s*")
#: Numbers, addresses, UUIDs and the like.
_NUMBERS = re.compile(r"\b(?=[0-9a-f-]*\d)(?:0x)?[0-9a-f]+(?:-[0-9a-f]+)*\b|\d+", re.IGNORECASE)
#: What wraps another error and says nothing about it.
_WRAPPERS = frozenset(
    {"Py4JJavaError", "Py4JException", "StreamingQueryException", "UndeclaredThrowableException"}
)


@dataclass(frozen=True, slots=True)
class Cause:
    """One exception of a chain.

    Parameters
    ----------
    kind
        Its class as the text has it, with its package; empty where a message stands alone.
    message
        What it says, on one line, without condition and SQLSTATE, cut to :data:`MOST_MESSAGE`.
    condition
        Spark's or Delta's name of the error, like ``DIVIDE_BY_ZERO``; empty without one.
    sqlstate
        Five characters; empty without one.
    frames
        Of the user's program, innermost last; empty for Java.
    """

    kind: str
    message: str
    condition: str = ""
    sqlstate: str = ""
    frames: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, text: str, frames: Iterable[str] = ()) -> Cause:
        """Take condition and SQLSTATE out of a message; only Spark's own classes have them."""
        text = _ASIDE.split(text, maxsplit=1)[0]
        named = _CONDITION.match(text) if "." in kind or not kind else None
        condition = named.group(1) if named else ""
        state = _SQLSTATE.search(text)
        if named:
            text = text[named.end() :]
        # A user's function may say the same word: only at the end it is Spark's.
        text = _SQLSTATE_AT_END.sub("", text)
        text = _PROXY.sub("", _CALLING.sub("", text))
        message = _cut(" ".join(text.split()))
        sqlstate = state.group(1) if state and condition else ""
        return cls(kind, message, condition, sqlstate, tuple(frames)[-MOST_FRAMES:])

    @property
    def name(self) -> str:
        """The class without its package."""
        return self.kind.rsplit(".", 1)[-1].rsplit("$", 1)[-1]

    @property
    def is_wrapper(self) -> bool:
        """Whether it only says that something else failed."""
        return self.name in _WRAPPERS and not self.condition

    def __str__(self) -> str:
        condition = f"[{self.condition}]" if self.condition else ""
        said = " ".join(part for part in (condition, self.message) if part).rstrip(".")
        return ": ".join(part for part in (self.name, said) if part)


@dataclass(frozen=True, slots=True)
class Chain:
    """The causes of one failure, the outermost first; there is at least one."""

    causes: tuple[Cause, ...]

    @classmethod
    def of(cls, text: str) -> Chain:
        r"""Take a text apart.

        Examples
        --------
        >>> str(Chain.of("a.B: failed\n\tat a.b.c(D.java:1)\nCaused by: java.io.IOException: full").root)
        'IOException: full'
        """
        found = list(_causes(text))
        if not found:
            found = [Cause.of("", text)]
        return cls(tuple(found))

    @property
    def root(self) -> Cause:
        """The innermost cause."""
        return next((one for one in self.from_inside if not one.is_wrapper), self.causes[-1])

    @property
    def headline(self) -> str:
        """The innermost cause, and where it says nothing but its name, the one around it as well."""
        root = self.root
        around = (one for one in self.from_inside if not one.is_wrapper and (one.message or one.condition))
        told = next(around, root)
        return str(root) if told is root else f"{told} ({root.name})"

    @property
    def identity(self) -> str:
        """What is the same when it comes back: numbers, and names made of them, differ each time."""
        return _NUMBERS.sub("#", self.headline)[:MOST_IDENTITY]

    @property
    def from_inside(self) -> Iterator[Cause]:
        """The causes, the innermost first."""
        return reversed(self.causes)

    @property
    def trace(self) -> str:
        """The way from the innermost cause outwards, in a few lines, with frames of the user's program."""
        lines: list[str] = []
        for cause in self.from_inside:
            line = str(cause)
            if cause.is_wrapper or any(line in before or before in line for before in lines):
                continue
            lines += [line, *(f"  at {frame}" for frame in reversed(cause.frames))]
        return "\n".join(lines[:12])


@dataclass(slots=True)
class _Open:
    """An exception whose message goes on."""

    kind: str
    words: list[str] = field(default_factory=list)
    frames: tuple[str, ...] = ()

    def closed(self) -> Cause:
        return Cause.of(self.kind, "\n".join(self.words), self.frames)


class _Reader:
    """Reads a text line by line."""

    def __init__(self) -> None:
        self.found: list[Cause] = []
        self._open: _Open | None = _Open("")
        self._frames: list[str] | None = None
        #: Where the traceback that is read began, and what others were raised from, innermost first.
        self._began, self._goes_on = 0, False
        self._raised_from: list[list[Cause]] = []
        self._is_copy = False

    def line(self, line: str) -> None:
        """Take the next line."""
        if self._frames is not None:
            self._in_traceback(line)
        elif _TRACEBACK in line:
            self._head_or_words(line.split(_TRACEBACK, 1)[0].rstrip().removesuffix(":"))
            self._begin_traceback()
        elif line.strip() in (_FROM, _DURING):
            self._between(line.strip())
        elif line.strip() == _JVM_STACK:
            self._close()
            self._is_copy = True
        elif _ENDS.match(line):
            self._close()
        else:
            self._head_or_words(line)

    def _begin_traceback(self) -> None:
        self._close()
        if not self._goes_on:
            self._began = len(self.found)
        self._goes_on, self._frames = False, []

    def _in_traceback(self, line: str) -> None:
        frame = _FRAME.match(line)
        if frame:
            path, number, name = frame.groups()
            if not _FOREIGN_FRAMES.search(path):
                assert self._frames is not None
                self._frames.append(f"{path.rsplit('/', 1)[-1]}:{number} in {name}")
            return
        head = _PYTHON.match(line)
        if head is None or line[:1].isspace():
            return
        kind, words = head.groups()
        self._open = _Open(kind, [words or ""], tuple(self._frames or ()))
        self._frames = None

    def _between(self, how: str) -> None:
        self._close()
        self._goes_on = True
        if how == _FROM:
            # Printed first, and the inner one: it belongs behind what was raised from it.
            self._raised_from.append(self.found[self._began :])
            del self.found[self._began :]

    def _head_or_words(self, line: str) -> None:
        lost, java = _LOST_TASK.search(line), _JAVA.match(line)
        head = lost or java
        if head is None:
            self._words(line)
            return
        if lost is not None:
            self._say(line[: lost.start(1)])
        self._close()
        kind, words = head.groups()
        if self._is_copy:
            # Behind "JVM stacktrace:" stands the same exception as before.
            self._is_copy = False
            self._open = None
            if not words or (self.found and self.found[-1].message[:40] in " ".join(words.split())):
                return
        self._open = _Open(kind)
        self._say(words or "")

    def _words(self, line: str) -> None:
        is_of_python = self._open is not None and self._open.kind and "." not in self._open.kind
        if _NAMED_LINE.match(line) and not is_of_python:
            # The message of another exception, whose class was left out.
            self._close()
            self._open = _Open("")
        self._say(line)

    def _say(self, words: str) -> None:
        if self._open is not None:
            self._open.words.append(words)

    def _close(self) -> None:
        if self._open is None:
            return
        cause, self._open = self._open.closed(), None
        if cause.kind or cause.message or cause.condition:
            self.found.append(cause)

    def end(self) -> list[Cause]:
        """Return what was found."""
        self._close()
        inner = (cause for group in reversed(self._raised_from) for cause in group)
        return [*self.found, *inner]


def _causes(text: str) -> Iterator[Cause]:
    reader, has_groups = _Reader(), _BETWEEN.search(text) is not None
    for line in text.splitlines():
        reader.line(_MARGIN.sub("", line).replace(_GROUP, _TRACEBACK) if has_groups else line)
    yield from reader.end()


def _cut(text: str) -> str:
    return text if len(text) <= MOST_MESSAGE else f"{text[:MOST_MESSAGE].rstrip()} ..."
