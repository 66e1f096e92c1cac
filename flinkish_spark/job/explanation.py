"""The job graph as a tree for the terminal, with what the last checkpoint has cost."""

from __future__ import annotations

import io
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
    ShipStrategy,
)
from flinkish_spark.protocol.statistics import (
    CheckpointStatistics,
    CheckpointStatus,
    ParticipantStatistics,
    StatisticsHistory,
)

#: Letters of a line where there is no terminal that says it.
_WIDTH = 120


def tree(graph: JobGraph, history: StatisticsHistory | None = None) -> Tree:
    """Return the graph as a tree from its sources on; what is read on several ways is shown once."""
    return _Reading(graph, _newest(history)).tree()


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


class _Reading:
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
            f"{graph.job}: {_counted(len(graph.vertices), 'vertex', 'vertices')}; a micro-batch has "
            f"{_counted(scans, 'scan')} and {_counted(graph.shuffles, 'shuffle')}"
        )
        newest = self._newest
        if newest is None:
            return found
        took = newest.durations
        facts = [
            None if newest.rows is None else f"{newest.rows:,} rows",
            None if newest.bytes_staged is None else f"{newest.bytes_staged:,} bytes",
            None if took.sync_ms is None else f"staged in {took.sync_ms} ms",
            None if took.commit_ms is None else f"committed in {took.commit_ms} ms",
            None if took.end_to_end_ms is None else f"{took.end_to_end_ms} ms in all",
        ]
        said = ", ".join(fact for fact in facts if fact is not None)
        return f"{found}\nthe newest checkpoint with rows, {newest.checkpoint}: {said}"

    def _add(self, tree: Tree, vertex: JobVertex, ways: Iterable[tuple[JobEdge, JobOperator]]) -> None:
        title = Text()
        for edge, operator in ways:
            title.append(f"{_way(edge, operator)}\n", "cyan")
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
        return _counted(vertex.parallelism, "task")

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


def _way(edge: JobEdge, operator: JobOperator) -> str:
    moved = "".join(f"{one.value}, then " for one in edge.moved)
    by = f" by {', '.join(operator.keys)}" if edge.ship is ShipStrategy.HASH and operator.keys else ""
    output = f" of the side output '{edge.output}'" if edge.output else ""
    return f"{moved}{edge.ship.value}{by}{output}: {edge.why.value}"


def _cost(one: ParticipantStatistics) -> str:
    facts = [
        None if one.rows is None else f"{one.rows:,} rows",
        None if one.bytes is None else f"{one.bytes:,} bytes",
        None if one.sync_ms is None else f"staged in {one.sync_ms} ms",
        None if one.commit_ms is None else f"committed in {one.commit_ms} ms",
        None if one.late_dropped is None else f"{one.late_dropped:,} late records dropped",
        *(f"{name} {count:,}" for name, count in sorted(one.counts.items())),
    ]
    return ", ".join(fact for fact in facts if fact is not None)


def _counted(number: int, one: str, many: str = "") -> str:
    if number == 0:
        return f"no {many or one + 's'}"
    return f"{number} {one if number == 1 else many or one + 's'}"
