"""The job graph as a picture: as DOT for Graphviz, and as SVG that needs nothing else.

Where things stand is computed by grandalf (Sugiyama's layers, barycentres for few crossings).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.job.explanation import text
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.job_graph import JobEdge, JobGraph, JobOperator, JobVertex, OperatorKind

#: Of the font, which has the same width for every letter.
_LETTER, _LINE, _MARGIN = 7.0, 17.0, 10.0
#: Between layers there has to be room for what an edge says.
_BETWEEN_LAYERS, _BETWEEN_BOXES = 120.0, 26.0
_MOST_LETTERS = 46
#: Fill and border by what a vertex begins with; dark enough borders to be told apart without colours.
_COLOURS = {
    OperatorKind.SOURCE: ("#e8f1fb", "#2b6cb0"),
    OperatorKind.STATEFUL: ("#fdf3dc", "#b7791f"),
    OperatorKind.SINK: ("#e6f4ea", "#2f7d4f"),
}
_OTHERS = ("#f4f4f5", "#5f6368")
_STYLE = (
    "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:11.6px"
)


class PlanForm(Choice):
    """In which form a plan is wanted."""

    #: Flink's, for its plan visualiser.
    JSON = "JSON"
    #: Graphviz's.
    DOT = "DOT"
    SVG = "SVG"


def plan_in(graph: JobGraph, form: PlanForm) -> str:
    """Return a graph in a form."""
    match form:
        case PlanForm.JSON:
            return json.dumps(graph.execution_plan(), indent=2)
        case PlanForm.DOT:
            return dot(graph)
        case PlanForm.SVG:
            return svg(graph)


def dot(graph: JobGraph) -> str:
    """Return the graph in the language of Graphviz, a node per vertex.

    Examples
    --------
    >>> print(dot(JobGraph("empty", ())))
    digraph "empty" {
      rankdir=LR; node [shape=box, style="rounded,filled", fontname=monospace, fontsize=11];
    }
    """
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


def svg(graph: JobGraph) -> str:
    """Return the graph as one SVG element, from sources on the left to sinks on the right.

    Raises
    ------
    ConfigError
        The package that lays it out is missing.
    """
    boxes, edges, width, height = _laid_out(graph)
    title = f"Job graph of {_short(graph.job)}: {len(graph.vertices)} vertices, {graph.shuffles} shuffles"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" style="max-width:100%;height:auto;{_STYLE}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#5f6368"/></marker></defs>',
        *(_drawn_edge(edge) for edge in edges),
        *(_drawn_box(box) for box in boxes),
        *(_drawn_label(edge) for edge in edges),
        "</svg>",
    ]
    return "\n".join(parts)


# -- what is said ---------------------------------------------------------------------------------
def html(graph: JobGraph) -> str:
    """Return what a notebook shows: the picture, or the tree as text where the package for it is missing."""
    try:
        return svg(graph)
    except ConfigError:
        return f"<pre>{escape(text(graph))}</pre>"


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


# -- where it stands ------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Box:
    vertex: JobVertex
    lines: tuple[str, ...]
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class _Line:
    """An edge by the points that it goes through, and where its words stand."""

    points: tuple[tuple[float, float], ...]
    says: str


class _View:
    """What grandalf asks of a vertex; it lays layers out from the top down, so both sides are exchanged."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        self.h = max(map(len, lines)) * _LETTER + 2 * _MARGIN
        self.w = len(lines) * _LINE + 2 * _MARGIN
        self.xy = (0.0, 0.0)


def _laid_out(graph: JobGraph) -> tuple[list[_Box], list[_Line], float, float]:
    try:
        from grandalf.graphs import Edge, Graph, Vertex
        from grandalf.layouts import SugiyamaLayout
        from grandalf.routing import EdgeViewer, route_with_lines
        from grandalf.utils import Poset
    except ImportError:
        raise ConfigError(
            "a picture of the job graph needs the package grandalf",
            why="it is not installed in this Python",
            what_to_do=f"{how_to_install('graph')}; explain() and PlanForm.DOT do without",
        ) from None

    vertices = {vertex.id: Vertex(vertex) for vertex in graph.vertices}
    for vertex in vertices.values():
        vertex.view = _View(_lines(vertex.data, graph))
    edges = [Edge(vertices[front], vertices[behind], data=says) for front, behind, says in _edges(graph)]
    for edge in edges:
        edge.view = EdgeViewer()
    boxes: list[_Box] = []
    lines: list[_Line] = []
    width, below = 2 * _MARGIN, _MARGIN
    for part in Graph(list(vertices.values()), edges).C:
        # It keeps them in a set, and what is drawn must be the same each time.
        part.sE = Poset(edge for edge in edges if edge in part.sE)
        layout = SugiyamaLayout(part)
        layout.xspace, layout.yspace, layout.route_edge = _BETWEEN_BOXES, _BETWEEN_LAYERS, route_with_lines
        layout.init_all()
        layout.draw(4)
        views = [one.view for one in part.sV]
        left = min(view.xy[1] - view.h / 2 for view in views)
        top = min(view.xy[0] - view.w / 2 for view in views)
        right, down = _MARGIN - left, below - top
        for one in part.sV:
            view = one.view
            x, y = view.xy[1] + right, view.xy[0] + down
            boxes.append(_Box(one.data, view.lines, x - view.h / 2, y - view.w / 2, view.h, view.w))
        placed = {box.vertex.id: box for box in boxes}
        for edge in part.sE:
            inner = [(y + right, x + down) for x, y in edge.view._pts[1:-1]]
            lines.append(_line(placed, edge, inner))
        width = max(width, max(box.left + box.width for box in boxes) + _MARGIN)
        below = max(box.top + box.height for box in boxes) + _BETWEEN_BOXES
    return boxes, lines, width, below - _BETWEEN_BOXES + _MARGIN


def _line(placed: Mapping[str, _Box], edge: object, inner: list[tuple[float, float]]) -> _Line:
    front, behind = (placed[one.data.id] for one in edge.v)  # type: ignore[attr-defined]
    begin = (front.left + front.width, front.top + front.height / 2)
    end = (behind.left - 2, behind.top + behind.height / 2)
    between = sorted(point for point in inner if begin[0] < point[0] < end[0])
    return _Line((begin, *between, end), str(edge.data))  # type: ignore[attr-defined]


# -- how it is drawn ------------------------------------------------------------------------------
def _drawn_box(box: _Box) -> str:
    fill, border = _colours(box.vertex)
    rows = []
    for number, line in enumerate(box.lines):
        y = box.top + _MARGIN + (number + 0.75) * _LINE
        # What is said of the tasks stands below what runs in them.
        colour = "#5f6368" if number == len(box.lines) - 1 else "#1a1a1a"
        rows.append(f'<text x="{box.left + _MARGIN:.1f}" y="{y:.1f}" fill="{colour}">{escape(line)}</text>')
    frame = (
        f'<rect x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" '
        f'rx="6" fill="{fill}" stroke="{border}" stroke-width="1.4"/>'
    )
    whole = escape(_short(box.vertex.name, 400))
    return f'<g data-vertex="{box.vertex.id}"><title>{whole}</title>{frame}{"".join(rows)}</g>'


def _drawn_edge(line: _Line) -> str:
    x, y = line.points[0]
    path = [f"M{x:.1f} {y:.1f}"]
    for (before_x, before_y), (then_x, then_y) in pairwise(line.points):
        middle = (before_x + then_x) / 2
        path.append(f"C{middle:.1f} {before_y:.1f} {middle:.1f} {then_y:.1f} {then_x:.1f} {then_y:.1f}")
    look = 'fill="none" stroke="#5f6368" stroke-width="1.3" marker-end="url(#arrow)"'
    return f'<path d="{" ".join(path)}" {look}/>'


def _drawn_label(line: _Line) -> str:
    (before_x, before_y), (then_x, then_y) = line.points[-2:]
    x, y = (before_x + then_x) / 2, (before_y + then_y) / 2
    width = len(line.says) * _LETTER * 0.9 + 6
    behind = (
        f'<rect x="{x - width / 2:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="15" fill="#ffffff" '
        'fill-opacity="0.9"/>'
    )
    text = f'<text x="{x:.1f}" y="{y + 3:.1f}" text-anchor="middle" font-size="10.4" fill="#3c4043">'
    return f"{behind}{text}{escape(line.says)}</text>"


def _colours(vertex: JobVertex) -> tuple[str, str]:
    return _COLOURS.get(vertex.operators[0].kind, _sink_or_other(vertex))


def _sink_or_other(vertex: JobVertex) -> tuple[str, str]:
    has_sink = any(one.kind is OperatorKind.SINK for one in vertex.operators)
    return _COLOURS[OperatorKind.SINK] if has_sink else _OTHERS
