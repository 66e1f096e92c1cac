"""Formats of the file sink: their columns and options, and the merge of two files into one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flinkish_spark.connectors.csv_lines import BYTE_ORDER_MARK, CsvForm
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.validation import raise_config_errors
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.exact_text import unfit_for_json
from flinkish_spark.types.hints import parts_of

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql import types as T


#: Options that would change places or numbers of files without the sink's knowledge.
_RESERVED = {
    "path": "the sink's path is its first argument",
    "maxrecordsperfile": "give the rolling policy a part_bytes",
    "mapreduce.fileoutputcommitter.algorithm.version": "the sink commits files itself",
    "partitionoverwritemode": "the sink only appends",
}
#: Codecs whose files can be concatenated and are read as one.
_STACKABLE = {"none": "", "uncompressed": "", "gzip": ".gz", "bzip2": ".bz2"}


class FileFormat(Choice):
    """Format of the sink's files; the value is Spark's name of it."""

    PARQUET = "parquet"
    #: One JSON object per line.
    JSON = "json"
    CSV = "csv"
    #: The one string column, a line per record.
    TEXT = "text"
    AVRO = "avro"

    @property
    def is_lines(self) -> bool:
        """True if files can be concatenated."""
        return self in (FileFormat.JSON, FileFormat.CSV, FileFormat.TEXT)


def _size_of(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


#: Options of Hadoop's Parquet writer, pyarrow's names for them, and the parsers of their values.
_PAGE_VERSIONS = {"v1": "1.0", "PARQUET_1_0": "1.0", "v2": "2.0", "PARQUET_2_0": "2.0"}
OF_PARQUET: Mapping[str, tuple[str, Any]] = {
    "parquet.block.size": ("", _size_of),
    "parquet.page.size": ("data_page_size", _size_of),
    "parquet.dictionary.page.size": ("dictionary_pagesize_limit", _size_of),
    "parquet.enable.dictionary": (
        "use_dictionary",
        lambda text: {"true": True, "false": False}[text.lower()],
    ),
    "parquet.writer.version": ("data_page_version", _PAGE_VERSIONS.__getitem__),
}
_OF_LINES = {"compression", "encoding", "charset", "linesep"}
_FLAGS = frozenset({"header", "quoteall", "ignorenullfields"})
#: Options of each format. Spark ignores others silently, or this package does not support them.
_KNOWN = {
    FileFormat.PARQUET: {"compression", "parquet.compression", *OF_PARQUET},
    FileFormat.JSON: {*_OF_LINES, "ignorenullfields"},
    FileFormat.CSV: {*_OF_LINES, "codec", "sep", "delimiter", "quote", "quoteall", "header", "nullvalue"},
    FileFormat.TEXT: {"compression", "linesep"},
    FileFormat.AVRO: {"compression", "recordname", "recordnamespace"},
}
#: Encodings of all texts; in others some characters become a question mark.
_FOR_ALL_TEXTS = re.compile(r"UTF-?(8|(16|32)(LE|BE)?)")


#: File extensions of codecs, by name; line formats may also name Hadoop's class.
CODECS = {
    FileFormat.PARQUET: {
        "none": "", "uncompressed": "", "snappy": ".snappy", "gzip": ".gz", "zstd": ".zstd", "brotli": ".br",
        "lz4": ".lz4raw", "lz4_raw": ".lz4raw",
    },
    FileFormat.AVRO: {
        "uncompressed": "", "deflate": ".deflate", "snappy": ".snappy", "bzip2": ".bzip2", "xz": ".xz",
        "zstandard": ".zstandard",
    },
}  # fmt: skip
CODECS_OF_LINES = {
    "none": "", "uncompressed": "", "gzip": ".gz", "bzip2": ".bz2", "deflate": ".deflate",
    "snappy": ".snappy", "lz4": ".lz4",
}  # fmt: skip
_HADOOPS = re.compile(r"org\.apache\.hadoop\.io\.compress\.(\w+)codec")


def codec_of(kind: FileFormat, options: Mapping[str, str]) -> str | None:
    names = ("compression", "codec") if kind.is_lines else ("compression", "parquet.compression")
    named = next((options[name].lower() for name in names if name in options), None)
    hadoops = _HADOOPS.fullmatch(named or "")
    return named if hadoops is None else hadoops[1].replace("default", "deflate")


def lower_names(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}


def check_options(kind: FileFormat, options: Mapping[str, str]) -> None:
    for name, value in options.items():
        reason = _RESERVED.get(name.lower())
        if reason is not None:
            raise ConfigError(f"the {kind.value} option '{name}' cannot be used", what_to_do=reason)
        if name.lower() not in _KNOWN[kind]:
            what = f"a file sink with {kind.value} does not take the option '{name}'"
            to_do = f"leave it out, or correct it to one of {', '.join(sorted(_KNOWN[kind]))}"
            raise ConfigError(what, why="it is unknown, or would change the text of values", what_to_do=to_do)
        if name.lower() in _FLAGS and value.lower() not in ("true", "false"):
            what = f"the {kind.value} option '{name}' is {value!r}"
            raise ConfigError(what, what_to_do='say "true" or "false"')
        if name.lower() in ("encoding", "charset") and not _FOR_ALL_TEXTS.fullmatch(value.upper()):
            raise ConfigError(
                f"the {kind.value} files would be in {value}",
                why="a character that this encoding lacks would become a question mark",
                what_to_do='leave the encoding out, or use "UTF-8", "UTF-16" or "UTF-32"',
            )
        if name.lower() in OF_PARQUET:
            with raise_config_errors(f"correct the option '{name}', or leave it out"):
                parse_option(name, value)
    check_codec(kind, codec_of(kind, lower_names(options)), "an option")
    if kind.is_lines:
        _check_separators(kind, options)


def _check_separators(kind: FileFormat, options: Mapping[str, str]) -> None:
    """Refuse separators of lines and values that readers would misread."""
    line_end = line_separator(options).decode()
    may_be_in_text = kind is FileFormat.JSON and all(letter >= " " for letter in line_end)
    if not line_end or may_be_in_text or line_end.startswith(BYTE_ORDER_MARK):
        raise ConfigError(
            f"the lines of {kind.value} files would end with {line_end!r}",
            why="a text may contain this line end, and readers would then see two lines",
            what_to_do="leave lineSep out, or give a control character",
        )
    if kind is not FileFormat.CSV:
        return
    # As Java counts letters.
    if len(line_end.encode("utf-16-le")) > 4:
        raise ConfigError(
            f"the lines of csv files would end with {line_end!r}",
            why="readers of CSV, such as Spark's, take one or two characters as the end of a line",
            what_to_do="leave lineSep out, or give one or two characters",
        )
    form, ends = csv_form(options), "\r\n" + BYTE_ORDER_MARK + line_end
    separator, quote = form.delimiter, form.quote
    for name, text, is_usable, others in (
        # Spark reads a backslash in a separator as the begin of another letter.
        ("sep", separator, bool(separator) and "\\" not in separator, quote + ends),
        # A line of blanks and control characters is none for many readers: "" in such quotes would be lost.
        ("quote", quote, len(quote) == 1 and " " < quote <= "\uffff" and quote != "\\", ends),
        ("nullValue", form.null, True, separator + quote + ends),
    ):
        if not is_usable or not set(text).isdisjoint(others):
            raise ConfigError(
                f"the csv option '{name}' is {text!r}",
                why="readers must be able to distinguish lines, values and quotes",
                what_to_do="choose others: one character for quote, no backslash, blank, control character, "
                "or character of lineSep",
            )


def check_codec(kind: FileFormat, codec: str | None, who: str) -> None:
    codecs = CODECS.get(kind, CODECS_OF_LINES)
    if codec is not None and codec not in codecs:
        what = f"{kind.value} files cannot be written with the codec '{codec}', which {who} names"
        to_do = f"give the sink the option compression, one of {', '.join(codecs)}"
        raise ConfigError(what, what_to_do=to_do)


def parse_option(name: str, value: str) -> Any:
    try:
        return OF_PARQUET[name.lower()][1](value)
    except (ValueError, KeyError):
        raise ValueError(f"the parquet option '{name}' cannot be {value!r}") from None


def check_mergeable(kind: FileFormat, options: Mapping[str, str], columns: Sequence[str] = ()) -> None:
    if not kind.is_lines:
        return
    found = lower_names(options)
    codec = codec_of(kind, found) or "none"
    encoding = encoding_of(options).upper()
    why = ""
    if codec not in _STACKABLE:
        why = f"files with the codec '{codec}' cannot be concatenated"
    elif has_header(kind, options) and _STACKABLE[codec]:
        why = "the header line of a compressed CSV file cannot be removed"
    elif has_header(kind, options) and any(
        end in name for name in columns for end in ("\n", "\r", line_separator(options).decode())
    ):
        why = "the header has a column whose name goes over several lines"
    elif encoding not in ("UTF-8", "UTF8"):
        why = f"files in {encoding} may begin with a byte order mark"
    if why:
        raise ConfigError(
            f"small {kind.value} files cannot be merged with these options",
            why=why,
            what_to_do="leave out compaction and RollingPolicy, or choose another codec, header or encoding",
        )


def has_header(kind: FileFormat, options: Mapping[str, str]) -> bool:
    found = lower_names(options)
    return kind is FileFormat.CSV and found.get("header", "false").lower() == "true"


def encoding_of(options: Mapping[str, str]) -> str:
    found = lower_names(options)
    return found.get("encoding", found.get("charset", "UTF-8"))


def line_separator(options: Mapping[str, str]) -> bytes:
    return lower_names(options).get("linesep", "\n").encode()


def csv_form(options: Mapping[str, str]) -> CsvForm:
    found = lower_names(options)
    return CsvForm(
        found.get("sep", found.get("delimiter", ",")),
        found.get("quote", '"'),
        found.get("nullvalue", ""),
        found.get("quoteall", "false").lower() == "true",
        line_separator(options).decode(),
        is_in_files=True,
    )


def line_condition(name: str, options: Mapping[str, str]) -> tuple[str, Column]:
    """Return the text for errors, and the condition, of a text that can be one line."""
    from pyspark.sql import functions as F

    separator, column = lower_names(options).get("linesep"), F.col(quote_name(name))
    if separator is None:
        # Readers without options take each of these for a line end.
        is_line = ~(column.contains("\n") | column.contains("\r"))
    else:
        # The first separator must be the one after the text, even if the text ends with a part of one.
        is_line = F.locate(separator, F.concat(column, F.lit(separator))) == F.length(column) + 1
        if separator == "\n":
            # Readers that accept "\r\n" would take the "\r" for a part of the line end.
            is_line &= ~column.endswith("\r")
    # The first line of a file would lose it.
    is_line &= ~column.startswith(BYTE_ORDER_MARK)
    what = f"the text {name} being one line, without U+FEFF in front"
    what += " (else write FileFormat.JSON, or lines with another lineSep)"
    return what, column.isNull() | is_line


def check_columns(kind: FileFormat, schema: T.StructType, left_out: Sequence[str], uid: str) -> None:
    fields = [one for one in schema.fields if one.name.lower() not in map(str.lower, left_out)]
    if not fields:
        raise SchemaError(
            f"the files of sink '{uid}' would have no columns",
            why="all fields of its stream are bucket columns",
            what_to_do="leave one of them in the files",
        )
    if kind is FileFormat.TEXT:
        if [field.dataType.simpleString() for field in fields] != ["string"]:
            raise SchemaError(
                f"sink '{uid}' writes text and its stream has the fields "
                f"{', '.join(f'{f.name} {f.dataType.simpleString()}' for f in fields)}",
                why="a text file holds one string column",
                what_to_do="make one string of them with transform(...), or use FileFormat.JSON",
            )
        return
    for field in fields:
        why = _why_unfit(kind, field.dataType)
        if why:
            raise SchemaError(
                f"sink '{uid}' cannot write the field '{field.name}' to {kind.value} files",
                why=why,
                what_to_do="cast or drop it with transform(...), or use another format",
            )


def _why_unfit(kind: FileFormat, data_type: T.DataType) -> str:
    from pyspark.sql import types as T

    if kind is FileFormat.CSV and isinstance(data_type, T.MapType | T.ArrayType | T.StructType):
        return f"a CSV column cannot hold {data_type.simpleString()}"
    if kind is FileFormat.CSV and isinstance(data_type, T.BinaryType):
        return "a CSV column holds text, and bytes may be none"
    # Spark's writers would refuse other types only when the first records come.
    known: tuple[type[T.DataType], ...] = (
        *(T.BooleanType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType),
        *(T.DecimalType, T.StringType, T.CharType, T.VarcharType, T.BinaryType, T.DateType, T.TimestampType),
        *(T.TimestampNTZType, T.DayTimeIntervalType, T.YearMonthIntervalType),
        *(T.ArrayType, T.MapType, T.StructType),
    )
    if kind is FileFormat.PARQUET:
        known += (T.VariantType,)
    elif kind is FileFormat.JSON:
        known += (T.VariantType, T.NullType)
    for part in parts_of(data_type):
        if isinstance(part, T.NullType) and kind is not FileFormat.JSON:
            return "a column that is always null has no type"
        if not isinstance(part, known):
            return f"the format has no {part.simpleString()}"
        if kind is FileFormat.AVRO and isinstance(part, T.MapType) and type(part.keyType) is not T.StringType:
            return f"keys of a map are STRING in Avro, not {part.keyType.simpleString()}"
    return unfit_for_json(data_type) or "" if kind is FileFormat.JSON else ""


def read_schema(kind: FileFormat, schema: T.StructType) -> T.StructType:
    """Return the types with which Spark reads the files again: Avro has no integers below INT."""
    from pyspark.sql import types as T

    if kind is not FileFormat.AVRO:
        return schema
    found = _widen(schema)
    assert isinstance(found, T.StructType)
    return found


def _widen(data_type: T.DataType) -> T.DataType:
    from pyspark.sql import types as T

    match data_type:
        case T.ByteType() | T.ShortType():
            return T.IntegerType()
        case T.ArrayType():
            return T.ArrayType(_widen(data_type.elementType), data_type.containsNull)
        case T.MapType():
            return T.MapType(data_type.keyType, _widen(data_type.valueType), data_type.valueContainsNull)
        case T.StructType():
            return T.StructType(
                [T.StructField(f.name, _widen(f.dataType), f.nullable) for f in data_type.fields]
            )
    return data_type
