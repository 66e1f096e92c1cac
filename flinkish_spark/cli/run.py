"""`flinkish run`: runs a program locally, on a cluster, or submits it to one, by options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from flinkish_spark.core.errors import ConfigError

_LOCAL = re.compile(r"local(\[(\d+|\*)(,\s*\d+)?\]|-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\])")
_MANAGERS = re.compile(r"yarn|spark://\S+|k8s://\S+")
#: Settings that have an option, with that option.
_SAID_BY_OPTIONS = {"spark.master": "--target", "spark.submit.deployMode": "--deploy-mode"}
#: Settings whose repeated values are joined.
_LISTS = ("spark.jars", "spark.jars.packages", "spark.sql.extensions")
_WORKERS_PYTHON, _DRIVERS_PYTHON = "spark.pyspark.python", "spark.pyspark.driver.python"
#: The setting of each cluster manager for submitting without waiting.
_WAITING = {
    "yarn": "spark.yarn.submit.waitAppCompletion",
    "k8s": "spark.kubernetes.submission.waitAppCompletion",
}
_SHELL = "pyspark-shell"
Callback = TypeVar("Callback", bound=Callable[..., Any])


@dataclass(frozen=True)
class Launch:
    """A command that replaces this process, and its environment variables."""

    command: Sequence[str]
    environment: Mapping[str, str]


_OPTIONS: Sequence[Callable[[Callback], Callback]] = (
    click.option(
        "--target",
        "-t",
        metavar="TARGET",
        help="local (all cores), local[N], spark://HOST:PORT, yarn-client, yarn-cluster or k8s://HOST:PORT. "
        "By default that of spark-defaults.conf.",
    ),
    click.option(
        "--deploy-mode",
        type=click.Choice(["client", "cluster"]),
        help="Where the driver is: here (client), or on the cluster, which yarn and k8s:// have.",
    ),
    click.option(
        "-D",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="A setting of Spark's, or of the job, such as execution.checkpointing.interval=10s.",
    ),
    click.option(
        "-s",
        "--from-savepoint",
        "savepoint",
        metavar="PATH",
        help="The savepoint that a new job begins with.",
    ),
    click.option(
        "-n", "--allow-non-restored-state", is_flag=True, help="Drop the savepoint's state that nobody takes."
    ),
    click.option(
        "--jars", metavar="DIR", help="Directory with the pinned JARs, as for configure_spark_with_jars."
    ),
    click.option("--packages", is_flag=True, help="Have Spark download the pinned JARs."),
    click.option("--detached", "-d", is_flag=True, help="Do not wait; only with the driver on the cluster."),
    click.option(
        "--until-caught-up",
        is_flag=True,
        help="End when all input that was there at the start has been processed; the next run goes on.",
    ),
)


def launching_options(command: Callback) -> Callback:
    """Add the options of :func:`become` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@launching_options
@click.argument("program", metavar="PROGRAM")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(program: str, arguments: tuple[str, ...], **launching: Any) -> None:
    """Run a program: a Python file that creates an environment and executes it.

    With a local driver this process becomes the program: it gets the signals, and has the program's exit
    status. With --deploy-mode cluster this process becomes spark-submit.
    """
    become([program, *arguments], **launching)


def become(
    program: Sequence[str],
    *,
    target: str | None,
    deploy_mode: str | None,
    settings: tuple[str, ...],
    jars: str | None,
    packages: bool,
    detached: bool,
    until_caught_up: bool,
    savepoint: str | None,
    allow_non_restored_state: bool,
) -> None:
    """Replace this process by a program with its arguments, or by spark-submit."""
    # Imported here, since it imports pyspark.
    from flinkish_spark.bridge.session import check_java

    if jars is not None and packages:
        raise click.UsageError("--jars and --packages are two ways to the same JARs; give one.")
    if savepoint is not None:
        settings += (f"execution.state-recovery.path={savepoint}",)
    if allow_non_restored_state:
        settings += ("execution.state-recovery.ignore-unclaimed-state=true",)
    found = launch(
        program,
        target=target,
        deploy_mode=deploy_mode,
        settings=_settings(settings),
        libraries={**_libraries(jars, packages), **_ends(until_caught_up)},
        is_detached=detached,
    )
    check_java()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(found.command[0], [*found.command], dict(found.environment))


def launch(
    program: Sequence[str],
    *,
    target: str | None,
    deploy_mode: str | None,
    settings: Mapping[str, str],
    libraries: Mapping[str, str],
    is_detached: bool,
) -> Launch:
    from flinkish_spark.bridge.session import TARGET_SETTING, log_variables
    from flinkish_spark.jars import spark_home

    master, is_on_cluster = _place(target, deploy_mode)
    is_here = not is_on_cluster
    _check_program(program[0], is_on_cluster)
    wanted = dict(libraries)
    for name, value in settings.items():
        before = wanted.get(name, "") if name in _LISTS else ""
        wanted[name] = f"{before},{value}" if before else value
    if master is not None:
        wanted[TARGET_SETTING] = master
    if is_detached:
        wanted[_find_detach_setting(master, is_on_cluster)] = "false"
    words = [] if master is None else ["--master", master]
    words += ["--deploy-mode", "cluster"] if is_on_cluster else []
    words += [word for name, value in wanted.items() for word in ("--conf", f"{name}={value}")]
    environment = dict(os.environ)
    if is_here:
        # Started by Python itself and not by spark-submit, whose JVM would get the signals.
        given = [word for word in shlex.split(environment.get("PYSPARK_SUBMIT_ARGS", "")) if word != _SHELL]
        environment["PYSPARK_SUBMIT_ARGS"] = shlex.join([*given, *words, _SHELL])
        environment.update(log_variables(environment["PYSPARK_SUBMIT_ARGS"]))
        if _WORKERS_PYTHON in wanted:
            environment["PYSPARK_PYTHON"] = wanted[_WORKERS_PYTHON]
        elif master is not None and _LOCAL.fullmatch(master):
            # Otherwise Spark takes `python3` from the path.
            environment.setdefault("PYSPARK_PYTHON", sys.executable)
        return Launch([wanted.get(_DRIVERS_PYTHON, sys.executable), *program], environment)
    environment["SPARK_HOME"] = str(spark_home())
    return Launch([str(spark_home() / "bin" / "spark-submit"), *words, *program], environment)


def _place(target: str | None, deploy_mode: str | None) -> tuple[str | None, bool]:
    """Return Spark's master, and True if the driver runs on the cluster."""
    if target in ("yarn-client", "yarn-cluster"):
        own = target.removeprefix("yarn-")
        if deploy_mode not in (None, own):
            raise click.UsageError(
                f"{target} and --deploy-mode {deploy_mode} contradict each other; leave one of them out"
            )
        return "yarn", own == "cluster"
    master = "local[*]" if target == "local" else target
    if master is not None and not (_LOCAL.fullmatch(master) or _MANAGERS.fullmatch(master)):
        raise click.UsageError(
            f"there is no target {target!r}; there is local, local[N], spark://HOST:PORT, yarn, yarn-client, "
            "yarn-cluster and k8s://HOST:PORT"
        )
    if deploy_mode != "cluster":
        return master, False
    if master is not None and master.startswith("spark://"):
        raise click.UsageError(
            "Spark's standalone clusters run no driver in Python; leave --deploy-mode out, and run this on a "
            "host of the cluster, below something that starts it again"
        )
    if master is None or _LOCAL.fullmatch(master):
        raise click.UsageError("--deploy-mode cluster needs --target yarn or k8s://HOST:PORT")
    return master, True


def _check_program(program: str, is_on_cluster: bool) -> None:
    if is_on_cluster and re.match(r"[a-z][a-z0-9+.-]*:/", program):
        return
    if not Path(program).is_file():
        raise click.UsageError(f"there is no program {program!r}; give the path of a Python file")


def _find_detach_setting(master: str | None, is_on_cluster: bool) -> str:
    """Return the setting for submitting a driver to the cluster without waiting."""
    if master is None or not is_on_cluster:
        raise click.UsageError(
            "--detached needs the driver on the cluster (--target yarn-cluster, or k8s:// with --deploy-mode "
            "cluster): elsewhere it is this process, and ends with it; let systemd or nohup keep it"
        )
    return _WAITING["k8s" if master.startswith("k8s:") else "yarn"]


def _settings(given: Sequence[str]) -> dict[str, str]:
    from flinkish_spark.bridge.session import TARGET_SETTING, UNTIL_SETTING
    from flinkish_spark.bridge.settings import JOB_SETTING
    from flinkish_spark.job.configuration import check_settings, read_setting

    said_by_options = {**_SAID_BY_OPTIONS, UNTIL_SETTING: "--until-caught-up"}
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"-D takes spark.NAME=VALUE, or a setting of a job, which {name!r} is not")
        if name in said_by_options:
            raise click.UsageError(f"{name} has its own option: {said_by_options[name]}")
        if name == TARGET_SETTING:
            raise click.UsageError(f"{name} is set by --target")
        if name.startswith("spark.") and not name.startswith(JOB_SETTING):
            found[name] = value
            continue
        try:
            known = f"{JOB_SETTING}{read_setting(name.removeprefix('spark.'), value, '-D').name}"
        except ConfigError as error:
            raise click.UsageError(f"{error} Spark would drop it.") from None
        if found.setdefault(known, value) != value:
            raise click.UsageError(f"{name} is given twice, with different values; leave one of them out")
    try:
        check_settings(found)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    return found


def _ends(until_caught_up: bool) -> Mapping[str, str]:
    from flinkish_spark.bridge.session import UNTIL_CAUGHT_UP, UNTIL_SETTING

    return {UNTIL_SETTING: UNTIL_CAUGHT_UP} if until_caught_up else {}


def _libraries(jars: str | None, packages: bool) -> Mapping[str, str]:
    from flinkish_spark.bridge.session import packages_conf, spark_conf
    from flinkish_spark.jars import find_pinned_jars

    if packages:
        return packages_conf()
    return {} if jars is None else spark_conf(find_pinned_jars(jars))
