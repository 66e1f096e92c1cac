"""A process with a warm Flink below it, from Java or from Python, that runs queries of Nexmark on request.

Flink's own part, `FlinkSql.java` or `pyflink_job.py`, only starts jobs. This process watches them through
the REST interface of the cluster: when the first events have been read, when all have, and what checkpoints
took. A job with a bounded input waits at its end for a checkpoint, and the next one is due by the interval;
as a job of this package takes its last checkpoint at once, one is asked for here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from bench.nexmark import flink_sql
from bench.nexmark.engines import CORES
from bench.nexmark.queries import WINDOW_MS
from flinkish_spark.testing.broker import free_port

_LOOK_S = 0.05


class Cluster:
    """The REST interface of a cluster that runs one job."""

    def __init__(self, port, job):
        self._base, self._job, self._names = f"http://localhost:{port}", job, {}

    def get(self, path):
        with urllib.request.urlopen(f"{self._base}/jobs/{self._job}{path}", timeout=5) as answer:
            return json.loads(answer.read())

    def post(self, path, body):
        request = urllib.request.Request(
            f"{self._base}/jobs/{self._job}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())

    def cancel(self):
        request = urllib.request.Request(f"{self._base}/jobs/{self._job}?mode=cancel", method="PATCH")
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(request, timeout=5).close()

    def read(self):
        """Return how many records the source has read."""
        total = 0
        for vertex in self.get("")["vertices"]:
            if not vertex["name"].startswith("Source"):
                continue
            place = f"/vertices/{vertex['id']}/subtasks/metrics"
            if not self._names.get(vertex["id"]):
                names = [one["id"] for one in self.get(place)]
                # The source itself is the first operator of its vertex; others may be chained to it.
                self._names[vertex["id"]] = [
                    one for one in names if one.startswith("Source") and one.endswith(".numRecordsIn")
                ]
            if self._names[vertex["id"]]:
                wanted = urllib.parse.quote(",".join(self._names[vertex["id"]][:1]))
                for one in self.get(f"{place}?get={wanted}&agg=sum"):
                    total += int(float(one["sum"]))
        return total


class Worker:
    def __init__(self, args):
        self.args = args
        self._child = subprocess.Popen(args.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def _line(self):
        for line in self._child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("Flink's process ended; its last lines are above")

    def run(self, request):
        args, port = self.args, free_port()
        folder = Path(request["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        settings = flink_sql.settings(request, CORES, port)
        done = sorted(folder.glob("*/chk-*/_metadata"), key=lambda one: one.stat().st_mtime)
        if done:
            settings["execution.state-recovery.path"] = f"file://{done[-1].parent}"
        made = flink_sql.statements(request, args.bootstrap_servers, args.source)
        asked = {"settings": settings, "statements": made, "source": args.source}
        asked |= {"bootstrap_servers": args.bootstrap_servers, **request}
        self._child.stdin.write(json.dumps(asked) + "\n")
        self._child.stdin.flush()
        cluster = Cluster(port, self._line()["job"])
        ended, how = threading.Event(), []
        threading.Thread(target=lambda: (how.append(self._line()), ended.set()), daemon=True).start()
        found = self._watched(cluster, request, ended)
        # One by the clock has no end, and was cancelled.
        if how[0]["ended"] != "finished" and request["query"] != "q12":
            raise SystemExit(f"the job has failed: {how[0]}")
        return found

    def _watched(self, cluster, request, ended):
        if not request["bounded"]:
            ended.wait()
            return {}
        first = read_s = None
        took, events = [], request["events"]
        while not ended.wait(_LOOK_S):
            # The cluster goes with its job.
            with contextlib.suppress(OSError, ValueError, KeyError):
                read = cluster.read() if read_s is None else events
                if first is None and read >= request["batch"]:
                    first = time.monotonic(), read
                if read >= events:
                    read_s = read_s or time.monotonic()
                    if request["query"] == "q12":
                        if (
                            time.monotonic()
                            > read_s + WINDOW_MS / 1_000 + request["checkpoint_ms"] / 1_000 + 2
                        ):
                            cluster.cancel()
                            ended.wait()
                            break
                    elif not cluster.get("/checkpoints")["counts"]["in_progress"]:
                        cluster.post("/checkpoints", {"checkpointType": "FULL"})
                history = cluster.get("/checkpoints")["history"]
                took = [one["end_to_end_duration"] for one in history if one["status"] == "COMPLETED"]
        begun_s, before = first
        over_s = read_s if request["query"] == "q12" else time.monotonic()
        return {"events_per_s": (events - before) / (over_s - begun_s), "checkpoint_ms": took}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap-servers", "source"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("command", nargs="+", help="what starts Flink's part")
    worker = Worker(parser.parse_args())
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
