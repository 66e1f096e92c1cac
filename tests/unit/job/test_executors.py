"""Whether executors see the job directory is asked where it matters, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge.session import blind_hosts, runs_tasks_itself
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job import preflight


class Executors:
    """Run what a task does in this process, with or without the driver's files."""

    defaultParallelism = 3  # noqa: N815

    def __init__(self, folder: Path, *, see: bool) -> None:
        self._folder, self._see = folder, see
        self.asked: list[list[str]] = []

    def parallelize(self, numbers: Any, tasks: int) -> Any:
        self.tasks = tasks
        return SimpleNamespace(mapPartitions=lambda task: SimpleNamespace(collect=lambda: self._run(task)))

    def _run(self, task: Any) -> list[str]:
        self.asked.append(sorted(path.name for path in self._folder.iterdir()))
        if not self._see:
            for path in self._folder.iterdir():
                path.rename(path.with_name(f"gone{path.name}"))
        found = [host for _ in range(self.tasks) for host in task(iter(()))]
        for path in self._folder.glob("gone*"):
            path.rename(path.with_name(path.name.removeprefix("gone")))
        return found


def session(folder: Path, *, see: bool) -> Any:
    return SimpleNamespace(sparkContext=Executors(folder, see=see))


def test_a_file_is_there_for_the_moment(tmp_path: Path) -> None:
    spark = session(tmp_path, see=True)
    assert blind_hosts(spark, tmp_path / "not" / "made" / "yet") == []
    assert len(spark.sparkContext.asked[0]) == 1, "in the nearest folder that is there"
    assert list(tmp_path.iterdir()) == []


def test_a_host_is_named_once(tmp_path: Path) -> None:
    spark = session(tmp_path, see=False)
    assert len(blind_hosts(spark, tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    spark = session(tmp_path, see=False)
    assert blind_hosts(spark, tmp_path) == [] == spark.sparkContext.asked


@pytest.mark.parametrize(
    ("master", "itself"),
    [("local", True), ("local[2]", True), ("local[*,4]", True), ("local-cluster[2,1,1024]", False)]
    + [(master, False) for master in ("spark://h:7077", "yarn", "k8s://https://h", "")],
)
def test_which_sessions_run_tasks_themselves(master: str, itself: bool) -> None:
    spark: Any = SimpleNamespace(_jvm=object(), sparkContext=SimpleNamespace(master=master))
    assert runs_tasks_itself(spark) is itself


def sink(stages: bool) -> Any:
    made: Any = SimpleNamespace(stages_in_job_dir=stages)
    made.parts = lambda uid: ((uid, made),)
    return SimpleNamespace(uid="out", sink=made)


OPERATOR = SimpleNamespace(uid="totals")


@pytest.mark.parametrize(
    ("operators", "stages", "restore", "says"),
    [
        ([OPERATOR], False, None, "the state of operator 'totals'"),
        ([], True, None, "the rows of sink 'out'"),
        ([], False, object(), "the state of the savepoint"),
        ([], False, None, ""),
    ],
)
def test_only_jobs_whose_tasks_use_it_are_refused(
    tmp_path: Path, operators: list[Any], stages: bool, restore: Any, says: str
) -> None:
    spark, settings = session(tmp_path, see=False), SimpleNamespace(job_dir=StoreSpec(str(tmp_path / "job")))
    graph: Any = SimpleNamespace(operators=operators, sinks=[sink(stages)])
    if not says:
        preflight._check_seen(spark, graph, settings, None, restore)  # type: ignore[arg-type]
        assert not spark.sparkContext.asked, "nobody is asked what does not matter"
        return
    with pytest.raises(EnvironmentFault, match=f"do not see the job directory .*{says}.*share"):
        preflight._check_seen(spark, graph, settings, None, restore)  # type: ignore[arg-type]
