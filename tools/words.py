"""Count the names and docstrings that break the rules of the house on words; the count may only fall.

    python -m tools.words             print the counts, and fail if one is above its limit
    python -m tools.words --list      print each place, by file
    python -m tools.words --list FOLDER

A function is a verb: its name does not begin with a participle or a preposition. A class is a noun: its
name does not begin with a preposition, nor end with a participle or an adverb. A docstring does not begin
with What, Whether or Of. Properties and fields may be adjectives, so they may be participles (`closed`).
Names that PyFlink gave are its own; dunder names are Python's.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "flinkish_spark"
#: The most of each kind there may be; lower it with each rename.
LIMITS: Final = {"participle": 0, "preposition": 0, "class": 0, "docstring": 0}
_IRREGULAR = frozenset(
    """
    begun bent born borne bought broken brought built came caught chosen come dealt done drawn
    driven drunk dug eaten fallen fed felt flown forgotten found frozen given gone got gotten grown
    heard held hidden hung kept known laid led left lent lost made meant met paid ridden risen rung
    said seen sent shaken shown shrunk slept sold sought spent spoken spread spun stolen stood
    struck stuck sung sunk swept sworn swung taken taught thought thrown told torn understood wept
    woken won worn wound written
    """.split()  # noqa: SIM905 - many words in few lines
)
#: Words that end like a participle and are none, and verbs and nouns whose form is the same.
_NO_PARTICIPLE = frozenset(
    """
    bed embed exceed feed heed hundred id need proceed red seed shed speed succeed reseed
    """.split()  # noqa: SIM905 - many words in few lines
)
_PREPOSITIONS = frozenset(
    """
    about above across after against along amid among around at before behind below beside besides
    between beyond by despite down except for in into like of off onto out over past per since than
    through till toward towards under unlike until up upon via with within without
    """.split()  # noqa: SIM905 - many words in few lines
)
_ADVERBS = frozenset(
    """
    again ahead alone already also apart away back below beside beyond both even ever here later
    never now once only over so sooner still then there thus together too twice unlike
    """.split()  # noqa: SIM905 - many words in few lines
)
#: Names of Flink's Java API that PyFlink lacks, of Spark's, and one of ours that goes with them.
_OTHERS = frozenset(
    """
    AfterMatchSkip SupportsTriggerAvailableNow WithinType followed_by followed_by_any for_generator
    in_event_time in_processing_time left_timestamp ordered_wait_batch past_last_event until
    with_operator within
    """.split()  # noqa: SIM905 - many words in few lines
)


class Place(NamedTuple):
    """One name or docstring that breaks a rule."""

    kind: str
    path: str
    line: int
    name: str


def _is_participle(word: str) -> bool:
    if word in _NO_PARTICIPLE:
        return False
    return word in _IRREGULAR or (len(word) > 3 and word.endswith("ed"))


def _foreign_names() -> frozenset[str]:
    """Return the names that PyFlink, Flink and Spark gave."""
    chapters = json.loads((ROOT / "tools" / "pyflink.json").read_text(encoding="utf-8"))["chapters"]
    found: set[str] = set()
    for classes in chapters.values():
        for name, methods in classes.items():
            found |= {name, *methods}
    return _OTHERS | found


def _breaks_as_function(name: str) -> str | None:
    first = name.strip("_").split("_")[0].lower()
    if _is_participle(first):
        return "participle"
    return "preposition" if first in _PREPOSITIONS else None


def _breaks_as_class(name: str) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z][a-z0-9]*|[a-z0-9]+", name)]
    if not words:
        return False
    return words[0] in _PREPOSITIONS or _is_participle(words[-1]) or words[-1] in _ADVERBS


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = node.decorator_list
    names = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in marks}
    return bool(names & {"property", "cached_property", "setter"})


def places(folder: Path) -> Iterator[Place]:
    """Yield all that breaks a rule in the files below a folder."""
    foreign = _foreign_names()
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            line = getattr(node, "lineno", 1)
            text = ast.get_docstring(node) or ""
            if text.split(maxsplit=1)[:1] in (["What"], ["Whether"], ["Of"]):
                yield Place("docstring", name, line, text.splitlines()[0])
            if isinstance(node, ast.Module) or node.name in foreign or node.name.startswith("__"):
                continue
            if isinstance(node, ast.ClassDef):
                if _breaks_as_class(node.name):
                    yield Place("class", name, line, node.name)
            elif not _is_property(node) and (kind := _breaks_as_function(node.name)):
                yield Place(kind, name, line, node.name)


def main(arguments: list[str]) -> int:
    """Print the counts or the places; 1 if a count is above its limit."""
    listing = arguments[:1] == ["--list"]
    found = list(places(ROOT / (arguments[1] if listing and arguments[1:] else PACKAGE)))
    if listing:
        print("\n".join(f"{one.path}:{one.line}: {one.kind}: {one.name}" for one in found))
        return 0
    counts = Counter(one.kind for one in found)
    print(", ".join(f"{kind} {counts[kind]} (at most {most})" for kind, most in LIMITS.items()))
    return int(any(counts[kind] > most for kind, most in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
