"""Messages: what happened. Why. What to do. Each is a sentence, and each error gives advice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from flinkish_spark.core.errors import ConfigError, FencedError, InternalError, UserError
from tools import docs_site


@pytest.mark.parametrize(
    ("what", "why", "what_to_do", "message"),
    [
        ("it is 0", "a checkpoint takes time", "give 1", "it is 0. A checkpoint takes time. To do: give 1."),
        ("it is 0", "", "give 1.", "it is 0. To do: give 1."),
        ("it is 0.", "no. Not so.", "", "it is 0. No. Not so."),
        ("no option 'x'", "Did you mean 'y'?", "write y", "no option 'x'. Did you mean 'y'? To do: write y."),
        ("it failed", "ValueError: 7", "", "it failed. ValueError: 7."),
        ("it failed", "job.json is torn", "", "it failed. job.json is torn."),
        ("it failed", "max_rows is 0", "", "it failed. max_rows is 0."),
        ("it failed", "'a' is no number", "", "it failed. 'a' is no number."),
        ("it failed", "item: 5 is not valid", "", "it failed. item: 5 is not valid."),
        ("it failed", "then, at last, it ended", "", "it failed. Then, at last, it ended."),
    ],
)
def test_each_part_is_a_sentence(what: str, why: str, what_to_do: str, message: str) -> None:
    error = ConfigError(what, why=why, what_to_do=what_to_do)
    assert str(error) == message
    assert (error.what, error.why, error.what_to_do) == (what, why, what_to_do)


def test_a_class_has_advice_where_its_error_gives_none() -> None:
    assert str(InternalError("two")) == "two. To do: report it, with this message and the trace."
    assert FencedError("gone").what_to_do == "let this process end; the newer owner goes on with the job"
    assert FencedError("gone", what_to_do="wait").what_to_do == "wait"
    assert UserError("gone").what_to_do == ""


def test_every_error_that_is_made_says_what_to_do() -> None:
    inner = list(_calls_within_classes())
    # A class with a constructor of its own makes its message there.
    with_constructor = {name for _, name, call in inner if ast.unparse(call.func) == "super().__init__"}
    outer = [
        (file, name, call) for file, name, call, _ in docs_site.error_calls() if name not in with_constructor
    ]
    without = [
        f"{file.name}:{call.lineno} {name}"
        for file, name, call in [*outer, *inner]
        if not any(one.arg in ("what_to_do", None) for one in call.keywords)
        if not docs_site.usual_advice(name)
    ]
    assert without == []
    assert len(outer) > 850


def _calls_within_classes() -> Iterator[tuple[Path, str, ast.Call]]:
    classes = docs_site.error_classes()
    for file in sorted({file for _, _, _, file in classes.values()}):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in classes and node.name != "FlinkishError":
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in ("super().__init__", "cls"):
                        yield file, node.name, call
