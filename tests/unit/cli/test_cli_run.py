"""`flinkish run`: what takes the place of the command, for each target."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark.bridge.session import UNTIL_CAUGHT_UP, UNTIL_SETTING, refuse_other_target
from flinkish_spark.cli import run as module
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.jars import find_pinned, shim_jar, spark_home
from tests.support.cli_rig import flinkish


class Replaced(Exception):
    """This process has become another one."""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "app.py").write_text("")
    return str(tmp_path / "app.py")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command; return the command that it becomes, its environment, and the words for Spark."""
    # Not every machine of the unit tests has one.
    monkeypatch.setattr("flinkish_spark.bridge.session.check_java", lambda: None)
    for name in ("PYSPARK_SUBMIT_ARGS", "PYSPARK_PYTHON", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)

    def launch(*words: str) -> tuple[list[str], dict[str, str], list[str]]:
        became: list[Any] = []

        def become(file: str, command: list[str], environment: dict[str, str]) -> None:
            became.append((file, command, environment))

        monkeypatch.setattr(module.os, "execvpe", become)
        shown = flinkish("run", *words)
        assert shown.exit_code == 0, shown.stderr
        ((file, command, environment),) = became
        assert file == command[0]
        return command, environment, shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", ""))

    return launch


def settings_of(words: list[str]) -> dict[str, str]:
    return dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--conf")


def test_here_the_process_becomes_the_program_with_its_words_as_they_are(launched: Any, program: str) -> None:
    words = ["--target", "two words", "-D", "x", "--help"]
    command, environment, submit = launched("--target", "local[2,4]", program, *words)
    assert command == [sys.executable, program, *words]
    assert submit[:2] == ["--master", "local[2,4]"] and submit[-1] == "pyspark-shell"
    assert settings_of(submit) == {"spark.flinkish.target": "local[2,4]"}
    assert environment["PYSPARK_PYTHON"] == sys.executable
    assert environment["PATH"] == os.environ["PATH"]


def test_a_run_is_told_to_end_when_it_has_caught_up(launched: Any, program: str) -> None:
    _, _, submit = launched("--until-caught-up", program)
    assert settings_of(submit) == {UNTIL_SETTING: UNTIL_CAUGHT_UP}


def test_local_is_all_cores_as_in_flink(launched: Any, program: str) -> None:
    _, _, submit = launched("-t", "local", program)
    assert submit[:2] == ["--master", "local[*]"]


@pytest.mark.parametrize(
    "target", ["spark://10.0.0.1:7077,10.0.0.2:7077", "yarn", "k8s://https://there:6443"]
)
def test_on_a_cluster_the_driver_is_here_too(launched: Any, program: str, target: str) -> None:
    command, environment, submit = launched("--target", target, program)
    assert command == [sys.executable, program]
    assert submit[:2] == ["--master", target]
    # The package may come to executors with what Spark unpacks, too late for a daemon that needs it.
    assert settings_of(submit) == {"spark.flinkish.target": target}
    assert "PYSPARK_PYTHON" not in environment


def test_without_a_target_spark_decides(launched: Any, program: str) -> None:
    command, _, submit = launched(program)
    assert (command, submit) == ([sys.executable, program], ["pyspark-shell"])


def test_settings_reach_spark_as_they_are(
    launched: Any, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--name 'a b' --conf spark.x=1 pyspark-shell")
    odd = 'it\'s a=b; $HOME "x"'
    options = ["-D", f"spark.odd={odd}", "-D", "spark.x=2", "-D", "spark.empty="]
    _, _, submit = launched(*options, program)
    assert submit[:2] == ["--name", "a b"]
    assert settings_of(submit) == {"spark.x": "2", "spark.odd": odd, "spark.empty": ""}


def test_settings_of_the_job_reach_it_by_a_name_that_spark_passes_on(launched: Any, program: str) -> None:
    options = ["-D", "execution.checkpointing.interval=10s", "-D", "flinkish.standby=wait"]
    options += ["-D", "state.checkpoints.dir=/jobs", "-D", "spark.flinkish.store-options.region=x"]
    _, _, submit = launched(*options, program)
    assert settings_of(submit) == {
        "spark.flinkish.execution.checkpointing.interval": "10s",
        "spark.flinkish.standby": "wait",
        "spark.flinkish.execution.checkpointing.dir": "/jobs",
        "spark.flinkish.store-options.region": "x",
    }


def test_a_run_begins_with_a_savepoint(launched: Any, program: str) -> None:
    _, _, submit = launched("-s", "/s/7", "-n", program, "-s", "its own")
    assert settings_of(submit) == {
        "spark.flinkish.execution.state-recovery.path": "/s/7",
        "spark.flinkish.execution.state-recovery.ignore-unclaimed-state": "true",
    }
    words = ["--from-savepoint", "/s/7", "--allow-non-restored-state", "-D", "execution.savepoint.path=/s/7"]
    _, _, again = launched(*words, program)
    assert settings_of(again) == settings_of(submit)


def test_two_savepoints_are_refused(program: str) -> None:
    shown = flinkish("run", "-s", "/s/7", "-D", "execution.savepoint.path=/s/6", program)
    assert shown.exit_code == 2 and "is given twice, with different values" in shown.stderr


def test_pythons_of_driver_and_workers(launched: Any, program: str) -> None:
    options = ["-D", "spark.pyspark.python=./env/bin/python", "-D", "spark.pyspark.driver.python=/d/python"]
    command, environment, _ = launched("--target", "yarn", *options, program)
    assert command == ["/d/python", program]
    assert environment["PYSPARK_PYTHON"] == "./env/bin/python"


def test_with_the_driver_on_the_cluster_the_process_becomes_spark_submit(launched: Any, program: str) -> None:
    for options in (["-t", "yarn-cluster"], ["-t", "yarn", "--deploy-mode", "cluster"]):
        command, environment, _ = launched(
            *options, "-D", "spark.executor.instances=2", program, "--a", "b c"
        )
        assert command[0] == str(spark_home() / "bin" / "spark-submit") and Path(command[0]).is_file()
        assert command[1:5] == ["--master", "yarn", "--deploy-mode", "cluster"]
        assert command[-3:] == [program, "--a", "b c"]
        assert settings_of(command) == {"spark.executor.instances": "2", "spark.flinkish.target": "yarn"}
        assert environment["SPARK_HOME"] == str(spark_home())


def test_detached_tells_the_manager_that_nobody_waits(launched: Any, program: str) -> None:
    command, _, _ = launched("-d", "-t", "yarn-cluster", program)
    assert settings_of(command)["spark.yarn.submit.waitAppCompletion"] == "false"
    options = ["--detached", "-t", "k8s://there:6443", "--deploy-mode", "cluster"]
    command, _, _ = launched(*options, "local:///opt/app.py")
    assert settings_of(command)["spark.kubernetes.submission.waitAppCompletion"] == "false"
    assert command[-1] == "local:///opt/app.py"


def test_jars_of_a_folder_stand_beside_those_that_are_named(
    launched: Any, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for coordinate in find_pinned("spark"):
        (tmp_path / "{1}-{2}.jar".format(*coordinate.split(":"))).touch()
    _, _, submit = launched("--jars", str(tmp_path), "-D", "spark.jars=/own.jar", program)
    jars = settings_of(submit)["spark.jars"].split(",")
    assert (jars[0], jars[-1], len(jars)) == (str(shim_jar()), "/own.jar", len(find_pinned("spark")) + 2)
    assert settings_of(submit)["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension"
    _, _, submit = launched("--packages", "-D", "spark.jars.packages=a:b:1", program)
    assert settings_of(submit)["spark.jars.packages"].split(",") == [*find_pinned("spark"), "a:b:1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-t", "mesos://a:1", "APP"], "there is no target 'mesos://a:1'"),
        (["-t", "local[", "APP"], "there is no target"),
        (["-t", "remote", "APP"], "there is no target 'remote'"),
        (
            ["-t", "yarn-cluster", "--deploy-mode", "client", "APP"],
            "yarn-cluster and --deploy-mode client contradict",
        ),
        (
            ["-t", "spark://a:7077", "--deploy-mode", "cluster", "APP"],
            "standalone clusters run no driver",
        ),
        (["-t", "local", "--deploy-mode", "cluster", "APP"], "needs --target yarn or k8s"),
        (["--deploy-mode", "cluster", "APP"], "needs --target yarn or k8s"),
        (["-d", "-t", "local", "APP"], "--detached needs the driver on the cluster"),
        (["-d", "-t", "yarn", "APP"], "--detached needs the driver on the cluster"),
        (["-D", "spark.x", "APP"], "-D takes spark.NAME=VALUE"),
        (["-D", "state.backend=rocksdb", "APP"], "Spark would drop it"),
        (["-D", "pipeline.nam=a", "APP"], "Did you mean 'pipeline.name'"),
        (["-D", "execution.checkpointing.interval=soon", "APP"], "-D gives it, and it must be a duration"),
        (["-D", "execution.checkpointing.interval=0", "APP"], "correct it in -D"),
        (["-s", "here", "APP"], "give an absolute path"),
        (["-D", "spark.flinkish.until=now", "APP"], "own option: --until-caught-up"),
        (["-D", "spark.master=yarn", "APP"], "own option: --target"),
        (["-D", "spark.submit.deployMode=cluster", "APP"], "own option: --deploy-mode"),
        (["-D", "spark.flinkish.target=yarn", "APP"], "set by --target"),
        (["--jars", "a", "--packages", "APP"], "two ways to the same JARs"),
        (["missing.py"], "there is no program 'missing.py'"),
        (["hdfs://there/app.py"], "there is no program"),
        ([], "Missing argument 'PROGRAM'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(words: list[str], says: str, program: str) -> None:
    shown = flinkish("run", *(program if word == "APP" else word for word in words))
    assert shown.exit_code == 2 and says in shown.stderr and shown.stdout == ""


def test_jars_that_are_missing_are_named(program: str, tmp_path: Path) -> None:
    shown = flinkish("run", "--jars", str(tmp_path), program)
    assert shown.exit_code == 1 and "JARs that Spark needs are missing" in shown.stderr


def session(master: str, target: str | None) -> Any:
    conf = SimpleNamespace(get=lambda name: target if name == "spark.flinkish.target" else None)
    return SimpleNamespace(sparkContext=SimpleNamespace(master=master, getConf=lambda: conf))


def test_a_program_that_says_its_master_itself_is_refused_elsewhere() -> None:
    for master, target in (
        ("yarn", "yarn"),
        ("local[2]", None),
        ("k8s://https://there:6443", "k8s://there:6443"),
    ):
        refuse_other_target(session(master, target))
    with pytest.raises(ConfigError, match=r"runs on local\[2\], and --target says yarn.*take \.master"):
        refuse_other_target(session("local[2]", "yarn"))
