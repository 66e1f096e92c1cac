"""Lines of JSON, looked at before Arrow sees them.

Arrow's reader takes the process with it if the first value of a block is a null, and makes records of values
that follow each other in a line, or go over several. So of each line it is seen to that it is one object.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.sources.batch_columns import beyond_years, leaves
from flinkish_spark.sources.exact_json import MALFORMED, exact_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

#: About what is parsed at once; a longer line is parsed alone, whatever its length.
_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
#: The end of a line that is followed by one which neither is blank nor begins and ends as an object does.
_NO_OBJECT = re.compile(rb"\n(?![ \t\r]*(?:\{[^\n]*\}[ \t\r]*)?(?:\n|\Z))")


class BadLine(ValueError):
    """A line cannot be read."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line} {why}")


def tables_of(data: bytes, schema: pa.Schema) -> Iterator[pa.Table]:
    r"""Yield the objects of some lines, a part at a time, with the fields of `schema` in any order.

    Raises
    ------
    BadLine
        A line is no object, or is none with these fields.

    Examples
    --------
    >>> import pyarrow as pa
    >>> schema = pa.schema([("n", pa.int64())])
    >>> [table.to_pylist() for table in tables_of(b'{"n": 1}\n\n{"m": 2}\r\n', schema)]
    [[{'n': 1}, {'n': None}]]
    >>> list(tables_of(b'{"n": 1}\nnull', schema))
    Traceback (most recent call last):
    flinkish_spark.sources.json_lines.BadLine: line 2 is no JSON object
    """
    start, line = len(_BOM) if data.startswith(_BOM) else 0, 1
    while start < len(data):
        end = data.rfind(b"\n", start, start + _BLOCK_BYTES) + 1
        if not end:
            end = data.find(b"\n", start + _BLOCK_BYTES) + 1 or len(data)
        block = data[start:end]
        if block.strip(_BLANKS):
            yield _table_of(block, line, schema)
        start, line = end, line + block.count(b"\n")


def _table_of(block: bytes, first: int, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    # The look for a newline is what makes this fast; so the first line gets one in front.
    if bad := _NO_OBJECT.search(b"\n" + block):
        raise BadLine(first + block.count(b"\n", 0, bad.start()), "is no JSON object")
    try:
        block.decode()
    except UnicodeDecodeError as error:
        raise BadLine(first + block.count(b"\n", 0, error.start), f"is no UTF-8: {error.reason}") from None
    try:
        table = _parsed(block, schema)
        is_one_a_line = table.num_rows == _count(block)
    except pa.ArrowInvalid as error:
        bare = _with_bare_numbers(block, schema)
        if bare != block:
            return _table_of(bare, first, schema)
        raise _bad_line(block, first, schema, str(error)) from None
    if not is_one_a_line:
        raise _bad_line(block, first, schema, "is more than one JSON object")
    return table


def _parsed(block: bytes, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    # Arrow would want a number of days, take the text of bytes for the bytes, and leave out the offset that a
    # time without a zone must not have.
    texts = pa.schema([field.with_type(_with_texts(field.type, _is_read_as_text)) for field in schema])
    table = _read(block, texts)
    for field, text in zip(schema, texts, strict=True):
        if field.type != text.type:
            at = table.schema.get_field_index(field.name)
            table = table.set_column(at, field, _from_texts(table.column(at), field.type))
    # Arrow counts a decimal's digits before it adds those of the scale.
    table.validate(full=True)
    _refuse_other_years(table.columns)
    if _infinities(table).any():
        doubles = pa.schema([field.with_type(_with_doubles(field.type)) for field in texts])
        if (_infinities(table) != _infinities(_read(block, doubles))).any():
            raise pa.ArrowInvalid("a number is too large for FLOAT")
    return table


def _read(block: bytes, schema: pa.Schema) -> pa.Table:
    import pyarrow as pa
    from pyarrow import json

    return json.read_json(
        pa.BufferReader(block),
        # An object must not go over the end of what Arrow calls a block.
        read_options=json.ReadOptions(use_threads=False, block_size=len(block)),
        parse_options=json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind))


def _is_read_as_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_local_time = pa.types.is_timestamp(kind) and kind.tz is None
    return bool(pa.types.is_date(kind)) or is_local_time or _is_bytes(kind)


def _changed(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with other types in its places, at any depth."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_changed(kind.value_type, change)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_changed(field.type, change)) for field in kind])
    return change(kind)


def _with_texts(kind: pa.DataType, is_text: Callable[[pa.DataType], bool]) -> pa.DataType:
    import pyarrow as pa

    return _changed(kind, lambda one: pa.string() if is_text(one) else one)


def _with_doubles(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return _changed(kind, lambda one: pa.float64() if pa.types.is_float32(one) else one)


def _from_texts(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column with dates, times and bytes in the places of texts."""
    import pyarrow as pa

    dated = column.cast(_with_texts(kind, _is_bytes))
    # Python, which is asked for the bytes, has no other years.
    _refuse_other_years([dated])
    if dated.type == kind:
        return dated
    try:
        return pa.chunked_array([pa.array([_decoded(one, kind) for one in dated.to_pylist()], kind)], kind)
    except binascii.Error as error:
        raise pa.ArrowInvalid(f"a BINARY is no base64: {error}") from None


def _decoded(value: Any, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_decoded(one, kind.value_type) for one in value]
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return base64.b64decode(value, validate=True) if _is_bytes(kind) else value


def _refuse_other_years(columns: Iterable[pa.ChunkedArray]) -> None:
    import pyarrow as pa

    for leaf in _all_leaves(columns):
        if beyond_years(leaf).any():
            raise pa.ArrowInvalid(
                "a date or time is in no year from 1 to 9999, by UTC: write one that is, or null"
            )


def _infinities(table: pa.Table) -> npt.NDArray[np.bool_]:
    """Return which of all floating numbers are infinite."""
    import numpy as np
    import pyarrow as pa

    numbers = [leaf for leaf in _all_leaves(table.columns) if pa.types.is_floating(leaf.type)]
    found = [np.isinf(leaf.fill_null(0).to_numpy(zero_copy_only=False)) for leaf in numbers]
    return np.concatenate([np.zeros(0, np.bool_), *found])


def _all_leaves(columns: Iterable[pa.ChunkedArray]) -> Iterator[pa.Array]:
    return (leaf for column in columns for chunk in column.chunks for leaf in leaves(chunk))


def _with_bare_numbers(block: bytes, schema: pa.Schema) -> bytes:
    """Return a block with NaN and the infinities as Arrow wants them, where they are written as texts."""
    floats = [T.StructField(field.name, kind) for field in schema if (kind := _float_of(field.type))]
    if not floats:
        return block
    look = exact_text(T.StructType(floats))
    return b"\n".join(_bare(line, look) for line in block.split(b"\n"))


def _bare(line: bytes, look: Callable[[bytes], str | None]) -> bytes:
    found = look(line)
    return line if found is None or found == MALFORMED else found.encode()


def _float_of(kind: pa.DataType) -> T.DataType | None:
    """Return what of a type is FLOAT or DOUBLE; None if nothing is."""
    import pyarrow as pa

    if pa.types.is_list(kind):
        inner = _float_of(kind.value_type)
        return None if inner is None else T.ArrayType(inner)
    if pa.types.is_struct(kind):
        fields = [T.StructField(field.name, one) for field in kind if (one := _float_of(field.type))]
        return T.StructType(fields) if fields else None
    if pa.types.is_float32(kind):
        return T.FloatType()
    return T.DoubleType() if pa.types.is_float64(kind) else None


def _count(block: bytes) -> int:
    """Return how many lines are not blank."""
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    return lines - sum(1 for _ in _BLANK.finditer(b"\n" + block))


#: The end of a line that is followed by a blank one.
_BLANK = re.compile(rb"\n(?=[ \t\r]*\n)")


def _bad_line(block: bytes, first: int, schema: pa.Schema, otherwise: str) -> BadLine:
    """Return the error of the first line that cannot be read alone: Arrow names none."""
    import pyarrow as pa

    for number, line in enumerate(block.split(b"\n"), first):
        try:
            if line.strip(_BLANKS) and _parsed(line, schema).num_rows != 1:
                return BadLine(number, "is more than one JSON object")
        except pa.ArrowInvalid as error:
            return BadLine(number, f"cannot be read: {error}")
    return BadLine(first, f"or one behind it cannot be read: {otherwise}")
