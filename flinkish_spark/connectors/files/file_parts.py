"""The parts in which a large file is read: each is found once, and is listed as a file is."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow.parquet as pq


#: How large a part is at least.
_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file, or all of it."""

    #: From where and up to where: row groups, or bytes. None for the end of the file, whatever it has.
    begin: int = 0
    end: int | None = None
    #: How many records it has; None if that is not known.
    rows: int | None = None
    #: About how many bytes it has on disk, if it is a part.
    bytes: int = 0
    #: How many records are in front of it in the file; None if that is not known.
    first: int | None = None

    def as_text(self) -> str:
        return f"{self.begin} {self.end} {self.bytes}" + ("" if self.first is None else f" {self.first}")


def is_large(size_bytes: int) -> bool:
    """Return whether a file may have more than one part."""
    return size_bytes >= 2 * _PART_BYTES


def parts_of_parquet(file: pq.ParquetFile, size_bytes: int) -> Sequence[FilePart]:
    """Return ranges of row groups."""
    footer, found = file.metadata, list[FilePart]()
    groups = [footer.row_group(at) for at in range(footer.num_row_groups if is_large(size_bytes) else 0)]
    # As they were written they are that much larger than on disk.
    ratio = size_bytes / (sum(one.total_byte_size for one in groups) or 1)
    begin, first, rows, held, left = 0, 0, 0, 0.0, float(size_bytes)
    for at, one in enumerate(groups, 1):
        own = one.total_byte_size * ratio
        rows, held, left = rows + one.num_rows, held + own, left - own
        if at == len(groups) or min(held, left) >= _PART_BYTES:
            found.append(FilePart(begin, at, rows, int(held), first))
            begin, first, rows, held = at, first + rows, 0, 0.0
    return found if len(found) > 1 else [FilePart(rows=footer.num_rows)]


def parts_of_lines(path: str) -> Sequence[FilePart]:
    """Return ranges of bytes, each of which ends behind a line."""
    size, borders = os.path.getsize(path), [0]
    if not is_large(size):
        return [FilePart()]
    with open(path, "rb") as file:
        while is_large(size - borders[-1]):
            file.seek(borders[-1] + _PART_BYTES - 1)
            # A line may be longer than the memory.
            while (some := file.readline(1 << 20)) and not some.endswith(b"\n"):
                pass
            borders.append(file.tell())
    ends = [*borders, size] if borders[-1] < size else borders
    found = [FilePart(begin, end, None, end - begin) for begin, end in pairwise(ends)]
    return found if len(found) > 1 else [FilePart()]


def lines_in(file: io.BufferedIOBase, end: int) -> int:
    """Return how many lines end in front of a place; a file is read from its beginning."""
    count = 0
    while end > 0 and (some := file.read(min(end, 1 << 20))):
        count, end = count + some.count(b"\n"), end - len(some)
    return count
