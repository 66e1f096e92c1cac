"""Loaded by every Python process that has this folder on its path; watches those below a swept driver."""

import os

# Python runs one file of this name only.

if "FLINKISH_SWEEP_TASKS" in os.environ:
    from tests.crash.sweep.tasks import install

    install(os.environ["FLINKISH_SWEEP_TASKS"])
