"""Where the kept job lives, archives of it, and what its outputs show.

Its place is fixed, since some of what is stored has whole paths in it, so whoever uses it holds a lock.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import shutil
import sqlite3
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flinkish_spark import JobClient
from tests.golden import orders
from tests.golden.expected import Rows
from tests.support.jobs import read_delta

ROOT = Path("/tmp/flinkish-golden")
HERE = Path(__file__).resolve().parent
#: How many files of input had been read when the savepoint was taken, were decided, and were staged.
AT_SAVEPOINT, DECIDED, STAGED = 2, 4, 5
#: Of everything in an archive.
_MODIFIED_S = 1_700_000_000


@contextmanager
def place() -> Iterator[Path]:
    """Have the place for oneself, empty but for folders of the input; it is emptied again."""
    with ROOT.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(ROOT, ignore_errors=True)
        try:
            orders.prepare(ROOT)
            yield ROOT
        finally:
            shutil.rmtree(ROOT, ignore_errors=True)


def pack(archive: Path, root: Path, names: Sequence[str]) -> None:
    """Archive what lies below some names; the same bytes from the same content."""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            for path in [root / name, *sorted((root / name).rglob("*"))]:
                entry = tar.gettarinfo(path, arcname=str(path.relative_to(root)))
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                entry.mtime, entry.mode = _MODIFIED_S, 0o755 if path.is_dir() else 0o644
                with path.open("rb") if path.is_file() else io.BytesIO() as content:
                    tar.addfile(entry, content if path.is_file() else None)
    write_packed(archive, text.getvalue())


def write_packed(path: Path, data: bytes) -> None:
    """Compress; the same bytes from the same content."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(data)


def unpack(archive: str, root: Path) -> None:
    """Unpack an archive that lies beside this file."""
    with tarfile.open(HERE / archive) as tar:
        tar.extractall(root, filter="data")


def outputs(out: Path) -> dict[str, Rows]:
    """Return what readers of each output see."""
    delta = read_delta(out / "delta") if (out / "delta").exists() else []
    files = [row for path in _shown(out / "files") for row in pq.read_table(path).to_pylist()]
    letters = [json.loads(line) for path in _shown(out / "refused") for line in path.read_text().splitlines()]
    committed = [path.read_text().splitlines() for path in sorted((out / "ledger" / "committed").glob("*"))]
    return {
        "delta": Rows(tuple(row[name] for name in ("user", "what", "n", "said")) for row in delta),
        "alarms": _table(out / "database", "alarms"),
        "files": Rows(_hashable(row.values()) for row in files),
        "ledger": Rows(tuple(json.loads(line)) for lines in committed for line in lines),
        "refused": Rows(_letter(letter) for letter in letters),
    }


def rows_as_text(rows: Mapping[str, Rows]) -> str:
    """Return the rows of outputs as a file that is kept."""
    found = {name: sorted(map(list, own.elements()), key=str) for name, own in rows.items()}
    return json.dumps(found, indent=1) + "\n"


def kept_rows(path: Path) -> dict[str, Rows]:
    """Return the rows of outputs that a file has."""
    return {name: Rows(map(_hashable, own)) for name, own in json.loads(path.read_text()).items()}


def _hashable(row: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row)


def _letter(letter: dict[str, Any]) -> tuple[Any, ...]:
    record = json.loads(letter["record"])
    return letter["uid"], letter["reason"], *(record[name] for name in ("user", "n", "total"))


def _shown(folder: Path) -> list[Path]:
    """Return the files that readers see."""
    found = sorted(folder.rglob("*"))
    return [
        path
        for path in found
        if path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    ]


def _table(database: Path, name: str) -> Rows:
    if not database.exists():
        return Rows()
    with closing(sqlite3.connect(database)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE name = ?", (name,)).fetchall()
        return Counter(db.execute(f"SELECT * FROM {name}").fetchall()) if tables else Rows()


def await_position(job_dir: Path, client: JobClient, wanted: dict[str, int]) -> None:
    """Wait until all scans of some sources have been read up to there, and Spark has committed that."""
    while not _is_at(job_dir, wanted):
        assert not client.wait(timeout_ms=100), "the job ended"


def _is_at(job_dir: Path, wanted: dict[str, int]) -> bool:
    for folder in job_dir.glob("spark/*"):
        done = [int(path.name) for path in (folder / "commits").glob("[0-9]*")]
        if done:
            lines = (folder / "offsets" / str(max(done))).read_text().splitlines()
            at = [_place(json.loads(line)) for line in lines[2:] if line.startswith("{")]
            return {one for one in at if one[0] in wanted} == set(wanted.items())
    return False


def _place(position: dict[str, Any]) -> tuple[str, int]:
    """Return of which source a position is, and how many files or records of it have been read."""
    if "flinkish:splits" in position:
        counts = [at for _, at in position["flinkish:splits"]]
        return position["flinkish:source"], sum(at for at in counts if isinstance(at, int))
    return "", 0
