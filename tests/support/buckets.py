"""Servers that speak as the clouds' stores do, for tests: on loopback, in memory, ended with their owner."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.testing.broker import watch
from tests.support.local_server import HOST, ServerDidNotStart, _free_port
from tests.support.s3_server import SIGNED

ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60
#: Where tests find secrets; the names say whose.
SECRETS: Mapping[str, str] = MappingProxyType(
    {
        "FLINKISH_TEST_S3_SECRET": "not-so-secret",
        "FLINKISH_TEST_GOOGLE_SECRET": "nor-is-this",
        # The one that Azurite has for everybody; it is printed in Microsoft's documents.
        "FLINKISH_TEST_AZURE_SECRET": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq"
        "/K1SZFPTOtr/KBHBeksoGMGw==",
    }
)


class BucketServer(ABC):
    """A server of buckets; use it as a context.

    Parameters
    ----------
    host
        The address that it listens on: of this machine, or of a bridge to hosts on it.
    """

    def __init__(self, host: str = HOST) -> None:
        self.host, self.port = host, _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> list[str]:
        """Return how it is started."""

    @abstractmethod
    def _make_bucket(self, name: str) -> None:
        """Make a bucket; raise OSError if the server does not answer."""

    @abstractmethod
    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        """Return how a folder in a bucket is reached."""

    def new_store(self) -> StoreSpec:
        """Return a folder of its own in a new bucket; the variables with secrets are set in this process."""
        os.environ.update(SECRETS)
        bucket = f"test-{uuid.uuid4().hex[:12]}"
        self._make_bucket(bucket)
        return self._spec(bucket, "jobs/orders")

    def missing_bucket(self) -> StoreSpec:
        """Return a folder in a bucket that nobody has made."""
        os.environ.update(SECRETS)
        return self._spec("nobody-made-this", "jobs")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command(),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._watcher = watch(self._process.pid)
        try:
            self._await_answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _await_answer(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                self._make_bucket(f"first-{uuid.uuid4().hex[:12]}")
                return
            time.sleep(0.1)
        raise ServerDidNotStart(f"{self._command()[0]} did not answer on port {self.port}")

    def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._watcher is not None:
            self._watcher.communicate(b"over\n")
            self._watcher = None

    def _ask(self, path: str, headers: Mapping[str, str]) -> None:
        url = f"http://{self.host}:{self.port}/{path}"
        request = urllib.request.Request(url, method="PUT", headers={"Content-Length": "0", **headers})
        urllib.request.urlopen(request, timeout=10).close()


#: What S3A needs beside the options of the store, for tests: the modules of the SDK do not fit Spark's Netty,
#: and uploads of local files would go through it. Who has the SDK's bundle needs nothing.
S3A_CONF = {"spark.hadoop.fs.s3a.optimized.copy.from.local.enabled": "false"}


class LocalS3(BucketServer):
    """S3 by moto, one request at a time."""

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.s3_server", self.host, str(self.port)]

    def _make_bucket(self, name: str) -> None:
        self._ask(name, {"Authorization": SIGNED})

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        options = {
            "endpoint": f"http://{self.host}:{self.port}",
            "allow_http": "true",
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "env:FLINKISH_TEST_S3_SECRET",
        }
        return StoreSpec.parse(f"s3://{bucket}/{folder}", options)

    def put_raw(self, spec: StoreSpec, key: str, body: bytes = b"") -> None:
        """Write an object under a key that no store of ours would use."""
        bucket, _, folder = spec.url.removeprefix("s3://").partition("/")
        url = f"http://{self.host}:{self.port}/{bucket}/{folder}/{key}"
        request = urllib.request.Request(url, method="PUT", data=body, headers={"Authorization": SIGNED})
        urllib.request.urlopen(request, timeout=10).close()


class LocalGoogle(LocalS3):
    """Google Cloud's store as far as its XML interface goes: the same server, with other names for headers.

    No program that does more speaks it to obstore: see docs/buckets.md.
    """

    def _command(self) -> list[str]:
        return [*super()._command(), "google"]

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        options = {
            "base_url": f"http://{self.host}:{self.port}",
            "allow_http": "true",
            "bearer_token": "env:FLINKISH_TEST_GOOGLE_SECRET",
        }
        return StoreSpec.parse(f"gs://{bucket}/{folder}", options)


class LocalAzure(BucketServer):
    """Azure's blobs by Azurite.

    Parameters
    ----------
    packages
        Where npm has put it (`make azurite`).
    """

    _ACCOUNT = "devstoreaccount1"

    def __init__(self, packages: Path) -> None:
        super().__init__()
        self._packages = packages

    @staticmethod
    def why_not(packages: Path) -> str:
        """Return why it cannot be started here; empty if it can."""
        if shutil.which("node") is None:
            return "there is no node on this machine"
        if not (packages / "node_modules/azurite").is_dir():
            return f"Azurite is not in {packages}: `make azurite`"
        return ""

    def _command(self) -> list[str]:
        program = self._packages / "node_modules/azurite/dist/src/blob/main.js"
        options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        return ["node", str(program), *options, "--blobHost", HOST, "--blobPort", str(self.port)]

    def _make_bucket(self, name: str) -> None:
        date, version = email.utils.formatdate(usegmt=True), "2021-08-06"
        path = f"{self._ACCOUNT}/{name}"
        signed = f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{self._ACCOUNT}/{path}"
        key = base64.b64decode(SECRETS["FLINKISH_TEST_AZURE_SECRET"])
        digest = hmac.new(key, f"{signed}\nrestype:container".encode(), hashlib.sha256).digest()
        authorization = f"SharedKey {self._ACCOUNT}:{base64.b64encode(digest).decode()}"
        headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": authorization}
        self._ask(f"{path}?restype=container", headers)

    def _spec(self, bucket: str, folder: str) -> StoreSpec:
        options = {
            "endpoint": f"http://{self.host}:{self.port}/{self._ACCOUNT}",
            "allow_http": "true",
            "account_name": self._ACCOUNT,
            "account_key": "env:FLINKISH_TEST_AZURE_SECRET",
        }
        return StoreSpec.parse(f"az://{bucket}/{folder}", options)

    def for_spark(self, spec: StoreSpec) -> tuple[StoreSpec, Mapping[str, str]]:
        """Return a store as ABFS finds it, too, and what Hadoop has to know for that.

        Azurite speaks the protocol of blobs alone, without TLS (Hadoop's `abfs:`), and at an address of its
        own.
        """
        container, _, folder = spec.url.removeprefix("az://").partition("/")
        url = f"abfss://{container}@{self._ACCOUNT}.dfs.core.windows.net/{folder}"
        options = {name: text for name, text in spec.options if name != "account_name"}
        return StoreSpec.parse(url, options), {
            "fs.azure.always.use.https": "false",
            "fs.azure.abfs.endpoint": f"{HOST}:{self.port}",
            "fs.azure.account.hns.enabled": "false",
            "fs.azure.fns.account.service.type": "BLOB",
            "fs.azure.ingress.service.type": "BLOB",
            "fs.azure.networking.library": "JDK_HTTP_URL_CONNECTION",
            "fs.azure.ssl.channel.mode": "Default_JSSE",
            "fs.azure.account.auth.type": "SharedKey",
            "fs.azure.account.key": SECRETS["FLINKISH_TEST_AZURE_SECRET"],
        }
