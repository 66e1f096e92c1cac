"""Job directories and a savepoint that an earlier version has written are read: what there is without Spark.

The other half is `tests/spark/test_golden.py`; `tests/golden/README.md` says what was written, and by what.
"""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord, Verdict
from flinkish_spark.protocol.envelope import unseal
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.protocol.statistics_history import StatisticsHistory
from flinkish_spark.protocol.timeline import Stretch
from flinkish_spark.runtime.pins import PinManifest
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.sources.file_list import FoundFile
from flinkish_spark.store import LocalStore
from tests.cli_rig import flinkish, said
from tests.golden import job, kafka_job, programs
from tests.golden.place import HERE, unpack

ARCHIVES = ("job.tar.gz", "savepoint.tar.gz", "kafka.tar.gz")
#: Where job directories lie in their archives.
JOBS = {"job.tar.gz": f"{job.JOB}/job", "kafka.tar.gz": kafka_job.JOB}
#: What reads objects of each kind.
READERS: Mapping[str, Callable[[Any], Any]] = {
    "decision": Decision.from_json,
    "fact": dict,
    "files": lambda body: [FoundFile.from_json(one) for one in body["files"]],
    "job": dict,
    "owner": dict,
    "pin": PinManifest.from_json,
    "receipt": Receipt.from_json,
    "savepoint": SavepointMetadata.from_json,
    "staged": StagedBatch.from_json,
    "statistics": StatisticsHistory.from_json,
    "stretch": Stretch.from_json,
    "trigger": TriggerRecord.from_json,
}


with gzip.open(HERE / "programs.json.gz") as _file:
    PROGRAMS = json.load(_file)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All archives, unpacked side by side; nothing here changes them."""
    root = tmp_path_factory.mktemp("golden")
    for archive in ARCHIVES:
        unpack(archive, root)
    return root


def contents(archive: str) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of an archive's files, and of those in archives among them."""
    with tarfile.open(HERE / archive) as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            if file is not None:
                data = file.read()
                yield entry.name, data
                if entry.name.endswith(".zip"):
                    with zipfile.ZipFile(BytesIO(data)) as inner:
                        yield from ((f"{entry.name}/{name}", inner.read(name)) for name in inner.namelist())


def test_archives_are_small() -> None:
    assert sum((HERE / archive).stat().st_size for archive in ARCHIVES) < 1_000_000


@pytest.mark.parametrize("archive", ARCHIVES)
def test_nothing_that_is_stored_names_a_module_of_the_package(archive: str) -> None:
    """Else a module could never get another name."""
    for name, data in contents(archive):
        assert b"flinkish_spark" not in data, name


@pytest.mark.parametrize("archive", ARCHIVES)
def test_no_path_of_the_machine_that_wrote_them_is_stored(archive: str) -> None:
    for name, data in contents(archive):
        for place in (b"/work/", b"/home/", b"/root/"):
            assert place not in data, name


def test_every_sealed_object_is_read(kept: Path) -> None:
    found = defaultdict(int)
    for path in sorted(kept.rglob("*.json")):
        data = path.read_bytes()
        if data.startswith(b'{"kind"'):
            kind = json.loads(data.split(b"\n")[0])["kind"]
            READERS[kind](unseal(kind, data))
            found[kind] += 1
    assert found.keys() == READERS.keys()


@pytest.mark.parametrize("archive", JOBS)
def test_a_checkpoint_waits_to_be_confirmed_and_a_micro_batch_to_be_decided(kept: Path, archive: str) -> None:
    job_dir = JobDir(LocalStore(kept / JOBS[archive]))
    newest = job_dir.newest_commit()
    assert newest is not None and newest.verdict is Verdict.COMMIT
    confirmed = [one for one in job_dir.decided_ids() if job_dir.receipt(one) is not None]
    assert len(confirmed) >= 2 and max(confirmed) == CheckpointId(newest.checkpoint.value - 1)
    staged = job_dir.staged_batches(job_dir.lineage()).values()
    undecided = [one for one in staged if one.batch > newest.batches[-1].batch]
    assert undecided and any(one.committables for one in undecided)


@pytest.mark.parametrize("archive", JOBS)
def test_the_command_line_shows_them(kept: Path, archive: str) -> None:
    folder = kept / JOBS[archive]
    listed = said(flinkish("checkpoints", "list", folder, "--json"))
    print(listed)
    newest = JobDir(LocalStore(folder)).newest_commit()
    shown = said(flinkish("checkpoints", "show", folder, newest.checkpoint, "--json"))
    print(shown)


@pytest.mark.parametrize("archive", JOBS)
def test_logs_of_spark_are_read(kept: Path, archive: str) -> None:
    logs = sorted((kept / JOBS[archive] / "spark").glob("*/offsets/[0-9]*"))
    assert logs
    for path in logs:
        assert LoggedOffsets.parse(path.read_text()), path


def test_all_programs_are_kept() -> None:
    assert list(PROGRAMS) == list(programs.PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_goes_on_with_the_state_that_was_stored(name: str) -> None:
    stored = PROGRAMS[name]
    restored = programs.harness(programs.PROGRAMS[name], programs.from_json(stored["state"]))
    assert programs.run(restored, programs.BEHIND) == stored["behind"]
