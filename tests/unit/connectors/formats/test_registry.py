"""The registry's client: what each answer means, what is asked again, and what nobody sees."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import Avro, JsonSchema, OnSchemaChange, Registration, SchemaRegistry, SubjectNameStrategy
from flinkish_spark.connectors.formats import registry as module
from flinkish_spark.connectors.formats.registry import (
    NoSuchSchema,
    RegistryClient,
    RegistrySchema,
    record_name,
    subject_of,
)
from flinkish_spark.core.errors import (
    AuthorizationError,
    ConfigError,
    EnvironmentFault,
    SchemaError,
    UnavailableError,
)
from tests.support.tls import make_certificates

RECORD = '{"type": "record", "name": "Order", "namespace": "shop", "fields": [{"name": "a", "type": "int"}]}'


@dataclass
class Registry:
    """Answers by the published API: what stands in `answers`, in turn, else what it knows."""

    url: str = ""
    answers: list[tuple[int, Any]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    logins: set[str] = field(default_factory=set)

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        if self.answers:
            return self.answers.pop(0)
        if path.startswith("/schemas/ids/7"):
            references = [{"name": "shop.Item", "subject": "item", "version": 2}]
            return 200, {"schema": RECORD, "references": references}
        if path.startswith("/subjects/item/versions/2"):
            return 200, {"subject": "item", "version": 2, "id": 3, "schema": '"int"'}
        if path.startswith("/subjects/orders-value") and method == "POST":
            return 200, {"id": 7, "version": 1, "subject": "orders-value", "schema": RECORD}
        return 404, {"error_code": 40403, "message": "Schema not found"}


def serving(registry: Registry, certificate: Any = None) -> Iterator[Registry]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            registry.asked.append((self.command, self.path.partition("?")[0]))
            registry.logins.add(self.headers.get("Authorization", ""))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = registry.answer(self.command, self.path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 - the name that the server calls

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        server.socket = certificate.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    registry.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield registry
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.fixture
def served() -> Iterator[Registry]:
    yield from serving(Registry())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNKNOWN_MS", 50)
    monkeypatch.setattr(module, "_FIRST_PAUSE_MS", 10)


def client(served: Registry, **settings: Any) -> RegistryClient:
    return RegistryClient(
        SchemaRegistry(served.url, **{"retry_ms": 20_000, "timeout_ms": 10_000, **settings})
    )


def test_a_schema_is_asked_for_once_with_all_it_refers_to(served: Registry) -> None:
    asking = client(served)
    found = asking.find_by_id(7)
    assert found == RegistrySchema("AVRO", RECORD, (("shop.Item", '"int"'),), 7)
    assert asking.find_by_id(7) is found
    assert served.asked == [("GET", "/schemas/ids/7"), ("GET", "/subjects/item/versions/2")]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_outage_is_asked_again_and_passes(served: Registry, status: int) -> None:
    served.answers = [(status, {}), (status, {})]
    assert client(served).find_by_id(7).schema_id == 7
    assert len(served.asked) == 4


def test_an_outage_that_stays_is_no_answer_about_a_record(served: Registry) -> None:
    served.answers = [(503, {"message": "away"})] * 1_000
    with pytest.raises(UnavailableError, match="It answers 503") as away:
        client(served, retry_ms=2_000).find_by_id(7)
    assert away.value.restartable and not away.value.ends_when_repeated and len(served.asked) > 1


NOT_OF_A_REGISTRY = [
    (302, b"<html>Who are you?</html>"),
    (307, {"message": "elsewhere"}),
    (404, b"<html>default backend - 404</html>"),
    (404, {"error_code": 404, "message": "HTTP 404 Not Found"}),
    (404, ["no such page"]),
    (200, b"<html>Who are you?</html>"),
    (200, b"\xff\xfe"),
    (200, b""),
    (200, []),
    (200, {}),
    (200, {"schema": None}),
]


@pytest.mark.parametrize("answer", NOT_OF_A_REGISTRY)
def test_what_no_registry_says_is_asked_again_and_is_nothing_about_a_record(
    served: Registry, answer: tuple[int, Any]
) -> None:
    served.answers = [answer, answer]
    assert client(served).find_by_id(7).schema_id == 7, "the registry is back"
    assert len(served.asked) == 4
    asking = client(served, retry_ms=60)
    served.answers = [answer] * 1_000
    for ask in (partial(asking.find_by_id, 7), partial(asking.newest, "orders-value")):
        with pytest.raises(UnavailableError) as away:
            ask()
        assert away.value.restartable and "Who are you?" not in str(away.value)
    served.answers = []
    assert asking.find_by_id(7).schema_id == 7


@pytest.mark.parametrize("answer", [(200, {}), (200, b"<html>"), (404, b"")])
def test_no_sink_writes_a_number_that_no_registry_gave_it(served: Registry, answer: tuple[int, Any]) -> None:
    for registration in Registration:
        served.answers = [answer]
        asking, schema = client(served, registration=registration), RegistrySchema("AVRO", RECORD)
        assert asking.id_of("orders-value", schema) == 7
        served.answers = [answer]
        assert asking.version_of("orders-value", schema, ()) == 1


@pytest.mark.parametrize("code", [40401, 40402])
def test_a_reference_that_is_not_there_is_no_word_about_a_record(served: Registry, code: int) -> None:
    schema = {"schema": RECORD, "references": [{"name": "shop.Item", "subject": "item", "version": 2}]}
    missing = (404, {"error_code": code, "message": "not found"})
    served.answers = [(200, schema), missing, missing]
    assert client(served).find_by_id(7).references == (("shop.Item", '"int"'),), "a replica had it late"
    served.answers = [(200, schema)] + [missing] * 1_000
    with pytest.raises(UnavailableError, match="version 2 of subject 'item'"):
        client(served, retry_ms=60).find_by_id(7)


def test_nobody_who_listens_is_an_outage(served: Registry) -> None:
    nobody = SchemaRegistry("http://127.0.0.1:1", retry_ms=50, timeout_ms=50)
    with pytest.raises(UnavailableError):
        RegistryClient(nobody).find_by_id(7)
    no_file = replace(nobody, ca_location="/no/such/file.pem")
    with pytest.raises(UnavailableError, match="FileNotFoundError"):
        RegistryClient(no_file).find_by_id(7)


def test_a_number_that_is_not_known_is_asked_for_again_and_then_believed(served: Registry) -> None:
    asking = client(served)
    with pytest.raises(NoSuchSchema):
        asking.find_by_id(8)
    times = len(served.asked)
    assert times > 1, "a replica of the registry may lag behind"
    with pytest.raises(NoSuchSchema):
        asking.find_by_id(8)
    assert len(served.asked) == times


def test_a_number_that_was_not_known_is_asked_for_once_more_after_a_while(
    served: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FORGOTTEN_MS", 0)
    asking, unknown = client(served), (404, {"error_code": 40403, "message": "Schema not found"})
    served.answers = [unknown] * 1_000
    with pytest.raises(NoSuchSchema):
        asking.find_by_id(7)
    times = len(served.asked)
    with pytest.raises(NoSuchSchema):
        asking.find_by_id(7)
    assert len(served.asked) == times + 1, "no task waits for it a second time"
    served.answers = []
    assert asking.find_by_id(7).schema_id == 7, "it has been registered by now"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_nothing_that_a_restart_mends(served: Registry, status: int) -> None:
    served.answers = [(status, {"message": "no"})]
    with pytest.raises(AuthorizationError, match=str(status)) as refused:
        client(served, username="job", password="s3cret").find_by_id(7)
    assert "s3cret" not in str(refused.value) and not refused.value.restartable


def test_any_other_answer_is_a_fault_of_the_surroundings(served: Registry) -> None:
    served.answers = [(400, {"error_code": 400, "message": "what?"})]
    with pytest.raises(EnvironmentFault, match="It answers 400") as fault:
        client(served).find_by_id(7)
    assert not fault.value.restartable


@pytest.mark.parametrize("status", [409, 422])
def test_a_schema_that_is_not_taken(served: Registry, status: int) -> None:
    served.answers = [(status, {"message": "READER_FIELD_MISSING_DEFAULT_VALUE"})]
    with pytest.raises(SchemaError, match="does not take the schema of subject 'orders-value'") as refused:
        client(served).id_of("orders-value", RegistrySchema("AVRO", RECORD))
    assert "READER_FIELD_MISSING_DEFAULT_VALUE" in str(refused.value)


def test_a_sink_registers_or_finds_its_schema(served: Registry) -> None:
    schema = RegistrySchema("AVRO", RECORD)
    assert client(served).id_of("orders-value", schema) == 7
    assert client(served, registration=Registration.REQUIRED).id_of("orders-value", schema) == 7
    assert [path for _, path in served.asked] == ["/subjects/orders-value/versions", "/subjects/orders-value"]
    with pytest.raises(SchemaError, match="REQUIRED"):
        client(served, registration=Registration.REQUIRED).id_of("other", schema)


@pytest.mark.parametrize(
    ("settings", "login"),
    [
        ({}, ""),
        ({"username": "job", "password": "a:b"}, "Basic " + base64.b64encode(b"job:a:b").decode()),
        ({"token": "t0ken"}, "Bearer t0ken"),
    ],
)
def test_who_asks_says_who_it_is(served: Registry, settings: dict[str, str], login: str) -> None:
    client(served, **settings).find_by_id(7)
    assert served.logins == {login}


def test_a_certificate_is_looked_at(tmp_path: Path) -> None:
    import ssl

    made = make_certificates(tmp_path, names=("127.0.0.1",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.server)
    for served in serving(Registry(), context):
        assert client(served, ca_location=str(made.authority)).find_by_id(7).schema_id == 7
        with pytest.raises(UnavailableError):
            client(served, retry_ms=100).find_by_id(7)


def test_secrets_are_in_no_text_of_the_settings() -> None:
    settings = SchemaRegistry("https://r:8081", username="job", password="s3cret")
    form = Avro(registry=settings)
    assert "s3cret" not in f"{settings!r} {settings} {form!r}"
    assert "t0ken" not in repr(SchemaRegistry("https://r:8081", token="t0ken"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SchemaRegistry("https://job:s3cret@r:8081"),
        lambda: SchemaRegistry("file:///etc/passwd"),
        lambda: SchemaRegistry(""),
        lambda: SchemaRegistry("http://r", username="job"),
        lambda: SchemaRegistry("http://r", username="job", password="s3cret", token="t"),
        lambda: SchemaRegistry("http://r", key_location="key.pem"),
        lambda: SchemaRegistry("http://r", retry_ms=0),
        lambda: SchemaRegistry("http://r", strategy="topic"),  # type: ignore[arg-type]
        lambda: Avro(on_schema_change=OnSchemaChange.EVOLVE),
        lambda: Avro(RECORD, registry=SchemaRegistry("http://r"), on_schema_change=OnSchemaChange.EVOLVE),
        lambda: JsonSchema(
            fields="a INT", registry=SchemaRegistry("http://r"), on_schema_change=OnSchemaChange.EVOLVE
        ),
        lambda: Avro(RECORD, schema_id=3, registry=SchemaRegistry("http://r")),
    ],
)
def test_settings_that_cannot_be_used(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "subject"),
    [
        (SubjectNameStrategy.TOPIC_NAME, "orders-key"),
        (SubjectNameStrategy.RECORD_NAME, "shop.Order"),
        (SubjectNameStrategy.TOPIC_RECORD_NAME, "orders-shop.Order"),
    ],
)
def test_subjects(strategy: SubjectNameStrategy, subject: str) -> None:
    settings = SchemaRegistry("http://r", strategy=strategy)
    name = record_name("AVRO", RECORD)
    assert subject_of(settings, "orders", "key", name) == subject
    assert subject_of(SchemaRegistry("http://r", strategy=strategy, subject="s"), "orders", "key", "") == "s"
    if strategy is not SubjectNameStrategy.TOPIC_NAME:
        with pytest.raises(SchemaError, match=strategy.name):
            subject_of(settings, "orders", "key", "")
