"""What a worker has loaded is gone through once by its garbage collector, and what comes later as ever."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import gc, sys, weakref
from pyspark import TaskContext
from sparklog.spark.resting import rest_what_is_loaded

class Node:
    def __init__(self):
        self.itself = self

rest_what_is_loaded()
assert not gc.get_freeze_count(), "this is no task"
TaskContext._setTaskContext(TaskContext())
early, loaded = Node(), len(gc.get_objects())
seen = weakref.ref(early)
del early
rest_what_is_loaded()
assert seen() is None, "what was garbage is gone"
frozen = gc.get_freeze_count()
assert frozen > 0.9 * loaded and len(gc.get_objects()) < 0.1 * loaded
count, gc.get_freeze_count = gc.get_freeze_count, None  # it goes through all that rests
rest_what_is_loaded()
assert count() == frozen
late = Node()
seen = weakref.ref(late)
del late
gc.collect()
assert seen() is None, "what came later is collected"
"""


def test_what_is_loaded_rests_once_and_only_in_tasks() -> None:
    subprocess.run([sys.executable, "-c", _CODE], check=True, timeout=60)
