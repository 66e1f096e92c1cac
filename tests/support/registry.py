"""A real schema registry for tests: Apicurio's, which has Confluent's REST API, in memory and on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path

from flinkish_spark.core.store_spec import StoreSpec
from tests.support.buckets import BucketServer


class LocalRegistry(BucketServer):
    """A registry; what it knows goes with it.

    Parameters
    ----------
    programs
        Where Maven has unpacked it (`make registry`).
    """

    def __init__(self, programs: Path) -> None:
        super().__init__()
        self._programs = programs

    @staticmethod
    def why_not(programs: Path) -> str:
        """Return why it cannot be started here; empty if it can."""
        if not any(programs.glob("apicurio-registry-app-*-runner.jar")):
            return "Apicurio's registry is not there: `make registry`"
        return ""

    @property
    def url(self) -> str:
        """Where its API is that speaks like Confluent's."""
        return f"http://{self.host}:{self.port}/apis/ccompat/v7"

    def ask(self, path: str, body: object = None, method: str = "GET") -> object:
        """Ask it something as anybody may."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        request = urllib.request.Request(f"{self.url}/{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def register(self, subject: str, text: str, kind: str = "AVRO", references: object = ()) -> int:
        """Register a schema and return its number."""
        body = {"schema": text, "schemaType": kind, "references": list(references)}
        return self.ask(f"subjects/{subject}/versions", body, "POST")["id"]

    @contextlib.contextmanager
    def away(self):
        """Let it not answer for a while: connections are taken, and nothing comes."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _command(self) -> list[str]:
        (jar,) = self._programs.glob("apicurio-registry-app-*-runner.jar")
        flags = ["-Xmx400m", "-XX:TieredStopAtLevel=1", f"-Dquarkus.http.host={self.host}"]
        flags += [f"-Dquarkus.http.port={self.port}", "-Dquarkus.log.level=ERROR"]
        # With it deleted versions, and groups of artifacts, are as in Confluent's.
        flags += ["-Dregistry.ccompat.legacy-id-mode.enabled=false"]
        return ["java", *flags, "-cp", f"{jar}:{self._programs}/lib/*", "io.quarkus.runner.GeneratedMain"]

    def _make_bucket(self, name: str) -> None:
        self.ask("subjects")

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        raise NotImplementedError
