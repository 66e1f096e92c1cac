"""A client of schema registries: schemas by id and by subject, and the wire format of records.

Failures mean different things: without an answer the client asks again, and then reports an outage, after
which a job restarts; a refusal is an error that the user must correct; an id that stays unknown means that
the record is bad. A proxy or a login page before the registry also answers, with 404 or even 200, so only
answers in the form of the registry's interface count.

Confluent's own client sends the requests. Answers are data: nothing in them is executed or fetched.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from flinkish_spark.core.clock import backoff_ms
from flinkish_spark.core.errors import (
    AuthorizationError,
    ConfigError,
    EnvironmentFault,
    SchemaError,
    UnavailableError,
    raise_translated,
)
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.fields import Range, check_fields
from flinkish_spark.core.secrets import secret_of
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.durations import Milliseconds, PathText

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema, Schema, SchemaRegistryClient

#: The first byte of each record in the wire format; four bytes with the schema id follow.
MAGIC = 0
HEADER_BYTES = 5
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 5_000
#: How long the client asks again for an unknown id: a replica may lag behind.
_UNKNOWN_MS = 2_000
#: How long an unknown id is cached. If its schema is registered late, or restored, records are bad for at
#: most this long; an id that stays unknown costs one request per minute.
_FORGOTTEN_MS = 60_000
#: Error codes of a registry's 404 for a missing subject, version and schema: the same in Confluent's,
#: Karapace and Apicurio. Any other 404 comes from a proxy, or from a URL with a wrong path.
_NO_SUCH = (40401, 40402, 40403)
#: Statuses of an outage or of a redirect to a login page; all others are answers.
_AWAY = frozenset({301, 302, 303, 307, 308, 404, 408, 425, 429, 500, 502, 503, 504})
_DEEPEST = 32
T = TypeVar("T")


class SubjectNameStrategy(Choice):
    """Name of a schema's subject in a registry; the strategies are Confluent's."""

    #: ``<topic>-key`` or ``<topic>-value``.
    TOPIC_NAME = "topic_name"
    #: The full name of the record, whatever the topic.
    RECORD_NAME = "record_name"
    #: ``<topic>-<full name of the record>``.
    TOPIC_RECORD_NAME = "topic_record_name"


class Registration(Choice):
    """How a sink's schema gets into a registry."""

    #: Registered before the job starts; the registry refuses one that is not compatible.
    AUTOMATIC = "automatic"
    #: It must be registered already, under the subject; a job that writes another one is refused.
    REQUIRED = "required"


@dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry that speaks the REST API of Confluent's.

    Asked by the driver before a job starts, and by tasks for schemas that they have not seen yet; an answer
    about a number is kept for the life of a process. Needs the extra ``schema-registry``.

    Parameters
    ----------
    url
        ``"https://registry:8081"``; several with commas between them.
    username, password
        For basic authentication. Both or none; neither stands in `url`. The password, and the token, may be
        ``env:NAME`` or ``file:/path`` of the driver.
    token
        In place of these: a bearer token.
    ca_location, certificate_location, key_location
        Files in PEM for TLS, on every machine that asks: who signs the registry's certificate, and the
        client's own.
    timeout_ms
        How long one answer is waited for.
    retry_ms
        For how long an answer that does not come is asked for again. Then the registry counts as away: the
        job restarts, and no record is called bad.
    strategy
        Under which name schemas stand.
    subject
        The name itself, in place of a strategy.
    registration
        How a sink's schema gets there.

    Examples
    --------
    >>> SchemaRegistry("http://registry:8081", username="job", password="secret")
    SchemaRegistry(url='http://registry:8081')
    """

    url: str
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    ca_location: PathText = ""
    certificate_location: PathText = ""
    key_location: PathText = ""
    timeout_ms: Annotated[Milliseconds, Range(1)] = 10_000
    retry_ms: Annotated[Milliseconds, Range(1)] = 30_000
    strategy: SubjectNameStrategy = SubjectNameStrategy.TOPIC_NAME
    subject: str = ""
    registration: Registration = Registration.AUTOMATIC

    def __repr__(self) -> str:
        return f"SchemaRegistry(url={self.url!r})"

    def __getstate__(self) -> dict[str, object]:
        # A task gets the secrets themselves: their places are the driver's.
        return {**self.__dict__, **{name: self.secret(name) for name in ("password", "token")}}

    def secret(self, name: str) -> str:
        """Return a secret, read from where it is."""
        return secret_of(getattr(self, name), f"{name} of the schema registry").read()

    def __post_init__(self) -> None:
        check_fields(self)
        urls = self.url.split(",")
        if not all(re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", one.strip()) for one in urls):
            # It is not shown, since it may contain a password.
            what = "the URL of the schema registry does not begin with http:// or https://, or has a login"
            what_to_do = 'give SchemaRegistry("https://registry:8081", username=..., password=...)'
            raise ConfigError(what, what_to_do=what_to_do)
        if bool(self.username) != bool(self.password) or (self.username and self.token):
            what = "the schema registry has not both username and password, or one of them and a token"
            raise ConfigError(what, what_to_do="give username and password, only a token, or none of them")
        for name in ("password", "token"):
            secret_of(getattr(self, name), f"{name} of the schema registry")  # Raises if it names no place.
        if self.key_location and not self.certificate_location:
            what = "the schema registry has a key_location and no certificate_location"
            raise ConfigError(what, what_to_do="give the certificate that the key belongs to")


class NoSuchSchema(LookupError):
    """The registry has no schema with this id, subject or version."""


@dataclass(frozen=True)
class RegistrySchema:
    kind: str
    text: str
    #: Names and texts of the schemas that it refers to, directly or not; each comes after those that it
    #: needs.
    references: tuple[tuple[str, str], ...] = ()
    #: Its id, subject and version; 0 and empty if they are not known.
    schema_id: int = 0
    subject: str = ""
    version: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> RegistrySchema:
        references = tuple((name, text) for name, text in stored["references"])
        return cls(**{**stored, "references": references})

    @property
    def name(self) -> str:
        where = f" of subject '{self.subject}', version {self.version}" if self.subject else ""
        return f"schema {self.schema_id}{where}"


def subject_of(registry: SchemaRegistry, topic: str, part: str, record: str) -> str:
    if registry.subject:
        return registry.subject
    if registry.strategy is SubjectNameStrategy.TOPIC_NAME:
        return f"{topic}-{part}"
    if not record:
        raise SchemaError(
            f"SubjectNameStrategy.{registry.strategy.name} needs the name of the record",
            what_to_do='give the schema, or SchemaRegistry(..., subject="...")',
        )
    return record if registry.strategy is SubjectNameStrategy.RECORD_NAME else f"{topic}-{record}"


@functools.lru_cache(maxsize=16)
def client_of(settings: SchemaRegistry) -> RegistryClient:
    return RegistryClient(settings)


@dataclass
class RegistryClient:
    """A client of one registry; may be used by several threads."""

    settings: SchemaRegistry
    _by_id: dict[int, RegistrySchema] = field(default_factory=dict)
    #: Unknown ids, each with the time at which it is asked for again.
    _unknown: dict[int, float] = field(default_factory=dict)

    @functools.cached_property
    def _client(self) -> SchemaRegistryClient:
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError as missing:
            raise make_library_error("schema-registry", "confluent-kafka", missing) from None
        return SchemaRegistryClient(_options(self.settings))

    def find_by_id(self, schema_id: int) -> RegistrySchema:
        if schema_id not in self._by_id:
            if time.monotonic() < self._unknown.get(schema_id, 0):
                raise NoSuchSchema(schema_id)
            self._by_id[schema_id] = self._whole(self._fetch_schema(schema_id), schema_id)
        return self._by_id[schema_id]

    def _fetch_schema(self, schema_id: int) -> Schema:
        believed_at, text = time.monotonic() + _UNKNOWN_MS / 1_000, attrgetter("schema_str")
        for tries, pause_ms in enumerate(backoff_ms(_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)):
            try:
                return self._ask(f"schema {schema_id}", lambda: self._client.get_schema(schema_id), text)
            except NoSuchSchema:
                if schema_id in self._unknown or (tries and time.monotonic() > believed_at):
                    self._unknown[schema_id] = time.monotonic() + _FORGOTTEN_MS / 1_000
                    raise
            time.sleep(pause_ms / 1_000)
        raise AssertionError("pauses never end")

    def newest(self, subject: str) -> RegistrySchema:
        found = self._ask(
            f"subject '{subject}'",
            lambda: self._client.get_version(subject, "latest"),
            attrgetter("schema.schema_str"),
        )
        return self._whole(found.schema, int(found.schema_id or 0), subject, int(found.version or 0))

    def id_of(self, subject: str, schema: RegistrySchema, needs: Sequence[tuple[str, str, int]] = ()) -> int:
        """Return the id of a sink's schema; register the schema if the settings say so."""
        if self.settings.registration is Registration.AUTOMATIC:
            wanted, who = _schema(schema, needs), f"the schema of subject '{subject}'"
            return int(self._ask(who, lambda: self._client.register_schema(subject, wanted), int))
        try:
            return int(self._look_up(subject, schema, needs, "schema_id"))
        except NoSuchSchema:
            raise SchemaError(
                f"the registry does not have the schema that is written under subject '{subject}'",
                why="the sink has Registration.REQUIRED",
                what_to_do="register it, or choose Registration.AUTOMATIC",
            ) from None

    def version_of(self, subject: str, schema: RegistrySchema, needs: Sequence[tuple[str, str, int]]) -> int:
        return int(self._look_up(subject, schema, needs, "version"))

    def _look_up(
        self, subject: str, schema: RegistrySchema, needs: Sequence[tuple[str, str, int]], part: str
    ) -> Any:
        wanted, who, get = _schema(schema, needs), f"the schema of subject '{subject}'", attrgetter(part)
        return get(self._ask(who, lambda: self._client.lookup_schema(subject, wanted), get))

    def _whole(self, found: Schema, schema_id: int, subject: str = "", version: int = 0) -> RegistrySchema:
        references: dict[str, str] = {}
        self._collect(found, references, 0)
        kind, text = str(found.schema_type or "AVRO"), str(found.schema_str)
        return RegistrySchema(kind, text, tuple(references.items()), schema_id, subject, version)

    def _collect(self, schema: Schema, known: dict[str, str], depth: int) -> None:
        """Add all schemas that a schema refers to, each after those that it needs."""
        if depth > _DEEPEST:
            raise SchemaError(
                "the schemas of the registry refer to each other without an end",
                what_to_do="register one of them without its reference to the others",
            )
        for one in schema.references or ():
            if one.name in known:
                continue
            inner = self._version(str(one.subject), int(one.version or 0))
            self._collect(inner, known, depth + 1)
            known[str(one.name)] = str(inner.schema_str)

    def _version(self, subject: str, version: int) -> Schema:
        what = f"version {version} of subject '{subject}'"

        def ask() -> RegisteredSchema:
            try:
                # A version that was deleted may still be needed by records.
                return self._client.get_version(subject, version, deleted=True)
            except Exception as error:
                known = _meaning(error, what)
                if isinstance(known, NoSuchSchema):
                    known = UnavailableError(
                        f"the schema registry does not have {what}",
                        why="a schema that it has refers to it: a replica lags behind, or it was deleted",
                        what_to_do="register it again, if it stays away",
                    )
                raise_translated(known, error)

        return self._ask(what, ask, attrgetter("schema.schema_str")).schema

    def _ask(self, what: str, ask: Callable[[], T], part: Callable[[Any], object]) -> T:
        """Call the client until it answers, for as long as the settings allow."""
        deadline = time.monotonic() + self.settings.retry_ms / 1_000
        pauses_ms = backoff_ms(_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        while True:
            try:
                found = ask()
                if part(found):
                    return found
                # Otherwise the client would return the cached answer again.
                self._client.clear_caches()  # type: ignore[no-untyped-call]
                raise ValueError("it has no schema, or no number of one")
            except Exception as error:
                known = _meaning(error, what)
                if isinstance(known, UnavailableError):
                    pause_s = next(pauses_ms) / 1_000
                    if time.monotonic() + pause_s < deadline:
                        time.sleep(pause_s)
                        continue
                raise_translated(known, error)


def _options(settings: SchemaRegistry) -> dict[str, Any]:
    options: dict[str, Any] = {
        "url": settings.url,
        "timeout": settings.timeout_ms / 1_000,
        # This module makes the retries.
        "max.retries": 0,
    }
    if settings.username:
        options["basic.auth.user.info"] = f"{settings.username}:{settings.secret('password')}"
    if settings.token:
        options |= {
            "bearer.auth.credentials.source": "STATIC_TOKEN",
            "bearer.auth.token": settings.secret("token"),
            # Settings of Confluent Cloud, which the client requires.
            "bearer.auth.logical.cluster": "",
            "bearer.auth.identity.pool.id": "",
        }
    files = {
        "ssl.ca.location": settings.ca_location,
        "ssl.certificate.location": settings.certificate_location,
        "ssl.key.location": settings.key_location,
    }
    return options | {name: path for name, path in files.items() if path}


def _schema(schema: RegistrySchema, needs: Sequence[tuple[str, str, int]]) -> Schema:
    from confluent_kafka.schema_registry import Schema, SchemaReference

    references = [SchemaReference(name, subject, version) for name, subject, version in needs]
    return Schema(schema.text, schema_type=schema.kind, references=references)


def _meaning(error: Exception, what: str) -> BaseException:
    """Translate an exception of Confluent's client."""
    status, said = getattr(error, "http_status_code", None), str(getattr(error, "error_message", error))
    if isinstance(error, NoSuchSchema | SchemaError | EnvironmentFault):
        return error
    if status in (401, 403):
        return AuthorizationError(
            f"the schema registry refuses this client {what}",
            why=f"it answers {status}",
            what_to_do="correct username and password, or token, of SchemaRegistry, or its rights there",
        )
    if status == 404 and getattr(error, "error_code", None) in _NO_SUCH:
        return NoSuchSchema(what)
    if status in (409, 422):
        return SchemaError(
            f"the schema registry does not take {what}",
            why=said[:1_000].rstrip("."),
            what_to_do="change the schema so that it is compatible, or the compatibility of the subject",
        )
    is_transport = type(error).__module__.startswith(("httpx", "httpcore"))
    if status in _AWAY or is_transport or isinstance(error, OSError):
        why = f"it answers {status}" if status else type(error).__name__
        return UnavailableError(
            f"the schema registry does not answer about {what}",
            why=why,
            what_to_do="check the registry, a proxy before it, and the path of its URL",
        )
    if isinstance(error, ValueError | TypeError | AttributeError | KeyError):
        # The client raises these if an answer is no JSON, no object, or empty.
        return UnavailableError(
            f"the answer about {what} did not come from a schema registry",
            why=f"it has another form: {error}"[:500].rstrip("."),
            what_to_do="check the URL, and a proxy before the registry",
        )
    if status is not None:
        return EnvironmentFault(
            f"the schema registry refuses {what}",
            why=f"it answers {status}: {said:.500}",
            what_to_do="check its URL and the login",
        )
    return error


def make_library_error(extra: str, package: str, missing: ImportError) -> EnvironmentFault:
    return EnvironmentFault(
        f"a format needs {package}: it is not installed here",
        why=str(missing),
        what_to_do=f"{how_to_install(extra)}, on every machine that runs tasks",
    )


def header(schema_id: int) -> bytes:
    return bytes([MAGIC]) + schema_id.to_bytes(4, "big")


def record_name(kind: str, text: str) -> str:
    """Return the full name of what an Avro schema or a JSON Schema describes; empty if it has none."""
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(found, dict):
        return ""
    if kind == "JSON":
        return str(found.get("title", ""))
    name, namespace = str(found.get("name", "")), str(found.get("namespace", ""))
    return name if "." in name or not namespace else f"{namespace}.{name}"
