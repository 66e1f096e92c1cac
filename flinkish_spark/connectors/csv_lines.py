"""Writing of CSV: a line per row, with every value so that a reader gets the same one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.types.exact_text import exact_text

#: Readers remove it from the beginning of a file.
BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class CsvForm:
    delimiter: str = ","
    quote: str = '"'
    #: The text of a null. If it is not empty, no value may have it: Spark reads it as null even in quotes.
    null: str = ""
    quotes_all: bool = False
    #: The end of a line; texts that contain it are quoted.
    line_end: str = "\n"
    #: If lines are in files, whose readers skip U+FEFF at the beginning.
    is_in_files: bool = False

    @property
    def special(self) -> str:
        letters = re.escape(self.delimiter + self.quote + self.line_end)
        # Readers skip blank lines, and a blank value may be the only one of its line.
        mark = f"|^{BYTE_ORDER_MARK}" if self.is_in_files else ""
        return ".*" if self.quotes_all else f"[{letters}\\r\\n]|^[\\x00-\\x20]*${mark}"


class ReadAsNull(Exception):
    """A value has the same text as a null; holds the field's name and the row."""

    def __init__(self, name: str, row: int) -> None:
        super().__init__(name, row)
        self.name, self.row = name, row


def lines_of(fields: T.StructType, columns: Sequence[pa.Array], form: CsvForm) -> pa.Array:
    """Return a line for each row of the columns; raise ReadAsNull for a value that would be read as null."""
    values, quote = [], form.quote
    for one, column in zip(fields, columns, strict=True):
        text = exact_text(one.dataType)(column)
        if form.null and (at := pc.index(text, pa.scalar(form.null, text.type)).as_py()) >= 0:
            raise ReadAsNull(one.name, at)
        is_special = pc.match_substring_regex(text, form.special).fill_null(False)
        if is_special.true_count:
            doubled = pc.replace_substring(text.filter(is_special), quote, quote * 2)
            text = pc.replace_with_mask(
                text, is_special, pc.binary_join_element_wise(quote, doubled, quote, "")
            )
        values.append(text.fill_null(form.null))
    return pc.binary_join_element_wise(*values, form.delimiter)


def lines_of_files(fields: T.StructType, columns: Sequence[pa.Array], form: CsvForm) -> pa.Array:
    """Return lines for a file; none is blank, since readers of files skip blank lines."""
    lines = lines_of(fields, columns, form)
    # Blank values are in quotes, so a blank line has only nulls.
    nulls = [f"{form.quote}{form.null}{form.quote}", *[form.null] * (len(columns) - 1)]
    is_blank = pc.match_substring_regex(lines, "^[\\x00-\\x20]*$")
    return pc.if_else(is_blank, form.delimiter.join(nulls), lines)
