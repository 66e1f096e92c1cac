"""The rule that lets operators in the same tasks share scans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flinkish_spark.planning.logical_plan import (
    LogicalPlan,
    Reader,
    SharedScan,
    TaskGroup,
)
from flinkish_spark.planning.recorded_functions import RecordedTransform
from flinkish_spark.planning.rules.set_apart import is_set_apart
from flinkish_spark.planning.stream_graph import (
    Path,
    Step,
    StreamGraph,
    TransformNode,
)
from flinkish_spark.planning.transforms import RecordFunction, find_frame_function
from flinkish_spark.protocol.plan_layout import PlanLayout, ScanRole


def share_scans(plan: LogicalPlan) -> LogicalPlan:
    """Note the scans of each task group, and where the paths of their readers part."""
    groups = (replace(group, scans=tuple(_find_shared_scans(plan, group))) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


def _find_shared_scans(plan: LogicalPlan, group: TaskGroup) -> Iterator[SharedScan]:
    # Readers share a scan if they begin at the same positions; in a live log, if they share it there.
    scans: dict[object, list[Reader]] = {}
    for one in group.readers:
        label = plan.beginning.find_input_label(one.chain, one.name)
        known = id(one.path.base), label, _find_recorded_scan(plan.recorded, one)
        scans.setdefault(known, []).append(one)
    for readers in scans.values():
        for common, branches in group_by_common_steps(plan.graph, [one.path for one in readers]):
            yield SharedScan(common, tuple(tuple(readers[at] for at in numbers) for numbers in branches))


def _find_recorded_scan(layout: PlanLayout | None, reader: Reader) -> int | None:
    """Return the number of an input's scan in the live log; None in a new log."""
    if layout is None:
        return None
    records = (at for at, scan in enumerate(layout.scans) if scan.role is ScanRole.RECORDS)
    return next((at for at in records if (reader.chain.name, reader.name) in layout.inputs_of(at)), None)


def group_by_common_steps(graph: StreamGraph, paths: Sequence[Path]) -> list[tuple[int, list[list[int]]]]:
    """Group paths that may share one scan: the steps after the common ones can run in one pass."""
    # Steps that assign event times, and recorded functions, must be among the common steps.
    known = [tuple(map(id, path.steps)) for path in paths]
    needed = {own[: _find_branch_start(graph, path.steps)] for own, path in zip(known, paths, strict=True)}
    behind: dict[tuple[int, ...], list[int]] = {}
    for number, own in enumerate(known):
        # With more common steps, if other paths need them.
        common = max((one for one in needed if one == own[: len(one)]), key=len)
        behind.setdefault(common, []).append(number)
    found = []
    for numbers in behind.values():
        alike: dict[tuple[int, ...], list[int]] = {}
        for number in numbers:
            alike.setdefault(known[number], []).append(number)
        at_each = enumerate(zip(*alike, strict=False))
        steps = next((at for at, steps in at_each if len(set(steps)) > 1), min(map(len, alike)))
        found.append((steps, [*alike.values()]))
    return found


def _find_branch_start(graph: StreamGraph, steps: Sequence[Step]) -> int:
    at = len(steps)
    while at and _can_run_in_branch(graph, steps[:at]) and find_frame_function(steps[at - 1]) is None:
        at -= 1
    while at and _can_run_in_branch(graph, steps[:at]) and find_frame_function(steps[at - 1]) is not None:
        at -= 1
    return at


def _can_run_in_branch(graph: StreamGraph, steps: Sequence[Step]) -> bool:
    """Return whether the last of these steps can run in one pass with steps of other paths."""
    step = steps[-1]
    if not isinstance(step, TransformNode) or is_set_apart(graph, steps):
        return False
    if find_frame_function(step) is not None:
        return True
    function: object = step.function
    if not isinstance(function, RecordFunction) or isinstance(function, RecordedTransform):
        return False
    return function.settings.parallelism is None and function.settings.resources is None
