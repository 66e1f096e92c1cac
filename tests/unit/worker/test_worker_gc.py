"""Modules are frozen once in a process, and what comes later is collected as before."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, weakref
from flinkish_spark.worker.daemon import freeze_modules

class Node: pass

freeze_modules()
frozen = gc.get_freeze_count()
node = Node(); node.itself = node
gone = weakref.ref(node)
del node
freeze_modules()
gc.collect()
print(frozen > 0, gc.get_freeze_count() <= frozen, gone() is None)
"""


def test_modules_are_frozen_once_and_later_garbage_is_collected() -> None:
    answer = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    assert answer.stdout.split() == ["True", "True", "True"]
