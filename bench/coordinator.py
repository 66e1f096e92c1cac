"""What the coordinator itself costs: trigger, acknowledge and complete with many participants.

`python -m bench.coordinator` prints one JSON line. The coordinator and all behind it are
real, the sinks answer at once, threads run inline. What Spark and the epoch writer do in between
(staging, the staged file, commits/N) is not in the figures. The target is a median under 20 ms
with 1,000 participants.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.ids import BatchId, CheckpointPurpose, Lineage
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from flinkish_spark.protocol.records import Committable, StagedBatch
from tests.support.coordinator_rig import MemoryStore, Rig, ack, by_hand

TARGET_MS = 20.0
WARM_UP = 5
PHASES = ("trigger", "acknowledge", "complete")


class Bench:
    """One job with many participants, whose checkpoints are taken one after the other."""

    def __init__(self, store: MemoryStore | LocalStore, sinks: int, operators: int) -> None:
        self.sinks = tuple(f"sink-{n}" for n in range(sinks))
        names = tuple(f"operator-{n}" for n in range(operators))
        self.rig = Rig(by_hand(), store=store, sinks=self.sinks, operators=names)  # type: ignore[arg-type]
        self.took_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.cpu_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def _measured(self, phase: str, work: Callable[[], None]) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        self.rig.coordinator.tick()
        self.rig.coordinator.tick()
        self.took_ms[phase].append((time.perf_counter() - began) * 1_000)
        self.cpu_ms[phase].append((time.process_time() - cpu_began) * 1_000)

    def round(self, number: int) -> None:
        rig, checkpoint = self.rig, number + 1
        self._measured("trigger", lambda: rig.ask(CheckpointPurpose.USER))
        assert rig.control.offered[-1] == checkpoint
        staged = StagedBatch(
            Lineage(0),
            BatchId(number),
            rig.ownership.epoch,
            number,
            tuple(ack(uid, checkpoint) for uid in self.sinks),
            tuple(Committable(uid, {"batch": number}) for uid in self.sinks),
            (rig.blocks.lease(),),
        )
        rig.job_dir.write_staged(staged)
        self._measured("acknowledge", lambda: rig.coordinator.on_staged(staged, 1))
        for log in (OFFSETS, COMMITS):
            rig.log.restore(log, BatchId(number), "v1\n{}\n-")
        self._measured("complete", lambda: None)
        assert rig.confirmed[-1] == checkpoint, rig.open
        for committer in rig.committers.values():
            committer.calls.clear()
        rig.observer.steps.clear()

    @staticmethod
    def totals(measured: dict[str, list[float]]) -> list[float]:
        """Return what each round took, without the first ones."""
        return [sum(phases) for phases in zip(*measured.values(), strict=True)][WARM_UP:]

    def phases(self) -> dict[str, float]:
        return {f"{p}_ms": round(statistics.median(ms[WARM_UP:]), 2) for p, ms in self.took_ms.items()}


def run(store: MemoryStore | LocalStore, args: argparse.Namespace) -> Bench:
    bench = Bench(store, args.sinks, args.operators)
    for number in range(WARM_UP + args.rounds):
        bench.round(number)
    return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sinks", type=int, default=500, help="each with a committable (500)")
    parser.add_argument("--operators", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    args = parser.parse_args()
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    in_memory = run(MemoryStore(), args)
    profile.disable()
    folder = tempfile.mkdtemp(prefix="coordinator-", dir=Path(__file__).resolve().parents[1] / "build")
    try:
        on_disk = run(LocalStore(Path(folder)), args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    totals = in_memory.totals(in_memory.took_ms)
    median_ms = statistics.median(totals)
    figures = {
        "participants": args.sinks + args.operators,
        "rounds": args.rounds,
        "median_ms": round(median_ms, 2),
        "p95_ms": round(statistics.quantiles(totals, n=20)[-1], 2),
        # On a machine that does other things, too, this one says more than the clock on the wall.
        "median_cpu_ms": round(statistics.median(in_memory.totals(in_memory.cpu_ms)), 2),
        **in_memory.phases(),
        "median_on_disk_ms": round(statistics.median(on_disk.totals(on_disk.took_ms)), 2),
        "target_ms": TARGET_MS,
        "is_met": median_ms < TARGET_MS,
    }
    print(json.dumps(figures))
    if args.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(40)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
