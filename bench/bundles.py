"""How many key groups to a bundle: CPU of a micro-batch, and bytes of state that are written again.

    python -m bench.bundles --keys 10000 1000000

Every key gets a state first. Then micro-batches touch 10,000 of them, drawn by chance; then half of them, or
half a million. It is Python's part alone, in one process, with the 128 key groups of `in_process`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from bench.checking import FIRST_MS
from bench.in_process import GROUPS, Job, rows_of_users
from tests.support.operator_harness import MemoryBases

_MOST_ROWS = 500_000


class CountedBases(MemoryBases):
    """Bases of which the newest of each bundle stays, and how many bytes of them were written."""

    def __init__(self):
        super().__init__()
        self.written_bytes, self._newest = 0, {}

    def write(self, group, frame):
        self.delete(self._newest.get(group, ""))
        ref = super().write(group, frame)
        self.written_bytes += len(frame)
        self._newest[group] = ref.file
        return ref


class CountedJob(Job):
    """A job whose state is in bundles of some key groups each."""

    def __init__(self, variant, key_groups):
        super().__init__(variant)
        self.bases, self._bundles, self._number = CountedBases(), GROUPS // key_groups, 0

    def micro_batch(self, users):
        """Return CPU seconds, and bytes of state written."""
        self._number += 1
        tasks = list(rows_of_users(self._number, users, self.work, self._bundles))
        values, before = dict(self.values), self.bases.written_bytes
        began = time.process_time()
        self.run(self.pack(tasks), FIRST_MS)
        took = time.process_time() - began
        changed = (value for group, value in self.values.items() if values.get(group) is not value)
        return took, sum(map(len, changed)) + self.bases.written_bytes - before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=["sum-fold"], metavar="variant")
    parser.add_argument("--key-groups", type=int, nargs="+", default=[1, 4, 16, 64], help="in a bundle")
    parser.add_argument("--keys", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--batches", type=int, default=12)
    args = parser.parse_args()
    for variant in args.variants:
        for keys in args.keys:
            for key_groups in args.key_groups:
                measure(variant, keys, key_groups, args.batches)


def measure(variant, keys, key_groups, batches):
    job, rng = CountedJob(variant, key_groups), np.random.default_rng(7)
    for begin in range(0, keys, _MOST_ROWS):
        job.micro_batch(np.arange(begin, min(begin + _MOST_ROWS, keys)))
    state_bytes = sum(map(len, job.values.values())) + sum(map(len, job.bases._frames.values()))
    print(
        f"{variant}, {keys:,} keys, bundles of {key_groups}: {state_bytes / 2**20:.1f} MiB of state", end=""
    )
    for touched in (10_000, min(keys // 2, _MOST_ROWS)):
        found = [job.micro_batch(rng.integers(0, keys, touched)) for _ in range(batches)]
        took_ms = statistics.median(took for took, _ in found) * 1000
        mean_bytes = statistics.fmean(written for _, written in found)
        print(f"; {touched:,} rows: {took_ms:.0f} ms, {mean_bytes / 2**20:.2f} MiB written", end="")
    print(flush=True)


if __name__ == "__main__":
    main()
