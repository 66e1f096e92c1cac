"""Values of a type as text, as whoever writes files by hand would write them."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any


def json_text(value: Any) -> str:
    """Return a value as JSON: binary in base64, times in ISO 8601, floats that are no numbers as strings."""
    match value:
        case dict():
            return "{" + ",".join(f"{json_key(k)}:{json_text(v)}" for k, v in value.items()) + "}"
        case list():
            return f"[{','.join(map(json_text, value))}]"
        case float() if not math.isfinite(value):
            return json.dumps(plain_text(value))
        case None | bool() | int() | float() | str():
            return json.dumps(value)
        case Decimal():
            return format(value, "f")
    return json.dumps(plain_text(value))


def json_key(value: Any) -> str:
    """Return a key of a map as JSON has it."""
    return json.dumps(value if isinstance(value, str) else plain_text(value))


def csv_cell(value: Any) -> bytes:
    """Return a value as a cell of CSV: nothing is null, bytes are themselves, a quote is there twice."""
    if value is None:
        return b""
    if isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        return b'"' + raw.replace(b'"', b'""') + b'"'
    return plain_text(value).encode()


def plain_text(value: Any) -> str:
    """Return a value as the word that stands for it."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            words = {math.inf: "Infinity", -math.inf: "-Infinity"}
            return "NaN" if math.isnan(value) else words.get(value, repr(value))
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case dt.datetime():
            return value.isoformat().replace("+00:00", "Z")
        case dt.date() | dt.time():
            return value.isoformat()
        case dt.timedelta():
            return interval_text(value)
    return str(value)


def interval_text(value: dt.timedelta) -> str:
    """Return an interval as Spark writes it."""
    sign, positive = ("-", -value) if value < dt.timedelta() else ("", value)
    minutes, seconds = divmod(positive.seconds, 60)
    of_day = f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}.{positive.microseconds:06}"
    return f"INTERVAL '{sign}{positive.days} {of_day}' DAY TO SECOND"
