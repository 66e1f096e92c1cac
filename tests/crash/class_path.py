"""JVMs that start fast: all JARs at the end of the class path, where the archive of classes still holds.

As `spark.jars` they would be copied at every start, and for every executor. The archive is the one of all
tests (`tests/support/archive_classes.py`): it is good for a longer class path than it was made with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from demo.rig import ROOT, S3A_JARS
from flinkish_spark.jars import find_pinned_jars, shim_jar

_CLASSES = ROOT / "build" / "classes.jsa"


def variables() -> Mapping[str, str]:
    """Return what the environment of a driver says of its JVM."""
    jars = [shim_jar(), *find_pinned_jars(ROOT / "build" / "jars"), *sorted(S3A_JARS.glob("*.jar"))]
    found = {"SPARK_DIST_CLASSPATH": os.pathsep.join(map(str, jars))}
    if _CLASSES.exists():
        found["SPARK_SUBMIT_OPTS"] = f"-XX:SharedArchiveFile={_CLASSES} -Xlog:cds=off -Xlog:cds+dynamic=off"
    return found
