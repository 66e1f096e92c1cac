"""The paths of the server with their handlers."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from flinkish_spark.core.clock import SystemThreads
from flinkish_spark.core.errors import ConfigError, FlinkishError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.asking import RequestTimeouts, ask_until_interrupted, describe, follow_rewind
from flinkish_spark.job.requests import Reply, ReplyKind, RequestKind, StopMode
from flinkish_spark.job.rewind import order_rewind
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.job_graph import JobVertex
from flinkish_spark.protocol.lineage import Tables
from flinkish_spark.reporters.prometheus import CONTENT_TYPE, text_of
from flinkish_spark.rest import flink_views as flink
from flinkish_spark.rest import flinkish_views as ours
from flinkish_spark.rest.access import Access, Guard, errors
from flinkish_spark.rest.jobs import JobsInPlaces
from flinkish_spark.rest.operations import Operations, RequestError

LOG = logging.getLogger(__name__)

#: Number of checkpoints in one answer: by default (as in Flink's history), and at most.
_FLINK_HISTORY, _MOST_LISTED = 10, 500
_MOST_EXCEPTIONS = 16
#: Time limits for a job to carry out a request, and to begin with a cancel.
_ANSWERED_WITHIN_S, _CANCELLED_WITHIN_S = 3_600.0, 20.0
#: Time limit for a job that seems to run to take a request.
_TAKEN_WITHIN_MS = 15_000
#: Intervals of looks for changes, which pages are notified of, and of keep-alive comments.
_LOOK_S, _LOOK_IN_BUCKET_S, _LIFE_S = 1.0, 5.0, 15.0
_CLOSED_WITHIN_S = 0.2
_MOST_LISTENERS = 64
_SAVEPOINT, _STOP, _CHECKPOINT, _REWIND = "savepoint", "stop", "checkpoint", "rewind"


@dataclass(frozen=True)
class ServedJobs:
    jobs: JobsInPlaces
    access: Access
    #: Default directory of savepoints; empty for none.
    savepoint_dir: str = ""
    #: Set when the server must end: streams of changes end, too.
    closing: threading.Event = field(default_factory=threading.Event)


def application(served: ServedJobs) -> Starlette:
    paths = _Paths(served)
    routes = paths.routes()
    return Starlette(
        routes=[*_page(), *routes, Mount("/v1", routes=routes)],
        middleware=[Middleware(Guard, access=served.access)],
        exception_handlers={
            RequestError: lambda _, error: errors(error.status, error.text),
            FlinkishError: lambda _, error: errors(500, str(error)),
            404: lambda _, error: errors(404, "there is no such path"),
            405: lambda _, error: errors(405, "the path does not take this method"),
            500: lambda _, error: errors(500, "an internal error; the server's log says more"),
        },
    )


class _FlinkAnswer(JSONResponse):
    """An answer without null members, which clients generated from Flink's OpenAPI document do not accept."""

    def render(self, content: Any) -> bytes:
        return super().render(_drop_nulls(content))


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(one) for name, one in value.items() if one is not None}
    return [_drop_nulls(one) for one in value] if isinstance(value, list) else value


def _page() -> list[Route]:
    kinds = {
        "index.html": ("/", "text/html"),
        "page.css": ("/page.css", "text/css"),
        "page.js": ("/page.js", "text/javascript"),
        "icon.svg": ("/icon.svg", "image/svg+xml"),
    }
    folder = files("flinkish_spark.rest").joinpath("page")

    def serving(name: str, kind: str) -> Callable[[Request], Response]:
        content = folder.joinpath(name).read_bytes()
        return lambda request: Response(content, media_type=kind)

    return [Route(path, serving(name, kind)) for name, (path, kind) in kinds.items()]


class _Paths:
    """The handlers, one method per group of paths; called in threads, since they read stores."""

    def __init__(self, served: ServedJobs) -> None:
        self._served, self._jobs = served, served.jobs
        self._operations = Operations(SystemThreads())
        self._listeners = 0

    def routes(self) -> list[Route]:
        job, vertex = "/jobs/{job}", "/jobs/{job}/vertices/{vertex}"
        return [
            Route("/metrics", lambda _: Response(text_of(self._all()), media_type=CONTENT_TYPE)),
            Route("/overview", lambda request: _FlinkAnswer(flink.overview(self._all()))),
            Route("/config", self._config),
            Route("/taskmanagers", lambda request: JSONResponse({"taskmanagers": []})),
            Route("/jobmanager/config", lambda request: JSONResponse([])),
            Route("/jobmanager/metrics", lambda request: JSONResponse([])),
            Route("/jobmanager/logs", lambda request: JSONResponse({"logs": []})),
            Route("/jars", lambda request: JSONResponse({"address": str(request.base_url), "files": []})),
            Route("/jobs", lambda request: self._list(flink.job_id_with_status)),
            Route("/jobs/overview", lambda request: self._list(flink.job_overview)),
            Route(job, self._serve_job(flink.job_details), methods=["GET"]),
            Route(job, self._cancel, methods=["PATCH"]),
            Route(f"{job}/plan", self._serve_job(flink.job_plan)),
            Route(f"{job}/config", self._serve_job(flink.job_config)),
            Route(f"{job}/status", self._serve_job(lambda one: {"status": one.status.value})),
            Route(f"{job}/exceptions", self._exceptions),
            Route(f"{job}/accumulators", self._serve_job(flink.job_accumulators)),
            Route(f"{job}/metrics", self._job_metrics),
            Route(
                f"{job}/checkpoints",
                self._serve_job(lambda one: flink.checkpoints(one, _FLINK_HISTORY)),
                methods=["GET"],
            ),
            Route(f"{job}/checkpoints", self._trigger_checkpoint, methods=["POST"]),
            Route(f"{job}/checkpoints/config", self._serve_job(flink.checkpoint_config)),
            Route(f"{job}/checkpoints/details/{{checkpoint}}", self._checkpoint),
            Route(f"{job}/checkpoints/details/{{checkpoint}}/subtasks/{{vertex}}", self._subtasks),
            Route(f"{job}/checkpoints/{{trigger}}", self._state_of(_CHECKPOINT)),
            Route(f"{job}/savepoints", self._trigger_savepoint, methods=["POST"]),
            Route(f"{job}/savepoints/{{trigger}}", self._state_of(_SAVEPOINT, _STOP)),
            Route(f"{job}/stop", self._stop, methods=["POST"]),
            Route(vertex, self._serve_vertex(flink.vertex_details)),
            Route(f"{vertex}/subtasktimes", self._serve_vertex(flink.vertex_times)),
            Route(f"{vertex}/backpressure", self._serve_vertex(flink.vertex_back_pressure)),
            Route(f"{vertex}/watermarks", self._serve_vertex(flink.vertex_watermarks)),
            Route(f"{vertex}/metrics", self._vertex_metrics(flink.select_metrics)),
            Route(f"{vertex}/subtasks/metrics", self._vertex_metrics(flink.aggregate_metrics)),
            *self._own(f"{job}/flinkish"),
        ]

    def _own(self, base: str) -> list[Route]:
        return [
            Route("/flinkish/jobs", lambda request: self._list(ours.summarize_job)),
            Route(
                "/flinkish/unreadable", lambda request: JSONResponse(dict(self._jobs.list_jobs().unreadable))
            ),
            Route("/flinkish/events", self._all_events),
            Route(base, self._serve_own_job(ours.job)),
            Route(f"{base}/graph", self._serve_own_job(ours.graph)),
            Route(f"{base}/series", self._serve_own_job(ours.series)),
            Route(f"{base}/watermarks", self._serve_own_job(ours.watermarks)),
            Route(f"{base}/sinks", self._serve_own_job(ours.sinks)),
            Route(f"{base}/lineages", self._serve_own_job(ours.lineages)),
            Route(f"{base}/checkpoints", self._serve_list(ours.checkpoints)),
            Route(f"{base}/checkpoints/{{checkpoint}}", self._own_checkpoint),
            Route(f"{base}/decisions", self._serve_list(ours.decisions)),
            Route(f"{base}/audit", self._serve_own_job(lambda one: ours.audit(one, _MOST_LISTED))),
            Route(
                f"{base}/chained",
                self._serve_own_job(lambda one: ours.find_chained_jobs(one, self._jobs.list_jobs())),
            ),
            Route(f"{base}/rewind", self._serve_own_job(lambda one: ours.rewind(one, 50)), methods=["GET"]),
            Route(f"{base}/rewind", self._rewind, methods=["POST"]),
            Route(f"{base}/rewind/{{trigger}}", self._state_of(_REWIND)),
            Route(f"{base}/events", self._events),
        ]

    def _all(self) -> list[JobSnapshot]:
        return [JobSnapshot(job_id, job) for job_id, job in self._jobs.list_jobs().by_id.items()]

    def _list(self, view: Callable[[JobSnapshot], dict[str, Any]]) -> Response:
        found = []
        for snapshot in self._all():
            try:
                found.append(view(snapshot))
            except FlinkishError as error:
                # A damaged directory must not hide the others.
                LOG.warning("the job '%s' is not listed: %s", snapshot.job.name, error)
        return _FlinkAnswer({"jobs": found})

    def _snapshot(self, request: Request) -> JobSnapshot:
        job_id = request.path_params["job"]
        job = self._jobs.find(job_id)
        if job is None:
            raise RequestError(404, f"there is no job {job_id[:40]}")
        return JobSnapshot(job_id, job)

    def _vertex(self, snapshot: JobSnapshot, request: Request) -> JobVertex:
        wanted = request.path_params["vertex"]
        found = next((one for one in snapshot.graph.vertices if one.id == wanted), None)
        if found is None:
            raise RequestError(404, f"the job has no vertex {wanted[:40]}")
        return found

    def _view(self, snapshot: JobSnapshot, request: Request) -> Any:
        checkpoint = ours.checkpoint_id(request.path_params["checkpoint"])
        view = None if checkpoint is None else snapshot.checkpoint(checkpoint.value)
        if view is None:
            raise RequestError(404, "that checkpoint is not known")
        return view

    def _serve_job(
        self, view: Callable[[JobSnapshot], Any], answer: type[JSONResponse] = _FlinkAnswer
    ) -> Callable[[Request], Response]:
        return lambda request: answer(view(self._snapshot(request)))

    def _serve_own_job(self, view: Callable[[JobSnapshot], Any]) -> Callable[[Request], Response]:
        return self._serve_job(view, JSONResponse)

    def _serve_vertex(self, view: Callable[[JobSnapshot, JobVertex], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            snapshot = self._snapshot(request)
            return _FlinkAnswer(view(snapshot, self._vertex(snapshot, request)))

        return answer

    def _serve_list(
        self, view: Callable[[JobSnapshot, int, int | None], Any]
    ) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            at_most, before = _number(request, "limit", 50), _number(request, "before", None)
            return JSONResponse(view(self._snapshot(request), min(at_most or 0, _MOST_LISTED), before))

        return answer

    def _config(self, request: Request) -> Response:
        return _FlinkAnswer(flink.dashboard_config(can_change=self._served.access.can_change))

    def _exceptions(self, request: Request) -> Response:
        at_most = _number(request, "maxExceptions", _MOST_EXCEPTIONS) or 0
        return _FlinkAnswer(flink.job_exceptions(self._snapshot(request), at_most))

    def _job_metrics(self, request: Request) -> Response:
        metrics = flink.job_metrics(self._snapshot(request))
        return _FlinkAnswer(flink.select_metrics(metrics, request.query_params.get("get")))

    def _vertex_metrics(
        self, view: Callable[[Mapping[str, str], str | None], Any]
    ) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            snapshot = self._snapshot(request)
            metrics = flink.vertex_metrics(snapshot, self._vertex(snapshot, request))
            return JSONResponse(view(metrics, request.query_params.get("get")))

        return answer

    def _checkpoint(self, request: Request) -> Response:
        snapshot = self._snapshot(request)
        return _FlinkAnswer(flink.checkpoint_details(snapshot, self._view(snapshot, request)))

    def _subtasks(self, request: Request) -> Response:
        snapshot = self._snapshot(request)
        vertex = self._vertex(snapshot, request)
        return _FlinkAnswer(flink.checkpoint_subtasks(self._view(snapshot, request), vertex))

    def _own_checkpoint(self, request: Request) -> Response:
        snapshot = self._snapshot(request)
        return JSONResponse(ours.checkpoint(snapshot, self._view(snapshot, request)))

    async def _trigger_checkpoint(self, request: Request) -> Response:
        given = await _body(request)

        def work(job: StoredJob) -> dict[str, Any]:
            reply = _ask_job(job, RequestKind.CHECKPOINT)
            return {"checkpointId": None if reply.checkpoint is None else int(reply.checkpoint)}

        return await run_in_threadpool(self._begin, request, _CHECKPOINT, work, given)

    async def _trigger_savepoint(self, request: Request) -> Response:
        given = await _body(request)
        if _flag(given, "cancel-job"):
            raise RequestError(400, "a savepoint cannot cancel the job here; POST to stop instead")
        return await self._export(request, _SAVEPOINT, _text(given, "target-directory"), given)

    async def _stop(self, request: Request) -> Response:
        given = await _body(request)
        mode = StopMode.DRAIN if _flag(given, "drain") else StopMode.SUSPEND
        return await self._export(request, _STOP, _text(given, "targetDirectory"), given, mode)

    async def _export(
        self,
        request: Request,
        kind: str,
        parent: str,
        given: Mapping[str, Any],
        mode: StopMode = StopMode.SUSPEND,
    ) -> Response:
        """Start a savepoint in a new directory below `parent`, as in Flink."""
        folder = _savepoint_parent(parent or self._served.savepoint_dir)
        asked = RequestKind.SAVEPOINT if kind == _SAVEPOINT else RequestKind.STOP_WITH_SAVEPOINT

        def work(job: StoredJob) -> dict[str, Any]:
            target = f"{folder}/savepoint-{str(job.uuid)[:6]}-{uuid.uuid4().hex[:12]}"
            _ask_job(job, asked, target, mode)
            return {"location": target}

        return await run_in_threadpool(self._begin, request, kind, work, given)

    async def _rewind(self, request: Request) -> Response:
        given = await _body(request)
        number = given.get("checkpoint")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RequestError(400, "checkpoint must be the id of one: a whole number from 1 on")
        tables = _tables(given)

        def work(job: StoredJob) -> dict[str, Any]:
            return _rewind_and_wait(self._snapshot(request), CheckpointId(number), tables)

        return await run_in_threadpool(self._begin, request, _REWIND, work, given)

    def _begin(
        self,
        request: Request,
        kind: str,
        work: Callable[[StoredJob], dict[str, Any]],
        given: Mapping[str, Any],
    ) -> Response:
        snapshot = self._snapshot(request)
        trigger = given.get("triggerId")
        if trigger is not None and not isinstance(trigger, str):
            raise RequestError(400, "triggerId must be a text")
        if kind != _REWIND:
            _refuse_if_down(snapshot)
        job = snapshot.job
        name = self._operations.begin(snapshot.id, kind, lambda: work(job), trigger)
        return JSONResponse({"request-id": name}, status_code=202)

    def _state_of(self, *kinds: str) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            snapshot = self._snapshot(request)
            found = self._operations.find(snapshot.id, frozenset(kinds), request.path_params["trigger"])
            if found is None:
                raise RequestError(404, "no such operation: it was begun elsewhere, or was forgotten")
            if not found.has_ended:
                return JSONResponse({"status": {"id": "IN_PROGRESS"}})
            if found.failure is None:
                return JSONResponse({"status": {"id": "COMPLETED"}, "operation": found.result})
            cause = {"class": "OperationFailed", "stack-trace": found.failure, "serialized-throwable": ""}
            return JSONResponse({"status": {"id": "COMPLETED"}, "operation": {"failure-cause": cause}})

        return answer

    def _cancel(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "cancel")
        if mode != "cancel":
            raise RequestError(400, "mode can be cancel; to stop with a savepoint POST to stop")
        snapshot = self._snapshot(request)
        _refuse_if_down(snapshot)
        patience = RequestTimeouts.from_seconds(_CANCELLED_WITHIN_S, _TAKEN_WITHIN_MS)
        reply = ask_until_interrupted(snapshot.job, RequestKind.CANCEL, patience)
        if reply.kind is not ReplyKind.COMPLETED:
            raise RequestError(504 if reply.kind is ReplyKind.NOT_TAKEN else 409, describe(reply))
        return JSONResponse({}, status_code=202)

    async def _events(self, request: Request) -> Response:
        snapshot = await run_in_threadpool(self._snapshot, request)
        is_local = snapshot.job.place.is_local

        newest: dict[tuple[object, ...], Any] = {}

        def look() -> Any:
            now = JobSnapshot(snapshot.id, snapshot.job)
            mark = now.fingerprint()
            if mark not in newest:
                newest.clear()
                newest[mark] = ours.change_mark(now)
            return newest[mark]

        return self._stream(look, _LOOK_S if is_local else _LOOK_IN_BUCKET_S)

    async def _all_events(self, request: Request) -> Response:
        def look() -> Any:
            return {one.id: str(one.fingerprint()) for one in self._all()}

        return self._stream(look, _LOOK_IN_BUCKET_S)

    def _stream(self, look: Callable[[], Any], every_s: float) -> Response:
        if self._listeners >= _MOST_LISTENERS:
            raise RequestError(503, "too many pages listen to this server")
        return StreamingResponse(self._changes(look, every_s), media_type="text/event-stream")

    async def _changes(self, look: Callable[[], Any], every_s: float) -> AsyncIterator[str]:
        """Yield an event for each change, the first at once, and a comment if nothing changes for long."""
        known, silent_s = None, 0.0
        self._listeners += 1
        try:
            while not self._served.closing.is_set():
                try:
                    found = json.dumps(await run_in_threadpool(look))
                except FlinkishError as error:
                    found = json.dumps({"error": str(error)})
                if found != known:
                    known, silent_s = found, 0.0
                    yield f"event: change\ndata: {found}\n\n"
                elif silent_s >= _LIFE_S:
                    silent_s = 0.0
                    yield ": nothing has changed\n\n"
                await self._sleep(every_s)
                silent_s += every_s
        finally:
            self._listeners -= 1

    async def _sleep(self, for_s: float) -> None:
        """Sleep, but return early if the server ends."""
        for _ in range(round(for_s / _CLOSED_WITHIN_S)):
            if self._served.closing.is_set():
                return
            await asyncio.sleep(_CLOSED_WITHIN_S)


def _refuse_if_down(snapshot: JobSnapshot) -> None:
    if snapshot.is_over or snapshot.owner_epoch.value == 0:
        raise RequestError(409, f"the job '{snapshot.job.name}' does not run: it is {snapshot.status.value}")


def _ask_job(job: StoredJob, kind: RequestKind, target: str = "", mode: StopMode = StopMode.SUSPEND) -> Reply:
    patience = RequestTimeouts.from_seconds(_ANSWERED_WITHIN_S, _TAKEN_WITHIN_MS)
    reply = ask_until_interrupted(job, kind, patience, target=target, stop_mode=mode)
    if reply.kind is not ReplyKind.COMPLETED:
        raise RequestError(409, describe(reply))
    return reply


def _rewind_and_wait(snapshot: JobSnapshot, target: CheckpointId, tables: Tables) -> dict[str, Any]:
    """Order a rewind, send a request to a running job, and wait until the order is closed."""
    job, owner = snapshot.job, snapshot.job.job_dir.newest_owner()
    order = order_rewind(job.job_dir, job.pins(), job.clock, target, tables, "ordered over REST")
    waits = {
        "outcome": "WAITS_FOR_START",
        "text": f"ordered: the next start goes back to checkpoint {target}",
        "lineage": None,
    }
    if snapshot.is_over:
        return waits
    patience = RequestTimeouts.from_seconds(_ANSWERED_WITHIN_S, _TAKEN_WITHIN_MS)
    status, reply = follow_rewind(job, order, owner, patience)
    if status is None:
        return waits
    if not status.state.is_closed:
        raise RequestError(409, f"ordered, and not done yet: {describe(reply)}; the order stays")
    return {
        "outcome": status.state.value,
        "text": status.text,
        "lineage": None if status.lineage is None else int(status.lineage),
    }


async def _body(request: Request) -> Mapping[str, Any]:
    """Return the JSON object of a request's body; an empty one for an empty body."""
    content = await request.body()
    if not content.strip():
        return {}
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(415, "the request must be application/json")
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        raise RequestError(400, "the request is no JSON") from None
    if not isinstance(given, dict):
        raise RequestError(400, "the request is no JSON object")
    return given


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(400, f"{name} must be a text")
    return value or ""


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false")
    return bool(value)


def _tables(given: Mapping[str, Any]) -> Tables:
    try:
        return Tables(given.get("tables", Tables.KEEP.value))
    except ValueError:
        raise RequestError(400, "tables must be KEEP or RESTORE") from None


def _number(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestError(400, f"{name} must be a whole number")
    return int(text)


def _savepoint_parent(text: str) -> str:
    if not text:
        raise RequestError(400, "the request names no directory, and the server has no --savepoint-dir")
    try:
        place = StoreSpec.parse(text)
    except ConfigError as error:
        raise RequestError(400, str(error)) from None
    return place.url
