"""The input of the job that is kept, file by file, and how it is put where the job reads it.

Files have fixed times: the job has stored size and time of those that it has found, and refuses others.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

USERS = ("ann", "ben", "eve")
PER_FILE = 12
#: Between files nothing happens for a while, so that sessions end; behind every other one for longer.
PAUSE_MS, LONG_PAUSE_MS = 50_000, 75_000
_FIRST_S = 1_700_000_000

#: user, n, amount, at; and payer, of, paid, at.
Order = tuple[str, int, int, int]
Payment = tuple[str, int, int, int]


def orders(file: int) -> list[Order]:
    """Return the records of a file, in their order."""
    numbers = range(file * PER_FILE, (file + 1) * PER_FILE)
    paused_ms = file * PAUSE_MS + file // 2 * LONG_PAUSE_MS
    return [(USERS[n % 3], n, n * 7 % 11 + 1, n * 1_000 + paused_ms) for n in numbers]


def payments(file: int) -> list[Payment]:
    """Return the payments of a file: every other order is paid a second later, most of it."""
    return [(user, n, n * 5 % 7 + 1, at + 1_000) for user, n, _, at in orders(file) if n % 2 == 0]


def prepare(root: Path) -> None:
    """Make the folders that the job reads."""
    for name in ("orders", "payments"):
        (root / name).mkdir(parents=True, exist_ok=True)


def put(root: Path, file: int) -> None:
    """Let a file of both kinds appear."""
    fields = ("user", "n", "amount", "at")
    lines = [json.dumps(dict(zip(fields, one, strict=True))) for one in orders(file)]
    _appear(root / "orders" / f"{file:02d}.json", lines, _FIRST_S + file)
    lines = ["payer,of,paid,at", *(",".join(map(str, one)) for one in payments(file))]
    _appear(root / "payments" / f"{file:02d}.csv", lines, _FIRST_S + file)


def _appear(path: Path, lines: list[str], modified_s: int) -> None:
    hidden = path.with_name(f".{path.name}")
    hidden.write_text("".join(f"{line}\n" for line in lines))
    os.utime(hidden, (modified_s, modified_s))
    hidden.rename(path)
