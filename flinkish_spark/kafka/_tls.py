"""Kafka's TLS options as the `ssl` context of a Python client.

Rules of this file:

- What Java refuses is refused here as well, so that one set of options serves both.
- A private key is in no message, and never in a file that has a name.
"""

from __future__ import annotations

import re
import shlex
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from flinkish_spark.errors import ConfigError

_OPTIONS = frozenset(
    {
        "ssl.endpoint.identification.algorithm",
        "ssl.key.password",
        "ssl.keystore.certificate.chain",
        "ssl.keystore.key",
        "ssl.keystore.location",
        "ssl.keystore.password",
        "ssl.keystore.type",
        "ssl.truststore.certificates",
        "ssl.truststore.location",
        "ssl.truststore.password",
        "ssl.truststore.type",
    }
)
_PEM_BLOCK = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----([^-:]*)-----END \1-----")


def take_tls(left: dict[str, str]) -> dict[str, object]:
    """Move the TLS options out of `left` and translate them to a context, PEM only."""
    options = {name: left.pop(name) for name in _OPTIONS & left.keys()}
    if not options:
        return {}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # As in Java, whatever is in the truststore is trusted, also an intermediate authority alone.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Kafka's way to say "do not check the host name" is an empty string.
    context.check_hostname = options.get("ssl.endpoint.identification.algorithm", "https") != ""
    for store, inline in (("truststore", ("certificates",)), ("keystore", ("key", "certificate.chain"))):
        _check_store(store, [f"ssl.{store}.{name}" for name in inline], options)
    _load_trusted(context, options)
    _load_identity(context, options)
    return {"ssl_context": context}


def _check_store(store: str, inline: list[str], options: Mapping[str, str]) -> None:
    """Refuse what is no PEM, and what Java would refuse."""
    kind, location = options.get(f"ssl.{store}.type", "JKS"), options.get(f"ssl.{store}.location")
    given = [name for name in inline if name in options]
    if location is not None and kind.upper() != "PEM":
        raise _unusable(
            f"ssl.{store}.location",
            f"its type is {kind}, and Python reads PEM only",
            f"run `{_conversion(store, kind, location)}`{'' if store == 'truststore' else _GUARD}, then set "
            f"ssl.{store}.location to the new file, ssl.{store}.type to PEM, and no ssl.{store}.password",
        )
    if (given or location is not None) and kind != "PEM":
        raise _unusable(f"ssl.{store}.type", f"it is {kind}", "set it to PEM, in capitals")
    if given and location is not None:
        raise _unusable(given[0], f"ssl.{store}.location is given as well", "keep one of them")
    if given and given != inline:
        raise _unusable(given[0], "the other half is missing", f"give {' and '.join(inline)}")
    if f"ssl.{store}.password" in options:
        raise _unusable(
            f"ssl.{store}.password",
            f"a {store} in PEM has none",
            "remove it; a key of its own password needs ssl.key.password",
        )


_GUARD = ", guard the new file, whose key has no password"


def _conversion(store: str, kind: str, location: str) -> str:
    """Return the command line that makes PEM of a Java store; it asks for the passwords.

    The key is written in clear: Java 17 cannot read the encryption that openssl uses (PBES2).
    """
    source, pem, p12 = (shlex.quote(f"{location}{suffix}") for suffix in ("", ".pem", ".p12"))
    if store == "truststore":
        return f"keytool -list -rfc -keystore {source} > {pem}"
    if kind.upper() == "PKCS12":
        return f"openssl pkcs12 -in {source} -nodes -out {pem}"
    first = f"keytool -importkeystore -srckeystore {source} -destkeystore {p12} -deststoretype PKCS12"
    return f"{first} && openssl pkcs12 -in {p12} -nodes -out {pem}"


def _load_trusted(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    location, text = options.get("ssl.truststore.location"), options.get("ssl.truststore.certificates")
    try:
        if location is not None:
            context.load_verify_locations(cafile=location)
        elif text is not None:
            context.load_verify_locations(cadata=_pem(text))
        else:
            context.load_default_certs()
    except (OSError, ValueError) as unreadable:
        name = "ssl.truststore.certificates" if location is None else "ssl.truststore.location"
        raise _unusable(name, _reason(unreadable, location), "give certificates in PEM") from None


def _load_identity(context: ssl.SSLContext, options: Mapping[str, str]) -> None:
    location, key = options.get("ssl.keystore.location"), options.get("ssl.keystore.key")
    if location is None and key is None:
        return
    name = "ssl.keystore.key" if location is None else "ssl.keystore.location"
    # Without a password OpenSSL would ask for one at the terminal, and the driver would hang there.
    password = options.get("ssl.key.password", "")
    try:
        if location is not None:
            context.load_cert_chain(location, password=password)
        else:
            chain = options["ssl.keystore.certificate.chain"]
            with _nameless_file(_pem(chain)) as chain_path, _nameless_file(_pem(key or "")) as key_path:
                context.load_cert_chain(chain_path, key_path, password=password)
    except (OSError, ValueError) as unreadable:
        raise _unusable(
            name,
            _reason(unreadable, location),
            "give a private key, its certificate behind it, in PEM, and the key's password, if it has one, "
            "as ssl.key.password",
        ) from None


def _pem(text: str) -> str:
    """Return the PEM blocks of `text` with their line breaks, which properties files lose."""
    blocks = [(kind, "".join(body.split())) for kind, body in _PEM_BLOCK.findall(text)]
    if not blocks:
        raise ValueError("it holds no PEM block")
    return "".join(
        "\n".join([f"-----BEGIN {kind}-----", *re.findall(".{1,64}", body), f"-----END {kind}-----", ""])
        for kind, body in blocks
    )


@contextmanager
def _nameless_file(text: str) -> Iterator[str]:
    """Yield a path to read `text` from: OpenSSL takes keys from files only.

    The file has no name, so only this process can open it and a kill leaves nothing behind.
    """
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        file.seek(0)
        yield f"/dev/fd/{file.fileno()}"


def _reason(error: OSError | ValueError, location: str | None) -> str:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    return f"{location}: {text}" if location is not None else text


def _unusable(option: str, why: str, what_to_do: str) -> ConfigError:
    return ConfigError(
        f"Kafka option {option!r} cannot be used", why=why, what_to_do=what_to_do, option=option
    )
