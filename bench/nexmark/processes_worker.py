"""Runs engines that are plain Python programs, a process per core for each request: Quix Streams and Bytewax.

Nothing of them stays warm, and nothing has to: there is no JVM. What they take to start lies in front of the
clock, which begins when each process has read its share of the first events.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from bench.nexmark.engines import CORES
from flinkish_spark.testing.broker import free_port

_PATIENCE_S = 900


def run(args, request):
    Path(request["folder"]).mkdir(parents=True, exist_ok=True)
    asked = {**request, "bootstrap_servers": args.bootstrap_servers, "source": args.source}
    asked |= {"processes": CORES, "addresses": [f"127.0.0.1:{free_port()}" for _ in range(CORES)]}
    children = [
        subprocess.Popen(
            [*args.command, json.dumps({**asked, "process": n})], stdout=subprocess.PIPE, text=True
        )
        for n in range(CORES)
    ]
    deadline, said = time.monotonic() + _PATIENCE_S, []
    for child in children:
        output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        if child.returncode:
            raise SystemExit(f"{args.command} ended with {child.returncode}; its last lines are above")
        said += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    firsts = [one["first"] for one in said if one["first"] is not None]
    # One process may have read more than its share before the other began.
    took_s = max(one["over"] for one in said) - sum(firsts) / len(firsts)
    return {
        "events_per_s": (request["events"] - request["batch"]) / took_s,
        "read": [one["read"] for one in said],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap-servers", "source"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("command", nargs="+", help="what starts a process")
    args = parser.parse_args()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(args, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
