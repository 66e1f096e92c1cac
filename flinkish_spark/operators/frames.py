"""Named byte sections in a checked frame: magic, version, count; per section name, length, CRC32, payload.

The CRC32 is that of the name and the payload.

Reading never runs code, and what is torn or altered is found before any of it is used. A payload begins at a
multiple of 64 bytes, so that Arrow's columns in a mapped file can be used where they lie.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

_MAGIC = b"FSKS"
#: The second version's checksums are of payloads alone.
_VERSION, _WITHOUT_NAMES = 3, 2
_HEAD = struct.Struct("<4sBH")
_SECTION = struct.Struct("<HQI")
_ALIGNED = 64

#: Sections by name; views into the bytes that were read.
Frame = Mapping[str, memoryview]


class FrameError(ValueError):
    """The bytes are torn, altered, or written by another version."""


def pack_frame(sections: Mapping[str, bytes | memoryview]) -> bytes:
    """Return sections as bytes.

    Examples
    --------
    >>> bytes(unpack_frame(pack_frame({"a": b"1", "b": b""}))["a"])
    b'1'
    """
    parts: list[bytes | memoryview] = [_HEAD.pack(_MAGIC, _VERSION, len(sections))]
    at = _HEAD.size
    for text, payload in sections.items():
        name = text.encode("utf-8")
        head = _SECTION.pack(len(name), len(payload), zlib.crc32(payload, zlib.crc32(name))) + name
        padding = bytes(-(at + len(head)) % _ALIGNED)
        parts += [head, padding, payload]
        at += len(head) + len(padding) + len(payload)
    return b"".join(parts)


def unpack_frame(data: bytes | memoryview) -> dict[str, memoryview]:
    """Return the sections of a frame.

    Raises
    ------
    FrameError
        It is not a frame of this version, it is torn, or its content was altered.
    """
    view = memoryview(data)
    sections: dict[str, memoryview] = {}
    try:
        magic, version, count = _HEAD.unpack_from(view)
        if magic != _MAGIC or version not in (_VERSION, _WITHOUT_NAMES):
            raise FrameError(f"not a state value of version {_VERSION} or {_WITHOUT_NAMES}")
        at = _HEAD.size
        for _ in range(count):
            name_length, length, checksum = _SECTION.unpack_from(view, at)
            at += _SECTION.size
            encoded = bytes(view[at : at + name_length])
            name = encoded.decode("utf-8")
            at += name_length
            begins = at + -at % _ALIGNED
            padding, payload = view[at:begins], view[begins : begins + length]
            at = begins + length
            begun = zlib.crc32(encoded) if version == _VERSION else 0
            if any(padding) or len(payload) != length or zlib.crc32(payload, begun) != checksum:
                raise FrameError(f"the section {name!r} is torn or altered")
            if name in sections:
                raise FrameError(f"the section {name!r} is there twice")
            sections[name] = payload
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"the state value is torn: {error}") from error
    if at != len(view):
        raise FrameError("the state value has bytes after its end")
    return sections
