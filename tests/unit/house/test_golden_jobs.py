"""A job directory and a savepoint that were kept are read: what needs no Spark.

The other half is `tests/integration/spark/test_golden.py`; `tests/golden/README.md` says what was
written, and by what.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.checkpoint.pins import PinManifest
from flinkish_spark.connectors.dead_letters import VisibleLetters
from flinkish_spark.connectors.files.source import FoundFile
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Receipt, TriggerRecord
from flinkish_spark.protocol.envelope import unseal
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.job_graph import JobGraph
from flinkish_spark.protocol.job_report import JobReport
from flinkish_spark.protocol.records import StagedBatch
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.protocol.statistics import StatisticsHistory
from flinkish_spark.protocol.timeline import Stretch
from flinkish_spark.savepoints.entries import file_values
from flinkish_spark.savepoints.files import SavepointDir
from flinkish_spark.state.group_values import describe_group
from tests.golden import job
from tests.golden.place import HERE, unpack
from tests.support.cli_rig import flinkish

ARCHIVES = ("job.tar.gz", "savepoint.tar.gz")
#: What reads objects of each kind.
READERS: Mapping[str, Callable[[Any], Any]] = {
    "decision": Decision.from_json,
    "fact": dict,
    "files": lambda body: [FoundFile.from_json(one) for one in body["files"]],
    "graph": JobGraph.from_json,
    "job": dict,
    "owner": dict,
    "pin": PinManifest.from_json,
    "receipt": Receipt.from_json,
    "report": JobReport.from_json,
    "savepoint": SavepointMetadata.from_json,
    "staged": StagedBatch.from_json,
    "statistics": StatisticsHistory.from_json,
    "stretch": Stretch.from_json,
    "trigger": TriggerRecord.from_json,
    "visible-dead-letters": VisibleLetters.from_json,
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, unpacked side by side; nothing here changes them."""
    root = tmp_path_factory.mktemp("golden")
    for archive in ARCHIVES:
        unpack(archive, root)
    return root


def contents() -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of all files, and of those in archives among them."""
    for archive in ARCHIVES:
        with tarfile.open(HERE / archive) as tar:
            for entry in tar:
                file = tar.extractfile(entry)
                if file is not None:
                    data = file.read()
                    yield entry.name, data
                    if entry.name.endswith(".zip"):
                        with zipfile.ZipFile(BytesIO(data)) as inner:
                            yield from ((f"{entry.name}/{one}", inner.read(one)) for one in inner.namelist())


def test_what_is_kept_is_small() -> None:
    assert sum(path.stat().st_size for path in HERE.glob("*.gz")) < 1_000_000


def test_nothing_that_is_stored_names_a_module_of_the_package_or_a_path_of_a_machine() -> None:
    for name, data in contents():
        for word in (b"flinkish_spark", b"/work/", b"/home/", b"/root/"):
            assert word not in data, name


def test_every_sealed_object_is_read(kept: Path) -> None:
    found = Counter[str]()
    for path in sorted(kept.rglob("*.json")):
        data = path.read_bytes()
        if data.startswith(b'{"kind"'):
            kind = json.loads(data.split(b"\n")[0])["kind"]
            found[kind] += 1
            if not kind.startswith("file-sink-"):
                READERS[kind](unseal(kind, data))
    assert READERS.keys() <= found.keys()


def test_a_checkpoint_waits_to_be_confirmed_and_a_micro_batch_to_be_decided(kept: Path) -> None:
    job_dir = JobDir(LocalStore(kept / job.JOB / "job"))
    newest = job_dir.newest_commit()
    assert newest is not None and job_dir.receipt(newest.checkpoint) is None
    confirmed = [one for one in job_dir.list_checkpoint_ids() if job_dir.receipt(one) is not None]
    assert len(confirmed) >= 2 and max(confirmed) == CheckpointId(newest.checkpoint.value - 1)
    staged = job_dir.list_staged(job_dir.lineage()).values()
    assert any(one.committables for one in staged if one.batch > newest.batches[-1].batch)


def test_the_command_line_shows_the_job(kept: Path) -> None:
    folder = kept / job.JOB / "job"
    newest = JobDir(LocalStore(folder)).newest_commit()
    assert newest is not None
    for words in (("checkpoints", "list", folder), ("checkpoints", "show", folder, newest.checkpoint.value)):
        shown = flinkish(*words)
        assert shown.exit_code == 0, shown.output
        assert str(newest.checkpoint) in shown.output


def test_logs_of_spark_are_read(kept: Path) -> None:
    logs = sorted((kept / job.JOB / "job" / "spark").glob("*/offsets/[0-9]*"))
    assert logs
    for path in logs:
        assert LoggedOffsets.parse(path.read_text()).sources, path


def test_all_state_of_the_savepoint_is_checked_and_read(kept: Path) -> None:
    metadata = SavepointDir(kept / "savepoint").metadata()
    owners = {
        describe_group(value).owner
        for file in metadata.files
        for _, value in file_values(StoreSpec(str(kept / "savepoint")), file)
    }
    assert owners == set(metadata.operators)
