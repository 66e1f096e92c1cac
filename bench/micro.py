"""Parts of ours in one process, without Spark: each a piece of work that can be done again and again.

    python -m bench.micro                 one round of each, in CPU milliseconds
    python -m bench.micro --serve         a round for each name on the standard input

Another process asks for rounds, `bench.regressions`, which compares those of two revisions. What a
piece of work does is in `Piece.work`: pieces that do not do the same are not compared.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bench import coordinator, in_process
from bench.checking import FIRST_MS
from bench.groups import LATE_MS
from flinkish_spark.connectors.kafka.client.batch_decoder import batches, decode
from flinkish_spark.connectors.kafka.client.batches import encode_batches
from flinkish_spark.connectors.kafka.client.codecs import Codec
from flinkish_spark.core.elements import MIN_WATERMARK_MS, Progress
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.ids import BatchId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Committable, StagedBatch
from flinkish_spark.state.key_group import NO_BASE, GroupState
from flinkish_spark.transport.blocks import sort_blocks
from tests.support.coordinator_rig import MemoryStore, ack

_EVENTS, _KEYS, _MICRO_BATCHES = 12_000, 1_000, 3
_SINKS, _RECORDS = 100, 20_000


@dataclass(frozen=True)
class Piece:
    """A piece of work.

    Parameters
    ----------
    work
        What one round of it does, in words and sizes.
    prepare
        Makes what is done in a round, whose making does not count.
    """

    work: str
    prepare: Callable[[], Callable[[], object]]


def _keyed(variant: str) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        work = variant.partition("-")[0]
        tasks = [list(in_process.rows_of(n, _EVENTS, _KEYS, work)) for n in range(_MICRO_BATCHES)]

        def once() -> None:
            job = in_process.Job(variant)
            for number, rows in enumerate(tasks):
                watermark_ms = FIRST_MS + number * _EVENTS - LATE_MS if number else MIN_WATERMARK_MS
                job.run(job.pack(rows), watermark_ms)

        return once

    return prepare


def _coordinator() -> Callable[[], object]:
    rounds = Namespace(sinks=_SINKS, operators=_SINKS, rounds=7)
    return lambda: coordinator.run(MemoryStore(), rounds)


def _stored_forms() -> Callable[[], object]:
    job_dir = JobDir(MemoryStore())
    uids = [f"sink-{number}" for number in range(_SINKS)]
    staged = StagedBatch(
        Lineage(0),
        BatchId(0),
        OwnerEpoch(1),
        0,
        tuple(ack(uid, 1) for uid in uids),
        tuple(Committable(uid, {"batch": 0, "files": ["part-0", "part-1"]}) for uid in uids),
        (0,),
    )

    def once() -> None:
        for _ in range(80):
            job_dir.write_staged(staged)
            (attempt,) = job_dir.list_staged(Lineage(0))
            job_dir.delete_staged(Lineage(0), attempt)

    return once


def _state_value() -> Callable[[], object]:
    job = in_process.Job("sum-element")
    job.run(job.pack(list(in_process.rows_of(0, _EVENTS, _EVENTS, "sum"))), MIN_WATERMARK_MS)
    more = job.pack(list(in_process.rows_of(1, 500, _EVENTS, "sum")))

    def once() -> None:
        for group, value in job.values.items():
            state = GroupState(job.runner.layout, value, job.bases)
            rows = sort_blocks(more[group], job.schema) if group in more else None
            for _ in job.runner.process([rows], state, Progress(0, 0, 0)):
                pass
            state.dump(group, NO_BASE, 0)

    return once


def _encoding() -> Callable[[], list[bytes]]:
    numbers = np.random.default_rng(1).integers(0, 1_000_000, _RECORDS).tolist()
    keys = pa.array([f"user-{number}".encode() for number in numbers])
    values = pa.array([json.dumps({"user": number, "amount": number % 97}).encode() for number in numbers])

    def once() -> list[bytes]:
        made = encode_batches(
            keys,
            values,
            None,
            FIRST_MS,
            producer_id=7,
            producer_epoch=1,
            base_sequence=0,
            codec=Codec.NONE,
            max_batch_bytes=1_000_000,
        )
        return [one.data for one in made]

    return once


def _decoding() -> Callable[[], object]:
    data = b"".join(_encoding()())

    def once() -> None:
        raws = list(batches(data))
        assert sum(one.header.records for one in raws) == _RECORDS
        decode(*raws, with_headers=False)

    return once


def _several(times: int, work: Callable[[], object]) -> Callable[[], object]:
    def once() -> None:
        for _ in range(times):
            work()

    return once


_JOB = f"{_MICRO_BATCHES} micro-batches of {_EVENTS} events, {_KEYS} keys, {in_process.GROUPS} key groups"
PIECES = {
    **{variant: Piece(f"{variant}: {_JOB}", _keyed(variant)) for variant in in_process.VARIANTS},
    "coordinator": Piece(f"12 checkpoints of {_SINKS} sinks and {_SINKS} operators", _coordinator),
    "stored forms": Piece(f"80 staged files of {_SINKS} sinks written and read", _stored_forms),
    "state values": Piece(f"{_EVENTS} keys decoded, 500 touched, encoded", _state_value),
    "batch encode": Piece(f"60 times {_RECORDS} records", lambda: _several(60, _encoding())),
    "batch decode": Piece(
        f"20 times {_RECORDS} records",
        lambda: _several(20, _decoding()),
    ),
}


def cpu_ms(work: Callable[[], object]) -> float:
    """Return what a piece of work costs this process, in milliseconds of CPU."""
    gc.collect()
    began_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - began_ns) / 1e6


def serve() -> None:
    """Answer each name with a line of JSON: what a round of it has cost; the first with what there is."""
    print(json.dumps({name: piece.work for name, piece in PIECES.items()}), flush=True)
    made: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.rstrip("\n")
        if name not in made:
            made.clear()
            made[name] = PIECES[name].prepare()
            made[name]()
        print(json.dumps(cpu_ms(made[name])), flush=True)


def main() -> None:
    pa.set_cpu_count(1)
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    for name, piece in PIECES.items():
        work = piece.prepare()
        work()
        print(f"{name}: {cpu_ms(work):.0f} ms of CPU ({piece.work})", flush=True)


if __name__ == "__main__":
    main()
