"""Patterns by event time: micro-batches, restarts and rescalings come to one run of the matcher per key.

Rows come in disorder, on both sides of the watermark, to one or several subtasks; key groups move between
these, and into bases. The model is the matcher alone, given each key's rows in the order of their times.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flinkish_spark import OutputTag
from flinkish_spark.cep import AfterMatchSkip, Pattern, PatternProcessFunction, WithinType
from flinkish_spark.cep.columnar_runner import make_pattern_operator
from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.matcher import Matcher
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.state.key_group import BasePolicy
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import ElementType
from flinkish_spark.worker.keyed_operator import make_runner
from flinkish_spark.worker.runners import RowShape
from tests.support.effort import seeds
from tests.support.operator_harness import (
    ColumnsHarness,
    MemoryBases,
    Snapshot,
    input_shape,
    stable_hash,
    whole_records,
)

GROUPS, EVENT, OUTPUT = 8, "key STRING, id LONG, letter STRING", "key STRING, found STRING"
LATE, LOST = OutputTag("late", EVENT), OutputTag("lost", OUTPUT)
Row = tuple[str, int, str]


def is_(letter: str) -> Callable[[Any], bool]:
    return lambda event: event.letter == letter


def _first(skip: AfterMatchSkip | None = None) -> Pattern:
    return Pattern.begin("a", skip).where(is_("a"))


def _falls_not(event: Any, ctx: Any) -> bool:
    return all(event.id > before.id for before in ctx.events_for("b"))


PATTERNS = {
    "pair": _first().next("b").where(is_("b")).within(9),
    "loop": _first(AfterMatchSkip.past_last_event()).followed_by("b").where(is_("b")).where(_falls_not)
    .one_or_more().followed_by("c").where(is_("c")).within(20),
    "never": _first().not_followed_by("b").where(is_("b")).within(12),
    "any": _first(AfterMatchSkip.to_next()).followed_by_any("b").where(is_("b"))
    .within(7, WithinType.PREVIOUS_AND_CURRENT),
}  # fmt: skip


class Show(PatternProcessFunction):
    def process_match(self, match, ctx):
        yield ctx.get_current_key(), shown(match)

    def process_timed_out_match(self, match, ctx):
        ctx.output(LOST, (ctx.get_current_key(), shown(match)))


def shown(match: Any) -> str:
    return json.dumps({name: [event.id for event in events] for name, events in match.items()})


class Subtask(ColumnsHarness):
    """One subtask; it is given rows of its key groups."""

    def __init__(self, pattern: Pattern, bases: MemoryBases, restore: Snapshot | None = None) -> None:
        wanted = LookedFor("", compile_pattern(pattern), pattern.skip)
        operator = make_pattern_operator(
            PatternSearch((wanted,), Show(), late_output=LATE), ElementType(EVENT)
        )
        fields = parse_ddl(EVENT)
        travels = whole_records(fields, 0)
        outputs = tuple(map(parse_ddl, (OUTPUT, EVENT, OUTPUT)))
        shape = RowShape(
            (input_shape(travels, fields.names),), travels.key_types, outputs, ("late", "lost"), True
        )
        runner = make_runner(operator, "found", GROUPS, shape)
        # Small bases, so that waiting rows are in both layers.
        policy = BasePolicy(smallest_bytes=900, smallest_delta_rows=3)
        settings = {"max_parallelism": GROUPS, "restore": restore, "policy": policy, "bases": bases}
        super().__init__(runner, fields, 0, travels, None, ("late", "lost"), **settings)


class Model:
    """One key: the matcher, given its rows when the watermark has reached them."""

    def __init__(self, pattern: Pattern) -> None:
        self.matcher = Matcher(compile_pattern(pattern), pattern.skip)
        self.state, self.waiting = self.matcher.initial(), list[tuple[int, Any]]()
        self.matches: list[tuple[str, int]] = []
        self.lost: list[tuple[str, int]] = []

    def reach(self, watermark_ms: int) -> None:
        due = sorted((one for one in self.waiting if one[0] <= watermark_ms), key=lambda one: one[0])
        self.waiting = [one for one in self.waiting if one[0] > watermark_ms]
        for time_ms, event in due:
            self._advance(time_ms)
            found = self.matcher.process(self.state, event, time_ms)
            self.matches += [(shown(match), time_ms) for match in found]
        self._advance(watermark_ms)

    def _advance(self, time_ms: int) -> None:
        matches, lost = self.matcher.advance(self.state, time_ms)
        self.matches += [(shown(one.match), one.time_ms) for one in matches]
        self.lost += [(shown(one.match), one.time_ms) for one in lost]


def micro_batches(chance: random.Random) -> Iterator[tuple[list[Any], list[Any], int]]:
    """Yield rows before the watermark, rows behind it, and the watermark: rows a little out of order."""
    number, reached_ms = 0, 0
    for _ in range(chance.randint(4, 14)):
        sides: tuple[list[Any], list[Any]] = ([], [])
        for _ in range(chance.randint(0, 12)):
            row: Row = (chance.choice("xyz"), number, chance.choice("aabbcd"))
            sides[chance.random() < 0.7].append((row, max(reached_ms + chance.randint(-4, 12), 0)))
            number += 1
        reached_ms += chance.choice([0, 1, 3, 8])
        yield *sides, reached_ms
    yield [], [], MAX_WATERMARK_MS


@pytest.mark.parametrize("seed", seeds(25))
@pytest.mark.parametrize("name", list(PATTERNS))
def test_micro_batches_and_rescaling_change_nothing(name: str, seed: int) -> None:
    pattern, chance, bases = PATTERNS[name], random.Random(f"{name}{seed}"), MemoryBases()
    models: dict[str, Model] = defaultdict(lambda: Model(pattern))
    element = ElementType(EVENT).gathering()
    subtasks, watermark_ms = [Subtask(pattern, bases)], -(1 << 63)
    found: dict[str, list[Any]] = {"matches": [], "lost": [], "late": []}
    late = []
    for before, behind, reached_ms in micro_batches(chance):
        # A row before the watermark is late by that of the micro-batch before.
        for rows, limit_ms in ((before, watermark_ms), (behind, max(watermark_ms, reached_ms))):
            for row, time_ms in rows:
                if time_ms <= limit_ms:
                    late.append(row)
                else:
                    models[row[0]].waiting.append((time_ms, element(row)))
        watermark_ms = max(watermark_ms, reached_ms)
        for model in models.values():
            model.reach(watermark_ms)
        for at, subtask in enumerate(subtasks):
            own = [
                [one for one in rows if _subtask_of(one[0][0], len(subtasks)) == at]
                for rows in (behind, before)
            ]
            subtask.micro_batch(*own, watermark_ms=reached_ms)
            output = subtask.take()
            rows = zip(output.rows, output.times_ms, strict=True)
            found["matches"] += [(key, text, at_ms) for (key, text), at_ms in rows]
            for side in ("late", "lost"):
                found[side] += output.side.get(side, [])
        if chance.random() < 0.4:
            subtasks = rescaled(subtasks, chance.randint(1, 4), pattern, bases)
    for key, model in models.items():
        assert [(text, at_ms) for of, text, at_ms in found["matches"] if of == key] == model.matches
        assert [text for of, text in found["lost"] if of == key] == [text for text, _ in model.lost]
    assert sorted(found["late"]) == sorted(late)
    assert not any(subtask.entries("pattern/waiting") for subtask in subtasks)


def _subtask_of(key: str, count: int) -> int:
    return stable_hash(key) % GROUPS * count // GROUPS


def rescaled(subtasks: list[Subtask], count: int, pattern: Pattern, bases: MemoryBases) -> list[Subtask]:
    """Return other subtasks, with the state of those that are given up."""
    whole = Snapshot.together(subtask.snapshot() for subtask in subtasks)
    groups = [[group for group in range(GROUPS) if group * count // GROUPS == at] for at in range(count)]
    return [Subtask(pattern, bases, whole.part(own)) for own in groups]
