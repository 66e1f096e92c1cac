"""The JARs of this package: the included shim, and the pinned list of JARs from Maven."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.protocol.versions import SparkMinor

Role = Literal["spark", "broker"]

_HERE = Path(__file__).resolve().parent
#: Delta Lake's Maven group.
_DELTA = "io.delta"
_WHY_NO_DELTA = (
    "Delta Lake has a JAR for each minor version of Spark, and for Spark {} none was served when this "
    "version of flinkish_spark was made"
)
_IVY_MODULE = (
    '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
    '<info organisation="flinkish-spark" module="jars"/>'
    '<configurations><conf name="default"/></configurations><dependencies>{}</dependencies></ivy-module>'
)
_GET_DELTA = (
    "start the session with flinkish_spark.configure_spark_with_packages(...), which downloads it, or with "
    "configure_spark_with_jars(...) after `flinkish jars DIR`"
)
#: Number of lines of the resolver's output in messages.
_MOST_LINES = 3


class JarMissing(EnvironmentFault):
    """A JAR that Spark or the broker needs is missing."""


def shim_jar() -> Path:
    found = sorted(_HERE.glob("flinkish-spark-shim-*.jar"))
    if len(found) == 1:
        return found[0]
    raise JarMissing(
        "The JAR of flinkish_spark's JVM side is missing" if not found else "There is more than one shim JAR",
        why=f"{_HERE} holds {', '.join(jar.name for jar in found) or 'none'}",
        what_to_do="run `make shim` in a checkout, or install the wheel that `make wheel` builds there",
        directory=_HERE,
    )


def _lines() -> list[tuple[str, list[str], str]]:
    """Return the lines of the pinned list: role, versions of Spark (none for a broker), Maven coordinate."""
    lines = (_HERE / "pinned.txt").read_text(encoding="utf-8").splitlines()
    parts = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [(role, minors.split(","), coordinate) for role, minors, coordinate in parts]


def spark_minors() -> list[str]:
    """Return the minor versions of Spark for which JARs are pinned, the oldest first."""
    found = {minor for role, minors, _ in _lines() if role == "spark" for minor in minors}
    return sorted(found, key=SparkMinor.of)


def running_minor() -> str:
    import pyspark

    return str(SparkMinor.of(pyspark.__version__))


def spark_home() -> Path:
    import pyspark

    return Path(os.environ.get("SPARK_HOME") or pyspark.__path__[0])


def find_pinned(role: Role, spark: str | None = None) -> list[str]:
    if role == "broker":
        return [coordinate for known, _, coordinate in _lines() if known == role]
    minor = running_minor() if spark is None else spark
    if minor not in spark_minors():
        raise JarMissing(
            f"no JARs are pinned for Spark {minor}",
            why=f"this version of flinkish_spark was tried with Spark {' and '.join(spark_minors())}",
            what_to_do="use one of these, or a version of flinkish_spark that supports yours",
            minor=minor,
        )
    return [coordinate for known, minors, coordinate in _lines() if known == role and minor in minors]


def has_pinned_delta(spark: str) -> bool:
    return spark in spark_minors() and any(map(is_delta, find_pinned("spark", spark)))


def is_delta(jar: str | Path) -> bool:
    return re.search(r"(^|[:/])delta-spark_[^/]*$", str(jar)) is not None


def log_settings() -> Path:
    return _HERE / "log4j2.properties"


def ivy_settings() -> Path:
    return _HERE / "ivysettings.xml"


def find_pinned_jars(directory: str | Path, *, group: str = "") -> list[Path]:
    """Return the pinned JARs for the running Spark from a directory."""
    # If no Delta Lake is pinned for that version, the newest one in the directory is used with its
    # ``delta-storage``; without one, sessions have no Delta.
    where = Path(directory).resolve()
    wanted = [coordinate for coordinate in find_pinned("spark") if group in ("", coordinate.split(":")[0])]
    names = ["{1}-{2}.jar".format(*coordinate.split(":")) for coordinate in wanted]
    if group in ("", _DELTA) and not has_pinned_delta(running_minor()):
        names += _find_unpinned_delta(where, running_minor(), must_be_there=group == _DELTA)
    missing = [name for name in names if not (where / name).is_file()]
    if missing:
        raise JarMissing(
            f"{len(missing)} of {len(names)} JARs that Spark needs are missing",
            why=f"{where} does not hold {', '.join(missing)}",
            what_to_do=f"run `flinkish jars {directory}`, or use configure_spark_with_packages",
            directory=where,
        )
    return [where / name for name in names]


def download(directory: str | Path) -> list[Path]:
    """Download the JARs for the running Spark into a directory, if missing, and return their paths."""
    try:
        return find_pinned_jars(directory)
    except JarMissing:
        pass
    where = Path(directory).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        # A temporary cache, so that only this directory stays on the machine.
        named = ""
        for group, artifact, version in (one.split(":") for one in find_pinned("spark")):
            named += f'<dependency org="{group}" name="{artifact}" rev="{version}" transitive="false" '
            named += 'conf="default->default"/>'
        retrieve(named, ivy_settings(), Path(scratch), where)
    return find_pinned_jars(directory)


def retrieve(dependencies: str, settings: Path, cache: Path, where: Path) -> None:
    """Download JARs into a directory with Spark's resolver for ``spark.jars.packages``."""
    # This needs neither a session nor Maven.
    cache.mkdir(parents=True, exist_ok=True)
    module = cache / "ivy.xml"
    module.write_text(_IVY_MODULE.format(dependencies), encoding="utf-8")
    options = {
        "-settings": settings,
        "-cache": cache,
        "-ivy": module,
        "-confs": "default",
        "-retrieve": f"{where}/[artifact]-[revision](-[classifier]).[ext]",
    }
    java = str(Path(os.environ["JAVA_HOME"], "bin", "java")) if os.environ.get("JAVA_HOME") else "java"
    command = [java, "-cp", f"{spark_home()}/jars/*", "org.apache.ivy.Main"]
    words = [str(word) for option in options.items() for word in option]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = [
            line.strip()
            for line in (done.stdout + done.stderr).splitlines()
            if "WARN" in line or "ERR" in line
        ]
        raise JarMissing(
            f"the JARs cannot be put into {where}",
            why=" / ".join(said[:_MOST_LINES]) or f"Spark's resolver ended with {done.returncode}",
            what_to_do="check the network (JAVA_TOOL_OPTIONS sets a proxy) and the permissions there",
            directory=where,
        )


def _find_unpinned_delta(where: Path, minor: str, *, must_be_there: bool) -> list[str]:
    """Return the names of Delta's JARs for a version of Spark without pinned ones."""
    begins = f"delta-spark_{minor}_2.13-"
    found = [jar.name for jar in where.glob(f"{begins}*.jar")]
    if not found:
        if must_be_there:
            raise JarMissing(
                f"there is no JAR of Delta Lake for Spark {minor}",
                why=f"{_WHY_NO_DELTA.format(minor)}, and {where} holds no {begins}*.jar",
                what_to_do=f"use Spark {_list_delta_minors()}; or put that JAR and its delta-storage there",
                directory=where,
            )
        return []
    newest = max(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return [newest, f"delta-storage-{newest.removeprefix(begins)}"]


def _list_delta_minors() -> str:
    return " or ".join(minor for minor in spark_minors() if has_pinned_delta(minor))


def how_to_get_delta(minor: str) -> tuple[str, str]:
    """Return the reason and advice for a session of this Spark version without Delta Lake."""
    if has_pinned_delta(minor):
        return "", _GET_DELTA
    return (
        _WHY_NO_DELTA.format(minor),
        f"use Spark {_list_delta_minors()}; or, once there is a JAR delta-spark_{minor}_2.13, put it and its "
        "delta-storage into the directory that configure_spark_with_jars(...) is given",
    )
