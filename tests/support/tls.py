"""Throw-away certificates for tests of TLS: an authority of its own, a server's and a client's key.

Needs the command ``openssl`` (1.1.1 or newer); :meth:`LocalCertificates.java_truststore` also the
JDK's ``keytool``. Nothing here is fit for anything but tests: keys are not protected by a
password, and the certificates end after a week.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from flinkish_spark.core.errors import EnvironmentFault

_DAYS = "7"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
#: Where the child process finds a password; on its command line every user of the machine could.
_PASSWORD = "FLINKISH_STORE_PASSWORD"


class ToolFailed(EnvironmentFault):
    """The command openssl or keytool is missing, or did not do its work."""


@dataclass(frozen=True, slots=True)
class LocalCertificates:
    """PEM files in one directory; those that hold a private key have mode 0600.

    Attributes
    ----------
    authority
        The certificate of the authority that signed the others: what clients and broker trust.
    server
        The broker's private key and, behind it, its certificate.
    client
        A client's private key and, behind it, its certificate.

    Examples
    --------
    >>> import tempfile
    >>> directory = tempfile.TemporaryDirectory()
    >>> made = make_certificates(directory.name)
    >>> [path.name for path in (made.authority, made.server, made.client)]
    ['authority.pem', 'server.pem', 'client.pem']
    >>> directory.cleanup()
    """

    authority: Path
    server: Path
    client: Path

    def java_truststore(self, password: str) -> Path:
        """Write and return a JKS store that holds the authority's certificate; starts a JVM."""
        store = self.authority.with_name("truststore.jks")
        store.unlink(missing_ok=True)
        arguments = ["-importcert", "-noprompt", "-alias", "authority", "-file", str(self.authority)]
        arguments += ["-keystore", str(store), "-storetype", "JKS", "-storepass:env", _PASSWORD]
        _run("keytool", *arguments, secrets={_PASSWORD: password})
        return store

    def java_keystore(self, password: str) -> Path:
        """Write and return a PKCS12 store that holds the client's key and certificate."""
        store = self.client.with_name("client.p12")
        _private_file(store, b"")
        arguments = ["pkcs12", "-export", "-in", str(self.client), "-out", str(store)]
        _run("openssl", *arguments, "-passout", f"env:{_PASSWORD}", secrets={_PASSWORD: password})
        return store


def make_certificates(
    directory: str | Path, *, names: tuple[str, ...] = ("127.0.0.1", "localhost")
) -> LocalCertificates:
    """Make an authority, a server and a client certificate; about a tenth of a second.

    Parameters
    ----------
    directory
        Made if missing; files of an earlier call are replaced.
    names
        Host names and addresses that the server's certificate is good for.

    Raises
    ------
    ToolFailed
        If openssl is missing or fails.
    """
    place = Path(directory).resolve()
    place.mkdir(parents=True, exist_ok=True)
    (place / "openssl.cnf").write_text(_configuration(names), encoding="ascii")
    for owner in ("authority", "server", "client"):
        # openssl keeps the mode of a file that exists.
        _private_file(place / f"{owner}.key", b"")
    req = ["req", "-config", "openssl.cnf", *_KEY]
    _run(
        *["openssl", *req, "-x509", "-days", _DAYS, "-extensions", "authority"],
        *["-subj", "/CN=flinkish test authority", "-keyout", "authority.key", "-out", "authority.pem"],
        cwd=place,
    )
    for owner in ("server", "client"):
        keyed = ["-subj", f"/CN={owner}", "-keyout", f"{owner}.key", "-out", f"{owner}.csr"]
        _run("openssl", *req, *keyed, cwd=place)
        _run(
            *["openssl", "x509", "-req", "-in", f"{owner}.csr", "-out", f"{owner}.crt", "-days", _DAYS],
            *["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial"],
            *["-extfile", "openssl.cnf", "-extensions", owner],
            cwd=place,
        )
        pair = (place / f"{owner}.key").read_bytes() + (place / f"{owner}.crt").read_bytes()
        _private_file(place / f"{owner}.pem", pair)
    return LocalCertificates(place / "authority.pem", place / "server.pem", place / "client.pem")


def _configuration(names: tuple[str, ...]) -> str:
    hosts = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names)
    return "\n".join(
        [
            "[req]",
            "distinguished_name = subject",
            "[subject]",
            "[authority]",
            "basicConstraints = critical,CA:TRUE",
            "keyUsage = critical,keyCertSign,cRLSign",
            "subjectKeyIdentifier = hash",
            "[server]",
            f"subjectAltName = {hosts}",
            # A broker is also the client of its own listener.
            "extendedKeyUsage = serverAuth,clientAuth",
            "[client]",
            "extendedKeyUsage = clientAuth",
            "",
        ]
    )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _private_file(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _run(
    command: str, *arguments: str, cwd: Path | None = None, secrets: Mapping[str, str] = MappingProxyType({})
) -> None:
    if shutil.which(command) is None:
        raise ToolFailed(
            f"There is no {command} to make certificates with",
            what_to_do="install it (keytool comes with a JDK) and put it on the PATH",
        )
    done = subprocess.run(
        [command, *arguments],
        cwd=cwd,
        env={**os.environ, **secrets},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = " / ".join((done.stderr or done.stdout).split("\n")[-4:])
        raise ToolFailed(f"{command} {arguments[0]} failed with status {done.returncode}", why=said)
