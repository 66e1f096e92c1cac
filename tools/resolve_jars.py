#!/usr/bin/env python3
"""Fetch the JARs of the pinned list with Maven.

    python tools/resolve_jars.py spark  DIRECTORY
    python tools/resolve_jars.py broker DIRECTORY [--kafka VERSION]
    python tools/resolve_jars.py broker-3.9 DIRECTORY
    python tools/resolve_jars.py s3a    DIRECTORY
    python tools/resolve_jars.py hdfs   DIRECTORY
    python tools/resolve_jars.py flink  DIRECTORY
    python tools/resolve_jars.py flink-cluster DIRECTORY

The JARs of all versions of Spark go into one directory; a session takes those of the Spark that runs.

Standard library only: it runs before anything is installed. JARs of an earlier list are removed from the
directory; those that stay are not touched, so a process that has them open keeps running.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "flinkish_spark" / "jars" / "pinned.txt"
MAVEN_REPOSITORY = ROOT / "build" / "m2"
COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
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


def pinned(role: str) -> dict[str, list[str]]:
    """Read the coordinates of one role by version of Spark; the package's own reader needs it installed."""
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


def pom(name: str, coordinates: list[str], excluded: list[str]) -> str:
    """Write the list as a Maven project."""
    named = [one.split(":") for one in excluded]
    each = [
        f"<exclusion><groupId>{group}</groupId><artifactId>{artifact}</artifactId></exclusion>"
        for group, artifact in named
    ]
    exclusions = f"<exclusions>{''.join(each)}</exclusions>"
    dependencies = []
    for coordinate in coordinates:
        group, artifact, version, *classifiers = map(escape, coordinate.split(":"))
        classified = "".join(f"<classifier>{one}</classifier>" for one in classifiers)
        dependencies.append(
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
            f"<version>{version}</version>{classified}{exclusions}</dependency>"
        )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        f"<groupId>io.github.flinkish-spark</groupId><artifactId>jars-{name}</artifactId><version>1</version>"
        f"<dependencies>{''.join(dependencies)}</dependencies></project>\n"
    )


def fetch(name: str, project: str, into: Path) -> None:
    """Run Maven; on failure print its own error lines and one line that says what to do, and exit."""
    maven = shutil.which("mvn")
    if maven is None:
        sys.exit("Maven is missing: install it (package `maven`) so that `mvn` is on the PATH")
    pom_file = ROOT / "build" / "pom" / f"{name}.xml"
    pom_file.parent.mkdir(parents=True, exist_ok=True)
    pom_file.write_text(project, encoding="utf-8")
    command = [maven, "-q", "-B", f"-Dmaven.repo.local={MAVEN_REPOSITORY}", "-f", str(pom_file)]
    command += [COPY_DEPENDENCIES, f"-DoutputDirectory={into}", "-DincludeScope=runtime"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        log = pom_file.with_suffix(".log")
        log.write_text(done.stdout, encoding="utf-8")
        errors = (line.partition("[ERROR] ")[2] for line in done.stdout.splitlines())
        reason = next((error for error in errors if error.strip()), "Maven gave no reason")
        print(reason[:300], file=sys.stderr)
        where = log.relative_to(ROOT)
        sys.exit(f"Maven could not fetch the {name} JARs: check the network (or Maven's proxy); see {where}")


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
    parser = argparse.ArgumentParser(description="Fetch the JARs of the pinned list with Maven.")
    parser.add_argument("role", choices=sorted(EXCLUDED))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kafka", help="another version than the pinned one for the broker")
    arguments = parser.parse_args()
    role, wanted = arguments.role, pinned(arguments.role)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="jars-") as scratch:
        fetched: set[str] = set()
        for minor, coordinates in wanted.items():
            name = f"{role}-{minor}".removesuffix("-" + NO_SPARK)
            if arguments.kafka:
                name, coordinates = f"{role}-{arguments.kafka}", of_kafka(coordinates, arguments.kafka)
            # One project has one version of each artifact, so each version of Spark is one of its own.
            if not fetched.issuperset(coordinates):
                fetch(name, pom(name, coordinates, EXCLUDED[role]), Path(scratch))
            fetched.update(coordinates)
        replace(arguments.directory.resolve(), Path(scratch))


if __name__ == "__main__":
    main()
