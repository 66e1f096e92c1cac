"""Text forms of a job graph: a tree for terminals, Flink's JSON, Graphviz's DOT, Mermaid for web pages."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from flinkish_spark.protocol.job_graph import (
    JobEdge,
    JobGraph,
    JobOperator,
    JobVertex,
    OperatorKind,
    PlanForm,
    ShipStrategy,
)
from flinkish_spark.protocol.statistics import (
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
    StatisticsHistory,
)

_MOST_LETTERS = 46
#: Fill and border colours by the vertex's first operator; borders differ in brightness, too.
_COLOURS = {
    OperatorKind.SOURCE: ("#e8f1fb", "#2b6cb0"),
    OperatorKind.STATEFUL: ("#fdf3dc", "#b7791f"),
    OperatorKind.SINK: ("#e6f4ea", "#2f7d4f"),
}
_OTHERS = ("#f4f4f5", "#5f6368")


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
        f"digraph {_quote(_short(graph.job))} {{",
        '  rankdir=LR; node [shape=box, style="rounded,filled", fontname=monospace, fontsize=11];',
    ]
    for vertex in graph.vertices:
        fill, border = _colours(vertex)
        # In DOT a line that is not centred ends with \l.
        label = "".join(f"{_escape(line)}\\l" for line in _lines(vertex, graph))
        lines.append(f'  "{vertex.id}" [label="{label}", fillcolor="{fill}", color="{border}"];')
    for front, behind, says in _edges(graph):
        lines.append(f'  "{front}" -> "{behind}" [label={_quote(says)}];')
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
    found = []
    for one in vertex.operators:
        again = f" {one.runs}\N{MULTIPLICATION SIGN}" if one.runs > 1 else ""
        found.append(_short(f"{one.title} · {one.runs_in.value}{again}"))
    shares, tasks = vertex.operators[0].shares, vertex.parallelism
    facts = ["tasks as read" if tasks is None else "1 task" if tasks == 1 else f"{tasks} tasks"]
    if shares:
        facts = [_short(f"tasks of {graph.by_id[shares].title}")]
    if vertex.max_parallelism is not None:
        facts.append(f"state in {vertex.max_parallelism} key groups")
    return [*found, " · ".join(facts)]


def _edges(graph: JobGraph) -> Iterator[tuple[str, str, str]]:
    """Yield the edges between vertices: from, to, label."""
    vertex_of = {one.id: vertex.id for vertex in graph.vertices for one in vertex.operators}
    for vertex in graph.vertices:
        found: dict[str, list[str]] = {}
        for one in vertex.operators:
            for edge in one.inputs:
                if vertex_of[edge.source] != vertex.id:
                    found.setdefault(vertex_of[edge.source], []).append(_label(edge, one))
        for front, says in found.items():
            yield front, vertex.id, ", ".join(dict.fromkeys(says))


def _label(edge: JobEdge, behind: JobOperator) -> str:
    by = f" {', '.join(behind.keys)}" if edge.ship.value == "HASH" and behind.keys else ""
    output = f" [{edge.output}]" if edge.output else ""
    return _short(f"{edge.ship.value}{by}{output}", 22)


def _short(text: str, most: int = _MOST_LETTERS) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")


def _as_entities(text: str) -> str:
    return "".join(one if one.isalnum() or one in " .,:·()[]_-" else f"#{ord(one)};" for one in text)


def _colours(vertex: JobVertex) -> tuple[str, str]:
    has_sink = any(one.kind is OperatorKind.SINK for one in vertex.operators)
    other = _COLOURS[OperatorKind.SINK] if has_sink else _OTHERS
    return _COLOURS.get(vertex.operators[0].kind, other)


# ----------------------------------------------------------------------------------------------------------
# The tree, with the durations of the last checkpoint.

#: Width of a line without a terminal.
_WIDTH = 120


def tree(graph: JobGraph, history: StatisticsHistory | None = None) -> Tree:
    """Return the graph as a tree that starts at the sources; a vertex with several inputs is shown once."""
    return _TreeBuilder(graph, _newest(history)).tree()


def text(graph: JobGraph, history: StatisticsHistory | None = None) -> str:
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(tree(graph, history))
    shown = console.file
    assert isinstance(shown, io.StringIO)
    return "\n".join(line.rstrip() for line in shown.getvalue().rstrip().splitlines())


def print_tree(graph: JobGraph, history: StatisticsHistory | None = None) -> None:
    Console(width=None if Console().is_terminal else _WIDTH).print(tree(graph, history))


def _newest(history: StatisticsHistory | None) -> CheckpointStatistics | None:
    entries = () if history is None else history.entries
    done = [one for one in reversed(entries) if one.status is CheckpointStatus.COMPLETED]
    return next((one for one in done if one.rows), done[0] if done else None)


class _TreeBuilder:
    def __init__(self, graph: JobGraph, newest: CheckpointStatistics | None) -> None:
        self._graph, self._newest = graph, newest
        self._numbers = {vertex.id: number for number, vertex in enumerate(graph.vertices, start=1)}
        self._vertex_of = {one.id: vertex.id for vertex in graph.vertices for one in vertex.operators}
        self._cost = {one.uid: one for one in (() if newest is None else newest.participants)}
        self._shown: set[str] = set()

    def tree(self) -> Tree:
        made = Tree(Text(self._head()), guide_style="dim")
        for vertex in self._graph.vertices:
            if not vertex.inputs:
                self._add(made, vertex, ())
        return made

    def _head(self) -> str:
        graph = self._graph
        scans = sum(graph.scans.values())
        found = (
            f"{graph.job}: {_format_count(len(graph.vertices), 'vertex', 'vertices')}; a micro-batch has "
            f"{_format_count(scans, 'scan')} and {_format_count(graph.shuffles, 'shuffle')}"
        )
        newest = self._newest
        if newest is None:
            return found
        took = newest.durations
        said = _facts(
            (newest.rows, "{:,} rows"),
            (newest.bytes_staged, "{:,} bytes"),
            (took.sync_ms, "staged in {} ms"),
            (took.commit_ms, "committed in {} ms"),
            (took.end_to_end_ms, "{} ms in all"),
        )
        return f"{found}\nthe newest checkpoint with rows, {newest.checkpoint}: {said}"

    def _add(self, tree: Tree, vertex: JobVertex, ways: Iterable[tuple[JobEdge, JobOperator]]) -> None:
        title = Text()
        for edge, operator in ways:
            moved = "".join(f"{one.value}, then " for one in edge.moved)
            by = f" by {', '.join(operator.keys)}" if edge.ship is ShipStrategy.HASH and operator.keys else ""
            output = f" of the side output '{edge.output}'" if edge.output else ""
            title.append(f"{moved}{edge.ship.value}{by}{output}: {edge.why.value}\n", "cyan")
        title.append(f"[{self._numbers[vertex.id]}] ", "dim")
        title.append(vertex.name, "bold")
        if vertex.id in self._shown:
            title.append(" (shown above)", "dim")
            tree.add(title)
            return
        self._shown.add(vertex.id)
        title.append(f"  {self._size(vertex)}", "dim")
        branch = tree.add(title)
        for operator in vertex.operators:
            branch.add(Text("\n".join(self._lines(operator, vertex))))
        for behind in self._graph.vertices:
            found = [
                (edge, operator)
                for operator in behind.operators
                for edge in operator.inputs
                if self._vertex_of[edge.source] == vertex.id != behind.id
            ]
            if found:
                self._add(branch, behind, found)

    def _size(self, vertex: JobVertex) -> str:
        first = vertex.operators[0]
        if first.shares:
            return f"in the tasks of {self._graph.by_id[first.shares].title}"
        if vertex.parallelism is None:
            is_read = first.kind is OperatorKind.SOURCE
            return "as many tasks as its system has partitions" if is_read else "as many tasks as it reads"
        return _format_count(vertex.parallelism, "task")

    def _lines(self, operator: JobOperator, vertex: JobVertex) -> Iterator[str]:
        facts = [operator.does, f"in {'the JVM' if operator.runs_in.value == 'JVM' else 'Python'}"]
        if operator.runs > 1:
            facts.append(f"{operator.runs} times in each micro-batch")
        if operator.uid and operator.uid != operator.name:
            facts.append(f"uid {operator.uid}")
        if operator.has_state:
            by = f"by {', '.join(operator.keys)}" if operator.keys else "by partition"
            facts.append(f"state {by}, {operator.max_parallelism} key groups")
        yield f"{operator.title}: {'; '.join(fact for fact in facts if fact)}"
        for edge in operator.inputs:
            if self._vertex_of[edge.source] == vertex.id:
                yield f"  {edge.why.value}"
        cost = self._cost.get(operator.uid) if operator.uid else None
        if cost is not None and (said := _cost(cost)):
            yield f"  checkpoint {self._newest.checkpoint}: {said}" if self._newest else ""


def _cost(one: ParticipantStatistics) -> str:
    said = _facts(
        (one.rows, "{:,} rows"),
        (one.bytes, "{:,} bytes"),
        (one.sync_ms, "staged in {} ms"),
        (one.commit_ms, "committed in {} ms"),
        (one.late_dropped, "{:,} late records dropped"),
    )
    return ", ".join(filter(None, [said, *(f"{name} {n:,}" for name, n in sorted(one.counts.items()))]))


def _facts(*facts: tuple[int | None, str]) -> str:
    return ", ".join(text.format(number) for number, text in facts if number is not None)


def _format_count(number: int, one: str, many: str = "") -> str:
    if number == 0:
        return f"no {many or one + 's'}"
    return f"{number} {one if number == 1 else many or one + 's'}"
