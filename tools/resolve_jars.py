#!/usr/bin/env python3
"""Fetch the JARs of the pinned list with the resolver that is in Spark: a JDK and pip are all it needs.

    python tools/resolve_jars.py spark  DIRECTORY
    python tools/resolve_jars.py broker DIRECTORY [--kafka VERSION]
    python tools/resolve_jars.py broker-3.9 DIRECTORY
    python tools/resolve_jars.py s3a    DIRECTORY
    python tools/resolve_jars.py hdfs   DIRECTORY
    python tools/resolve_jars.py flink  DIRECTORY
    python tools/resolve_jars.py flink-cluster DIRECTORY

The JARs of all versions of Spark go into one directory; a session takes those of the Spark that runs.
JARs of an earlier list are removed from the directory; those that stay are not touched, so a process that
has them open keeps running.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import quoteattr

from flinkish_spark.jars import JarMissing, retrieve

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "flinkish_spark" / "jars" / "pinned.txt"
#: What was downloaded once.
CACHE = ROOT / "build" / "ivy-cache"
#: What stands in the place of Spark's versions in lines that are of none.
NO_SPARK = "-"
#: What a role's JARs ask for and do not get: of Spark's own libraries a second copy would break it.
EXCLUDED = {
    "spark": ["*:*"],
    "broker": [],
    "broker-3.9": [],
    "hdfs": [],
    "flink": ["*:*"],
    "flink-cluster": [],
    # The whole SDK in one JAR has 686 MB; the modules that S3A uses stand in the list.
    "s3a": [
        "software.amazon.awssdk:bundle",
        "io.netty:*",
        "org.slf4j:*",
        "commons-codec:*",
        "commons-logging:*",
    ],
}
#: Names a mirror to Spark, for `spark.jars.packages`; so it does here.
MIRROR = "DEFAULT_ARTIFACT_REPOSITORY"


def pinned(role: str) -> dict[str, list[str]]:
    """Read the coordinates of one role by version of Spark."""
    found: dict[str, list[str]] = {}
    for line in PINNED.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            its_role, minors, coordinate = line.split()
            for minor in minors.split(",") if its_role == role else ():
                found.setdefault(minor, []).append(coordinate)
    return found


def of_kafka(coordinates: list[str], version: str) -> list[str]:
    """Return a broker's coordinates with another version of Kafka."""
    return [
        f"{one.rpartition(':')[0]}:{version}" if one.startswith("org.apache.kafka:") else one
        for one in coordinates
    ]


def dependencies(coordinates: list[str], excluded: list[str]) -> str:
    """Write the list in Ivy's language, in which JARs that differ by their classifier are one dependency."""
    classifiers: dict[tuple[str, ...], list[str]] = {}
    for coordinate in coordinates:
        group, artifact, version, *classified = coordinate.split(":")
        classifiers.setdefault((group, artifact, version), []).append("".join(classified))
    is_bare = excluded == ["*:*"]
    words = []
    for (group, artifact, version), named in classifiers.items():
        artifacts = "".join(
            f'<artifact name="{artifact}" type="jar"' + (f' m:classifier="{one}"/>' if one else "/>")
            for one in (named if any(named) else [])
        )
        words.append(
            f'<dependency org="{group}" name="{artifact}" rev="{version}" conf="default->default" '
            f'transitive="{str(not is_bare).lower()}">{artifacts}</dependency>'
        )
    for one in [] if is_bare else excluded:
        group, _, artifact = one.partition(":")
        words.append(f'<exclude org="{group}" module="{artifact}"/>')
    return "".join(words)


def settings() -> str:
    """Return Ivy's: everything from one repository, with what it asks for."""
    mirror = os.environ.get(MIRROR)
    root = f" root={quoteattr(mirror)}" if mirror else ""
    return (
        '<ivysettings><settings defaultResolver="public"/><resolvers>'
        f'<ibiblio name="public" m2compatible="true"{root}/></resolvers></ivysettings>'
    )


def replace(old: Path, new: Path) -> None:
    """Make `old` hold the JARs of `new`, touching only what differs."""
    old.mkdir(parents=True, exist_ok=True)
    wanted = {jar.name: jar for jar in new.glob("*.jar")}
    for jar in old.glob("*.jar"):
        if jar.name not in wanted:
            jar.unlink()
    for name, jar in wanted.items():
        target = old / name
        if not target.exists() or target.stat().st_size != jar.stat().st_size:
            os.replace(jar, target)


def main() -> None:
    """Fetch one role into one directory."""
    parser = argparse.ArgumentParser(description="Fetch the JARs of the pinned list.")
    parser.add_argument("role", choices=sorted(EXCLUDED))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kafka", help="another version than the pinned one for the broker")
    arguments = parser.parse_args()
    role = arguments.role
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="jars-") as scratch:
        told, into = Path(scratch, "ivysettings.xml"), Path(scratch, "jars")
        told.write_text(settings(), encoding="utf-8")
        fetched: set[str] = set()
        for coordinates in pinned(role).values():
            if arguments.kafka:
                coordinates = of_kafka(coordinates, arguments.kafka)
            # A module of Ivy's has one version of each artifact: each version of Spark is one of its own.
            if not fetched.issuperset(coordinates):
                try:
                    retrieve(dependencies(coordinates, EXCLUDED[role]), told, CACHE, into)
                except JarMissing as missing:
                    sys.exit(f"the {role} JARs could not be fetched: {missing}")
            fetched.update(coordinates)
        replace(arguments.directory.resolve(), into)


if __name__ == "__main__":
    main()
