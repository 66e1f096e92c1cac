"""Variable-length numbers of Avro, Protobuf, Kafka and Snappy: seven bits a byte, the lowest first."""

from __future__ import annotations


def write_varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def read_varint(data: bytes | memoryview, position: int, most_bytes: int) -> tuple[int, int]:
    """Return the number at `position`, and its end; IndexError if it has no end."""
    number = 0
    for shift in range(0, 7 * most_bytes, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise IndexError(f"a number is longer than {most_bytes} bytes")
