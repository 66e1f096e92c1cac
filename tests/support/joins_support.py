"""Joins of tests: steps as a job has them, and what is common to the models of joins."""

from __future__ import annotations

import random
from typing import Any

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_support import TINY

LEFT, RIGHT = "k STRING, n LONG", "k STRING, m LONG, o STRING"
#: A step: the number of an input with its elements (element, time), or a watermark, or a processing time.
Step = tuple[str | int, Any]
END: list[Step] = [("watermark", MAX_WATERMARK_MS)]


def element(source: int, key: str, number: int) -> tuple[Any, ...]:
    """Return an element of one of the two types above."""
    return (key, number) if source == 0 else (key, number, f"o{number}")


def script(seed: int, length: int) -> list[Step]:
    """Return steps with elements that are early, in time, at the watermark, late."""
    chance, steps, now_ms = random.Random(seed), [], 0
    numbers = iter(range(1_000))
    for _ in range(length):
        now_ms += chance.choice((0, 1, 2, 5))
        match chance.randrange(5):
            case 0:
                steps.append(("watermark", now_ms))
            case _:
                source = chance.randrange(2)
                count = chance.randrange(1, 4)
                elements = [
                    (
                        element(source, chance.choice("ab"), next(numbers)),
                        max(0, now_ms + chance.choice((-6, -1, 0, 0, 1, 3, 7))),
                    )
                    for _ in range(count)
                ]
                steps.append((source, elements))
    return steps


def harness(operator: Any, **given: Any) -> OperatorHarness:
    """Return a harness in which everything moves into bases at once."""
    settings = {"max_parallelism": 2, "policy": TINY} | given
    return OperatorHarness(operator, key=lambda e: e[0], key_type="STRING", **settings)


def apply(one: OperatorHarness, step: Step) -> None:
    what, argument = step
    if what == "watermark":
        one.watermark(argument)
    elif what == "time":
        one.processing_time(argument)
    else:
        one.push_all(argument, int(what))
