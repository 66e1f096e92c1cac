"""Throw-away certificates for tests of TLS: an authority of its own, a server's and a client's key.

Nothing here is fit for anything but tests: keys are not protected by a password.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.hazmat.primitives.serialization.pkcs12 import (
    PKCS12Certificate,
    serialize_java_truststore,
    serialize_key_and_certificates,
)
from cryptography.x509 import load_pem_x509_certificate


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
        """Write and return a PKCS12 store that holds the authority's certificate, as Java trusts one."""
        store = self.authority.with_name("truststore.p12")
        trusted = PKCS12Certificate(load_pem_x509_certificate(self.authority.read_bytes()), b"authority")
        store.write_bytes(serialize_java_truststore([trusted], BestAvailableEncryption(password.encode())))
        return store

    def java_keystore(self, password: str) -> Path:
        """Write and return a PKCS12 store that holds the client's key and certificate."""
        store, pem = self.client.with_name("client.p12"), self.client.read_bytes()
        key, certificate = load_pem_private_key(pem, password=None), load_pem_x509_certificate(pem)
        encryption = BestAvailableEncryption(password.encode())
        _private_file(store, serialize_key_and_certificates(b"client", key, certificate, None, encryption))
        return store


def make_certificates(
    directory: str | Path, *, names: tuple[str, ...] = ("127.0.0.1", "localhost")
) -> LocalCertificates:
    """Make an authority, a server and a client certificate.

    Parameters
    ----------
    directory
        Made if missing; files of an earlier call are replaced.
    names
        Host names and addresses that the server's certificate is good for.
    """
    place = Path(directory).resolve()
    place.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(place / "authority.pem")
    server = authority.issue_cert(*names, common_name="server")
    client = authority.issue_cert("client.invalid", common_name="client")
    for owner, issued in (("server", server), ("client", client)):
        (certificate,) = issued.cert_chain_pems
        _private_file(place / f"{owner}.pem", _private_key(issued) + certificate.bytes())
    return LocalCertificates(place / "authority.pem", place / "server.pem", place / "client.pem")


def _private_key(issued: trustme.LeafCert) -> bytes:
    """Return the key in PKCS #8, which is the one form of PEM that Java reads."""
    key = load_pem_private_key(issued.private_key_pem.bytes(), password=None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _private_file(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
