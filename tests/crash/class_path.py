"""JVMs that start fast: all JARs on the class path, and an archive of the classes that a job loads from it.

`python -m tests.crash.class_path FILE` makes the archive. `build/classes.jsa` is for JVMs that get the JARs
as `spark.jars`: a class loader of Spark's own loads those, and what it loads can be in no archive. A JVM that
cannot use the archive goes on without.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from demo.rig import ROOT
from flinkish_spark.jars import pinned_jars, shim_jar

CLASSES = ROOT / "build" / "crash-classes.jsa"
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def variables() -> Mapping[str, str]:
    """Return what the environment of a driver says of its JVM."""
    jars = [shim_jar(), *pinned_jars(ROOT / "build" / "jars")]
    found = {"SPARK_DIST_CLASSPATH": os.pathsep.join(map(str, jars))}
    if CLASSES.exists():
        found["SPARK_SUBMIT_OPTS"] = f"-XX:SharedArchiveFile={CLASSES} {_QUIET}"
    return found


def make(file: Path) -> None:
    """Run the job with a sink of every family until a checkpoint, and keep what its JVM has loaded."""
    from flinkish_spark.testing import LocalBroker, LocalPostgres, unpack_postgres
    from tests.archive_classes import archive_of
    from tests.crash.families_rig import FamiliesRig, Servers

    folder = ROOT / "build" / "crash-classes"
    shutil.rmtree(folder, ignore_errors=True)
    with (
        LocalBroker(folder / "broker", jars_dir=ROOT / "build" / "broker-jars") as broker,
        LocalPostgres(unpack_postgres(ROOT / "build" / "postgres")) as postgres,
        FamiliesRig(folder / "run", random.Random(1), Servers(broker, postgres)) as rig,
    ):
        archive_of(rig, file, variables())


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
