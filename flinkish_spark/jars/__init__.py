"""The JARs of this package: the shim it carries, and the pinned list of those that Maven serves."""

from pathlib import Path
from typing import Literal

from flinkish_spark.core.errors import EnvironmentFault

Role = Literal["spark", "broker"]

_HERE = Path(__file__).resolve().parent


class JarMissing(EnvironmentFault):
    """A JAR that Spark or the broker needs is not where it must be."""


def shim_jar() -> Path:
    """Return the JAR of this package's own JVM side.

    Returns
    -------
    Path
        Absolute path of the one ``flinkish-spark-shim-*.jar`` beside this module.

    Raises
    ------
    JarMissing
        If it was not built (a fresh checkout), or several versions lie side by side.
    """
    found = sorted(_HERE.glob("flinkish-spark-shim-*.jar"))
    if len(found) == 1:
        return found[0]
    raise JarMissing(
        "The JAR of flinkish_spark's JVM side is missing" if not found else "There is more than one shim JAR",
        why=f"{_HERE} holds {', '.join(jar.name for jar in found) or 'none'}",
        what_to_do="run `make shim` in a checkout, or install flinkish-spark from its wheel",
        directory=_HERE,
    )


def pinned(role: Role) -> list[str]:
    """Return the Maven coordinates of one role, in the order of the pinned list.

    Parameters
    ----------
    role
        ``"spark"`` for what Spark loads, ``"broker"`` for the Kafka broker of tests and the demo.

    Examples
    --------
    >>> [coordinate for coordinate in pinned("spark") if coordinate.startswith("io.delta")]
    ['io.delta:delta-spark_4.2_2.13:4.4.0', 'io.delta:delta-storage:4.4.0']
    """
    lines = (_HERE / "pinned.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [coordinate for its_role, coordinate in pairs if its_role == role]


def ivy_settings() -> Path:
    """Return the settings with which Spark's own resolver takes exactly the pinned JARs."""
    return _HERE / "ivysettings.xml"


def pinned_jars(directory: str | Path, *, group: str = "") -> list[Path]:
    """Return the Spark-side JARs of the pinned list out of a directory.

    Parameters
    ----------
    directory
        Where they were downloaded to, named ``<artifact>-<version>.jar``; `make jars` fills ``build/jars``.
    group
        Only those of this Maven group; empty for all.

    Raises
    ------
    JarMissing
        If one of them is not there. Another version of it does not count.
    """
    where = Path(directory).resolve()
    wanted = [coordinate for coordinate in pinned("spark") if group in ("", coordinate.split(":")[0])]
    names = ["{1}-{2}.jar".format(*coordinate.split(":")) for coordinate in wanted]
    missing = [name for name in names if not (where / name).is_file()]
    if missing:
        raise JarMissing(
            f"{len(missing)} of {len(names)} JARs that Spark needs are missing",
            why=f"{where} does not hold {', '.join(missing)}",
            what_to_do="run `make jars` in a checkout, or use configure_spark_with_packages",
            directory=where,
        )
    return [where / name for name in names]
