"""The quotes of a CSV file, looked at before Arrow sees them.

Arrow takes all that follows an open quote for one value, and puts text behind a closing quote to the value.
So each quoted value must end, in front of the delimiter, of an end of a line or of that of the file. A quote
within a value that does not begin with one is text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flinkish_spark.sources.json_lines import BadLine

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: What is looked at together.
_PART_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_QUOTE, _NEWLINE, _RETURN = b'"\n\r'


@dataclass(frozen=True)
class _Part:
    """Some bytes of a file, and the quotes in them: some next to each other are a run."""

    #: How many bytes are in front, the last one of them, and where the quote is that is open there.
    offset: int
    before: int
    opened: int | None
    data: npt.NDArray[np.uint8]
    #: Of each run: where it begins and ends, and whether a quote is open in front of it and behind it.
    starts: npt.NDArray[Any]
    ends: npt.NDArray[Any]
    was_open: npt.NDArray[np.bool_]
    is_open: npt.NDArray[np.bool_]
    #: Which runs close a value in front of text.
    wrong: npt.NDArray[Any]

    def opened_behind(self, runs: int) -> int | None:
        """Return where the value begins whose quote is open behind so many runs."""
        import numpy as np

        if not (self.is_open[runs - 1] if runs else self.opened is not None):
            return None
        is_opening = self.is_open & ~self.was_open
        # Two quotes within a value may be a run each.
        is_opening[1:] &= self.starts[1:] != self.ends[:-1]
        opening = np.flatnonzero(is_opening[:runs])
        return self.offset + int(self.starts[opening[-1]]) if len(opening) else self.opened

    def ends_of_lines(self) -> npt.NDArray[Any]:
        r"""Return where lines end, within quotes too; ``\r\n`` is one end."""
        import numpy as np

        at = np.flatnonzero((self.data == _NEWLINE) | (self.data == _RETURN))
        is_own = (self.data[at] == _RETURN) | (self._in_front(at) != _RETURN)
        return np.compress(is_own, at)

    def records(self) -> npt.NDArray[Any]:
        """Return where records begin: behind an end of a line that is not in quotes, but at none."""
        import numpy as np

        is_end = (self.data == _NEWLINE) | (self.data == _RETURN)
        at = np.flatnonzero(~is_end)
        front = self._in_front(at)
        at = at[(front == _NEWLINE) | (front == _RETURN)]
        # How many runs are in front says whether a quote is open.
        states = np.concatenate([[self.opened is not None], self.is_open])
        return np.compress(~states[np.searchsorted(self.starts, at)], at)

    def _in_front(self, at: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the bytes in front of some places."""
        found: npt.NDArray[np.uint8] = self.data[at - 1]
        if len(at) and at[0] == 0:
            found[0] = self.before
        return found


def check_quotes(path: str, delimiter: str) -> None:
    """See to it that each quoted value of a file ends, and that no text is behind it.

    Raises
    ------
    BadLine
        One does not.
    """
    opened = None
    for part in _parts(path, delimiter):
        if len(part.wrong):
            run = int(part.wrong[0])
            begin, end = part.opened_behind(run), part.offset + int(part.ends[run])
            line = _line_at(path, part.offset + int(part.starts[run]) if begin is None else begin)
            raise BadLine(
                line,
                f"has a quoted value with text behind its closing quote, in line {_line_at(path, end)}: the "
                "delimiter or the end of the line must be there; write a quote within quotes twice",
            )
        opened = part.opened_behind(len(part.starts))
    if opened is not None:
        raise BadLine(
            _line_at(path, opened),
            "has a quote that nothing closes, and all that follows would be one value: close it; if it is "
            "text, put the value into quotes and write it twice",
        )


def check_names(begin: bytes, delimiter: str, fields: list[str]) -> None:
    """Refuse a header that has the name of a field twice; `begin` is what the file begins with.

    Raises
    ------
    BadLine
        It has.
    """
    text = begin.removeprefix(_BOM).decode("utf-8", "replace")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    names, before = [], 0
    # Arrow passes over empty lines, too.
    for names in reader:
        if names:
            break
        before = reader.line_num
    for field in fields:
        if names.count(field) > 1:
            raise BadLine(
                before + 1,
                f"has the name {field!r} {names.count(field)} times, and one column only would be read: give "
                "the columns different names",
            )


def line_of(path: str, delimiter: str, record: int) -> int:
    """Return the number of the line in which a record begins; records are counted from 0, names are one."""
    import numpy as np

    line = 1
    for part in _parts(path, delimiter):
        records, ends = part.records(), part.ends_of_lines()
        if record < len(records):
            return line + int(np.searchsorted(ends, records[record]))
        record -= len(records)
        line += len(ends)
    return line


def _line_at(path: str, place: int) -> int:
    """Return the number of the line with a byte of a file."""
    import numpy as np

    line = 1
    for part in _parts(path, "\n"):
        ends = part.ends_of_lines()
        line += int(np.searchsorted(ends + part.offset, place))
        if part.offset + len(part.data) >= place:
            break
    return line


def _parts(path: str, delimiter: str) -> Iterator[_Part]:
    """Yield a file, maybe compressed, without the mark (BOM) in front; no run is in two parts."""
    import numpy as np
    import pyarrow as pa

    is_border = np.zeros(256, np.bool_)
    is_border[[_NEWLINE, _RETURN, ord(delimiter)]] = True
    # The file's begin is one as that of a line is.
    held, offset, before, opened = b"", 0, _NEWLINE, None
    with pa.input_stream(path, compression="detect") as file:
        is_first = True
        while True:
            some = file.read(_PART_BYTES)
            found = held + some
            if is_first and found.startswith(_BOM):
                found, offset = found[len(_BOM) :], len(_BOM)
            is_first = False
            # What is behind a run has to be seen with it.
            end = len(found.rstrip(b'"')) if some else len(found)
            data, held = np.frombuffer(found, np.uint8, end), found[end:]
            part = _part(offset, before, opened, data, is_border)
            yield part
            if not some:
                return
            opened = part.opened_behind(len(part.starts))
            offset, before = offset + end, int(data[-1]) if end else before


def _part(
    offset: int,
    before: int,
    opened: int | None,
    data: npt.NDArray[np.uint8],
    is_border: npt.NDArray[np.bool_],
) -> _Part:
    import numpy as np

    is_quote = np.arange(256) == _QUOTE
    at = np.flatnonzero(data == _QUOTE)
    if not len(at):
        none, no = at, np.zeros(0, np.bool_)
        return _Part(offset, before, opened, data, none, none, no, no, none)
    # Mostly quotes come in pairs at borders, or next to each other; this is seen fast.
    first = 0 if opened is None else 1
    front, behind = data[at[first::2] - 1], data[np.minimum(at[1 - first :: 2] + 1, len(data) - 1)]
    if at[0] == 0 and not first:
        front[0] = before
    if (is_border | is_quote)[front].all() and (is_border | is_quote)[behind].all():
        is_open = np.arange(first, len(at) + first) & 1 == 0
        return _Part(offset, before, opened, data, at, at + 1, ~is_open, is_open, at[:0])
    is_gap = np.diff(at) > 1
    starts = at[np.concatenate([[True], is_gap])]
    ends = at[np.concatenate([is_gap, [True]])] + 1
    front = data[starts - 1]
    if starts[0] == 0:
        front[0] = before
    is_begin, is_odd = is_border[front], ((ends - starts) & 1).astype(np.bool_)
    # Within quotes two are one as text, so an odd number closes. At the begin of a value the first one opens,
    # and an odd number leaves it open. Elsewhere they are text. So an odd number changes the state at the
    # begin of a value, and leaves nothing open elsewhere: the state is how often it changed since then.
    changes = np.cumsum(is_begin & is_odd) + (opened is not None)
    known = np.maximum.accumulate(np.where(is_odd & ~is_begin, changes, 0))
    is_open = ((changes - known) & 1).astype(np.bool_)
    was_open = np.concatenate([[opened is not None], is_open[:-1]])
    closes = np.where(was_open, is_odd, is_begin & ~is_odd)
    # Only at the end of the file nothing is behind a run.
    is_end = is_border[data[np.minimum(ends, len(data) - 1)]] | (ends == len(data))
    return _Part(
        offset, before, opened, data, starts, ends, was_open, is_open, np.flatnonzero(closes & ~is_end)
    )
