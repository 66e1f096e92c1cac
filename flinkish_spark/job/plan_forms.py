"""Forms of a job graph as text: JSON as Flink has it, DOT for Graphviz, Mermaid for pages and notebooks."""

from __future__ import annotations

import json
from collections.abc import Iterator

from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.job_graph import JobEdge, JobGraph, JobOperator, JobVertex, OperatorKind

_MOST_LETTERS = 46
#: Fill and border by what a vertex begins with; dark enough borders to be told apart without colours.
_COLOURS = {
    OperatorKind.SOURCE: ("#e8f1fb", "#2b6cb0"),
    OperatorKind.STATEFUL: ("#fdf3dc", "#b7791f"),
    OperatorKind.SINK: ("#e6f4ea", "#2f7d4f"),
}
_OTHERS = ("#f4f4f5", "#5f6368")


class PlanForm(Choice):
    """In which form a plan is wanted."""

    #: Flink's, for its plan visualiser.
    JSON = "JSON"
    #: Graphviz's.
    DOT = "DOT"
    #: Mermaid's, which GitHub, JupyterLab and MkDocs draw.
    MERMAID = "MERMAID"


def plan_in(graph: JobGraph, form: PlanForm) -> str:
    match form:
        case PlanForm.JSON:
            return json.dumps(graph.execution_plan(), indent=2)
        case PlanForm.DOT:
            return dot(graph)
        case PlanForm.MERMAID:
            return mermaid(graph)


def dot(graph: JobGraph) -> str:
    lines = [
        f"digraph {_quoted(_short(graph.job))} {{",
        '  rankdir=LR; node [shape=box, style="rounded,filled", fontname=monospace, fontsize=11];',
    ]
    for vertex in graph.vertices:
        fill, border = _colours(vertex)
        # In DOT a line that is not centred ends with \l.
        label = "".join(f"{_escaped(line)}\\l" for line in _lines(vertex, graph))
        lines.append(f'  "{vertex.id}" [label="{label}", fillcolor="{fill}", color="{border}"];')
    for front, behind, says in _edges(graph):
        lines.append(f'  "{front}" -> "{behind}" [label={_quoted(says)}];')
    return "\n".join([*lines, "}"])


def mermaid(graph: JobGraph) -> str:
    lines = ["flowchart LR"]
    for vertex in graph.vertices:
        fill, border = _colours(vertex)
        label = "<br>".join(_as_entities(line) for line in _lines(vertex, graph))
        lines.append(f'  v{vertex.id}["{label}"]')
        lines.append(f"  style v{vertex.id} fill:{fill},stroke:{border},color:#1a1a1a")
    for front, behind, says in _edges(graph):
        lines.append(f'  v{front} -->|"{_as_entities(says)}"| v{behind}')
    return "\n".join(lines)


def markdown(graph: JobGraph) -> str:
    return f"```mermaid\n{mermaid(graph)}\n```"


def _lines(vertex: JobVertex, graph: JobGraph) -> list[str]:
    return [*(_short(f"{one.title}{_where(one)}") for one in vertex.operators), _foot(vertex, graph)]


def _where(one: JobOperator) -> str:
    again = f" {one.runs}\N{MULTIPLICATION SIGN}" if one.runs > 1 else ""
    return f" · {one.runs_in.value}{again}"


def _foot(vertex: JobVertex, graph: JobGraph) -> str:
    shares = vertex.operators[0].shares
    facts = [_short(f"tasks of {graph.by_id[shares].title}") if shares else _tasks(vertex.parallelism)]
    if vertex.max_parallelism is not None:
        facts.append(f"state in {vertex.max_parallelism} key groups")
    return " · ".join(facts)


def _tasks(parallelism: int | None) -> str:
    if parallelism is None:
        return "tasks as read"
    return "1 task" if parallelism == 1 else f"{parallelism} tasks"


def _edges(graph: JobGraph) -> Iterator[tuple[str, str, str]]:
    """Yield the edges between vertices: from, to, and what stands beside it."""
    vertex_of = {one.id: vertex.id for vertex in graph.vertices for one in vertex.operators}
    for vertex in graph.vertices:
        found: dict[str, list[str]] = {}
        for one in vertex.operators:
            for edge in one.inputs:
                if vertex_of[edge.source] != vertex.id:
                    found.setdefault(vertex_of[edge.source], []).append(_says(edge, one))
        for front, says in found.items():
            yield front, vertex.id, ", ".join(dict.fromkeys(says))


def _says(edge: JobEdge, behind: JobOperator) -> str:
    by = f" {', '.join(behind.keys)}" if edge.ship.value == "HASH" and behind.keys else ""
    output = f" [{edge.output}]" if edge.output else ""
    return _short(f"{edge.ship.value}{by}{output}", 22)


def _short(text: str, most: int = _MOST_LETTERS) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _as_entities(text: str) -> str:
    return "".join(one if one.isalnum() or one in " .,:·()[]_-" else f"#{ord(one)};" for one in text)


def _colours(vertex: JobVertex) -> tuple[str, str]:
    return _COLOURS.get(vertex.operators[0].kind, _sink_or_other(vertex))


def _sink_or_other(vertex: JobVertex) -> tuple[str, str]:
    has_sink = any(one.kind is OperatorKind.SINK for one in vertex.operators)
    return _COLOURS[OperatorKind.SINK] if has_sink else _OTHERS
