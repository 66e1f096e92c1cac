"""Calls to a slow server: ours beside a bare asyncio client, and beside a Python UDF with a thread pool.

    make bench ARGS="--groups async"

A server answers each call after 50 ms. Everybody has the same number of connections and the same elements, in
files of which a micro-batch takes one. What is told is the server's view: calls by the time from the first to
the last one, so starts do not count, and pauses between micro-batches do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
from aiohttp import web

from flinkish_spark import AsyncDataStream, AsyncFunction, JobStatus, MemorySink
from flinkish_spark.sources import FileSource, JsonLines
from tests.support.jobs import environment

HOST, LATENCY_S = "127.0.0.1", 0.05
FIELDS, ANSWER = "id LONG", "id LONG, answer STRING"
VARIANTS = ("bare-asyncio", "ordered", "ordered-recorded", "udf-thread-pool")
AIMS = {"ordered": 0.9, "ordered-recorded": 0.9}


# ----------------------------------------------------------------------------------------------------------
# The server, in a process of its own, and what it has seen.


def serve(port: multiprocessing.Queue, seen: multiprocessing.Queue) -> None:
    times: list[float] = []
    running = [0, 0]

    async def answer(request: web.Request) -> web.Response:
        times.append(time.monotonic())
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(LATENCY_S)
        running[0] -= 1
        return web.Response(text=request.match_info["id"])

    async def report(request: web.Request) -> web.Response:
        # The first elements of a run open connections and start workers.
        seen.put((len(times), times[-1] - times[0] if times else 0.0, running[1]))
        times.clear()
        running[1] = 0
        return web.Response(text="")

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/report", report)
        app.router.add_get("/ask/{id}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0, backlog=4_096)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


# ----------------------------------------------------------------------------------------------------------
# Who calls it.


async def bare(port: int, ids: list[int], connections: int) -> None:
    """Call for each, as a client without Spark would: so many callers, one connection each."""
    rest = iter(ids)
    connector = aiohttp.TCPConnector(limit=connections)
    async with aiohttp.ClientSession(connector=connector) as client:

        async def caller() -> None:
            for one in rest:
                async with client.get(f"http://{HOST}:{port}/ask/{one}") as response:
                    await response.text()

        await asyncio.gather(*(caller() for _ in range(connections)))


class Asked(AsyncFunction):
    def __init__(self, port: int, connections: int) -> None:
        self.port, self.connections = port, connections

    async def open(self, context) -> None:
        connector = aiohttp.TCPConnector(limit=self.connections)
        self.client = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        await self.client.close()

    async def async_invoke(self, value):
        async with self.client.get(f"http://{HOST}:{self.port}/ask/{value.id}") as response:
            return [(value.id, await response.text())]


def ours(spark, port: int, folder: Path, connections: int, *, recorded: bool) -> None:
    env = environment(spark, folder / "job", trigger_interval_ms=100)
    ids = env.from_source(
        FileSource(str(folder / "in"), JsonLines(), FIELDS, max_files_per_batch=1), uid="ids"
    )
    asked = AsyncDataStream.ordered_wait(
        ids,
        Asked(port, connections),
        30_000,
        connections,
        output=ANSWER,
        uid="asked",
        record_answers=recorded,
    )
    asked.sink_to(MemorySink(f"{folder}/rows"), uid="rows")
    client = env.execute_async()
    assert client.wait(timeout_ms=900_000) and client.status is JobStatus.FINISHED, client.progress


def with_thread_pool(spark, port: int, folder: Path, connections: int) -> None:
    """Do it as people do without async functions: a pool of threads in a Python UDF, at least once."""

    def ask(frames):
        with ThreadPoolExecutor(connections) as pool:
            import http.client
            import threading

            own = threading.local()

            def one(number: int) -> str:
                if not hasattr(own, "client"):
                    own.client = http.client.HTTPConnection(HOST, port)
                own.client.request("GET", f"/ask/{number}")
                return own.client.getresponse().read().decode()

            for frame in frames:
                frame["answer"] = list(pool.map(one, frame["id"]))
                yield frame

    frame = spark.readStream.schema(FIELDS).option("maxFilesPerTrigger", 1).json(str(folder / "in"))
    # As many tasks as ours has: one.
    asked = frame.coalesce(1).mapInPandas(ask, ANSWER)
    query = (
        asked.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# ----------------------------------------------------------------------------------------------------------
# Rounds, one variant after the other.


def run(directory: Path, rounds: int, files: int, batch: int, connections: int) -> dict[str, list[float]]:
    """Return calls a second by variant and round."""
    from bench.big_state import session

    port_of, seen = multiprocessing.Queue(), multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(port_of, seen), daemon=True)
    server.start()
    port = port_of.get(timeout=30)
    spark = session(directory)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    try:
        for number in range(rounds):
            for name in VARIANTS:
                folder = directory / f"{number}-{name}"
                shutil.rmtree(folder, ignore_errors=True)
                (folder / "in").mkdir(parents=True)
                for at in range(files):
                    lines = (json.dumps({"id": at * batch + one}) for one in range(batch))
                    (folder / "in" / f"{at}.json").write_text("\n".join(lines) + "\n")
                if name == "bare-asyncio":
                    asyncio.run(bare(port, list(range(files * batch)), connections))
                elif name == "udf-thread-pool":
                    with_thread_pool(spark, port, folder, connections)
                else:
                    ours(spark, port, folder, connections, recorded=name.endswith("recorded"))
                asyncio.run(_report(port))
                calls, took_s, most = seen.get(timeout=30)
                assert calls == files * batch, f"{name}: {calls} calls for {files * batch} elements"
                rates[name].append(calls / took_s)
                load = os.getloadavg()[0]
                print(f"{name}: {calls / took_s:,.0f}/s, at most {most} at once, load {load:.1f}", flush=True)
    finally:
        server.kill()
        spark.stop()
    return rates


async def _report(port: int) -> None:
    async with aiohttp.ClientSession() as client, client.get(f"http://{HOST}:{port}/report") as response:
        await response.text()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=50)
    parser.add_argument("--directory", default="build/bench-async", type=Path)
    args = parser.parse_args(arguments)
    rates = run(args.directory.absolute(), args.rounds, args.files, args.batch, args.connections)
    bare_rate = statistics.median(rates["bare-asyncio"])
    print(f"\n{args.connections} connections, 50 ms a call, median of {args.rounds}:")
    for name, found in rates.items():
        share = statistics.median(found) / bare_rate
        aim = f", aim {AIMS[name]:.0%}" if name in AIMS else ""
        print(f"| {name} | {statistics.median(found):,.0f} | {share:.0%}{aim} |")


if __name__ == "__main__":
    main()
