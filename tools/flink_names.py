"""Flink's names beside ours: the table of docs/migrate/flink-datastream.md.

    python -m tools.flink_names --read SITE-PACKAGES/pyflink   read PyFlink's names into tools/pyflink.json
    python -m tools.flink_names --write                        write the table into its page

The names of PyFlink are data, with their version: nobody needs PyFlink to build or to test this.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES, INSTEAD = ROOT / "tools" / "pyflink.json", ROOT / "tools" / "flink_instead.json"
PAGE = ROOT / "docs" / "migrate" / "flink-datastream.md"
MARKS = "<!-- flink-names -->\n", "\n<!-- /flink-names -->"
#: Files of PyFlink that the API is in, by chapter of the table.
CHAPTERS = {
    "The environment": ("datastream/stream_execution_environment.py",),
    "Streams": ("datastream/data_stream.py", "datastream/async_data_stream.py"),
    "Functions": ("datastream/functions.py", "datastream/timerservice.py", "datastream/time_domain.py"),
    "State": ("datastream/state.py",),
    "Windows": ("datastream/window.py",),
    "Time": ("common/watermark_strategy.py", "datastream/output_tag.py"),
    "Checkpoints": (
        "datastream/checkpoint_config.py",
        "datastream/checkpointing_mode.py",
        "datastream/externalized_checkpoint_retention.py",
        "common/restart_strategy.py",
    ),
    "Running": ("common/job_client.py", "common/job_execution_result.py", "datastream/slot_sharing_group.py"),
    "Sources and sinks": (
        "datastream/connectors/base.py",
        "datastream/connectors/kafka.py",
        "datastream/connectors/file_system.py",
        "datastream/connectors/jdbc.py",
        "datastream/connectors/hybrid_source.py",
        "datastream/connectors/number_seq.py",
    ),
}
#: Classes that are PyFlink's own plumbing, or were replaced there, too.
_LEFT_OUT = re.compile(
    r"Internal|Wrapper|PassThrough|NullByte|Serializer$|Descriptor$(?<!StateDescriptor)|^StreamingFileSink"
    r"|^FlinkKafka|^Semantic|^Java|Preprocessing|Transformer|^Function$|^Output(?:Format|FileConfig)"
    r"|OperationDescriptor|^RuntimeWorld|^Min$|^ListCheckpointed|Provider$"
)
_BASES = {"Trigger", "WindowAssigner", "MergingWindowAssigner"}
_FACTORIES = {"of", "create", "with_gap", "with_dynamic_gap"}
#: Where names are looked for, in this order.
_FACES = (
    "flinkish_spark",
    "flinkish_spark.windows",
    "flinkish_spark.sources",
    "flinkish_spark.sinks",
    "flinkish_spark.functions",
    "flinkish_spark.functions.keyed",
    "flinkish_spark.state",
    "flinkish_spark.operators.context",
)


def read(package: Path) -> dict[str, Any]:
    """Return version, and by chapter the classes of PyFlink with their public methods."""
    version = re.search(r'__version__ = "([^"]+)"', (package / "version.py").read_text(encoding="utf-8"))
    assert version is not None
    chapters: dict[str, dict[str, list[str]]] = {}
    for chapter, files in CHAPTERS.items():
        classes = chapters.setdefault(chapter, {})
        for file in files:
            for node in ast.parse((package / file).read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not _LEFT_OUT.search(node.name) and node.name[0] != "_":
                    classes[node.name] = list(dict.fromkeys(_members(node)))
    return {"package": "apache-flink", "version": version[1], "chapters": chapters}


def _members(node: ast.ClassDef) -> Iterator[str]:
    # What each trigger and assigner does again belongs to their base classes.
    is_kind = node.name.endswith(("Trigger", "Windows", "WindowAssigner")) and node.name not in _BASES
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name[0] != "_" and "java" not in one.name:
            yield from [one.name] if not is_kind or one.name in _FACTORIES else []
        is_enum = any("Enum" in ast.unparse(base) for base in node.bases)
        if is_enum and isinstance(one, ast.Assign):
            yield ast.unparse(one.targets[0])


def names() -> dict[str, Any]:
    """Return the names of PyFlink that are kept here."""
    found: dict[str, Any] = json.loads(NAMES.read_text(encoding="utf-8"))
    return found


def ours(name: str) -> Any:
    """Return what has this name here: `Class` or `Class.member`; None if nothing has."""
    own, _, member = name.partition(".")
    for face in _FACES:
        found = getattr(importlib.import_module(face), own, None)
        if found is not None:
            return found if not member else _member(found, member)
    return None


def _member(owner: Any, name: str) -> Any:
    field = getattr(owner, "__dataclass_fields__", {}).get(name)
    return field if field is not None else getattr(owner, name, None)


def answer(owner: str, member: str = "") -> str:
    """Return where a name of Flink's is here; empty if nobody has said."""
    name, said = f"{owner}.{member}" if member else owner, instead()
    if name in said:
        return said[name]
    if ours(name) is not None:
        return "same"
    return said.get(f"{owner}.*", "") if member else ""


@cache
def instead() -> dict[str, str]:
    """Return what is said of names that are not the same here; `Class.*` is for the rest of its members.

    A backticked name that begins with a class of ours is looked up by a test.
    """
    found: dict[str, str] = json.loads(INSTEAD.read_text(encoding="utf-8"))
    return found


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield chapter, class, member (empty for the class itself) and where it is here."""
    for chapter, classes in names()["chapters"].items():
        for owner, members in classes.items():
            yield chapter, owner, "", answer(owner)
            for member in members:
                yield chapter, owner, member, answer(owner, member)


def table() -> str:
    """Return the tables of the page, a chapter each."""
    known = list(rows())
    same = sum(there == "same" for _, _, _, there in known)
    missing = sum(there.startswith("not there") for _, _, _, there in known)
    text = [
        f"{len(known)} names of `{names()['package']}` {names()['version']}: {same} are the same here, "
        f"{missing} are not there, the others have another name, or need none.",
    ]
    for chapter in names()["chapters"]:
        text += ["", f"### {chapter}", "", "| Flink | here |", "|---|---|"]
        for owner in names()["chapters"][chapter]:
            # Members with one answer share a row.
            answers: dict[str, list[str]] = {}
            for _, of, member, there in known:
                if of == owner and member:
                    answers.setdefault(there, []).append(f"`.{member}`")
            text.append(f"| **`{owner}`** | {answer(owner)} |")
            text += [f"| {', '.join(members)} | {there} |" for there, members in answers.items()]
    return "\n".join(text)


def write() -> None:
    """Put the table into its page, between its two marks."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    end = rest[rest.index(MARKS[1].strip()) :]
    PAGE.write_text(f"{before}{mark}{table()}\n{end}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Flink's names beside ours.")
    parser.add_argument("--read", type=Path, metavar="PYFLINK")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.read is not None:
        NAMES.write_text(json.dumps(read(given.read), indent=1) + "\n", encoding="utf-8")
    if given.write:
        write()
    for _, owner, member, there in rows():
        if not there:
            print(f"{owner}.{member}" if member else owner)


if __name__ == "__main__":
    main()
