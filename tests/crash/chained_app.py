"""One of two chained jobs, as a process of its own that can be shot.

What goes wrong is said by the environment variables of `tests/crash/app.py`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flinkish_spark import CheckpointConfig, FixedDelay, StreamExecutionEnvironment
from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.protocol.input_gate import AlignmentMode
from tests.crash.app import FIND_DEAD_VARIABLE, find_dead_once
from tests.crash.light_session import light_session
from tests.support.chained_jobs import Chain
from tests.support.killing import observer_from

#: How the chained job aligns, by the name of an AlignmentMode; may change from start to start.
MODE_VARIABLE = "FLINKISH_ALIGNMENT"
_MODES = {
    "ALIGNED": UpstreamJob(),
    "UNALIGNED": UpstreamJob(AlignmentMode.UNALIGNED),
    "ALIGNED_WITH_TIMEOUT": UpstreamJob(AlignmentMode.ALIGNED_WITH_TIMEOUT, 300),
}


def chain_in(directory: Path, servers: str) -> Chain:
    """Return the chain of a directory, whose name begins those of its topics."""
    source, middle, out = (f"{directory.name}.{name}" for name in ("source", "middle", "out"))
    return Chain(servers, source, middle, out, directory / "upstream", directory / "chained")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("upstream", "chained"), required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--bootstrap-servers", required=True)
    args = parser.parse_args()
    chain = chain_in(args.directory, args.bootstrap_servers)
    if os.environ.get(FIND_DEAD_VARIABLE):
        find_dead_once()
    env = StreamExecutionEnvironment(
        light_session(args.role, args.directory / f"{args.role}-scratch"),
        job=args.role,
        job_dir=str(args.directory / args.role),
        # Every upstream checkpoint is one of the chained job, which must keep pace, and gets it in one
        # micro-batch if a checkpoint is on offer by then.
        checkpoint=CheckpointConfig(interval_ms=3_000 if args.role == "upstream" else 300, retained=100_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
    )
    if args.role == "upstream":
        chain.upstream(env)
    else:
        chain.chained(env, _MODES[os.environ.get(MODE_VARIABLE, "ALIGNED")], max_offsets_per_trigger=60)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
