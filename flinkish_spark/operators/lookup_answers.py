"""What lookup joins keep of their answers in the memory of a process.

PySpark unpickles a function anew for each task, so what an object holds ends with its micro-batch. A Python
worker goes on, and so does what its modules hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

#: The rows of a key, and when they were read; keys that were used last are last.
KeptAnswers = OrderedDict[Any, tuple[Sequence[Any], int]]

#: By the join. A worker may live longer than jobs, so those of which nobody has asked for longest go.
_OF_JOINS: OrderedDict[str, KeptAnswers] = OrderedDict()
_MOST_JOINS = 64


def kept_answers(join: str) -> KeptAnswers:
    """Return what this process keeps for a join.

    Parameters
    ----------
    join
        A name that no other join has, in no job.
    """
    kept = _OF_JOINS.setdefault(join, OrderedDict())
    _OF_JOINS.move_to_end(join)
    while len(_OF_JOINS) > _MOST_JOINS:
        _OF_JOINS.popitem(last=False)
    return kept


def forget_answers() -> None:
    """Forget what is kept for all joins, as a worker that ends does."""
    _OF_JOINS.clear()
