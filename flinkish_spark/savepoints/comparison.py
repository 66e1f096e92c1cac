"""A dry run of a restore: compares a program with a savepoint, or with another program, by uid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.html import html_table
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.restore import (
    JobShape,
    Misfit,
    NonRestoredState,
    Problem,
    RestoreReport,
    RestoreRules,
    check_restore,
)
from flinkish_spark.protocol.savepoints import OperatorState, SavedChain, SavepointMetadata, SourceFacts
from flinkish_spark.savepoints.files import RestoreSettings, savepoint_at
from flinkish_spark.savepoints.restore import chains_of_savepoint, job_shape

#: Parts of the savepoint that the program does not have.
_MISSING = {
    Misfit.OPERATOR_MISSING: "operator",
    Misfit.SOURCE_MISSING: "source",
    Misfit.HOOK_MISSING: "hook",
}


class Fate(Choice):
    """The outcome of a restore for one uid."""

    #: It continues with its state, or from its position.
    RESTORED = "restored"
    #: It begins without state.
    NEW = "new"
    #: The program does not have it any more.
    DROPPED = "dropped"
    #: It has changed so that its state, or its position, cannot be restored.
    REFUSED = "refused"


@dataclass(frozen=True)
class ComparedPart:
    #: The uid; for a hook its name, for a chain that of its last operator.
    uid: str
    fate: Fate
    #: ``source``, ``operator``, ``hook`` or ``chain``.
    what: str
    #: A description, or the reason of a refusal.
    says: str


@dataclass(frozen=True)
class Comparison:
    """The outcome of a restore; prints one line for each part.

    Parameters
    ----------
    parts
        Sources and operators of the program in their order, then parts that it does not have any more.
    is_refused
        Whether the restore would be refused.
    """

    parts: tuple[ComparedPart, ...]
    is_refused: bool

    def uids(self, fate: Fate) -> tuple[str, ...]:
        """Return the uids with this fate."""
        return tuple(one.uid for one in self.parts if one.fate is fate)

    def _repr_html_(self) -> str:
        rows = [(one.uid, one.fate.value, one.what, one.says) for one in self.parts]
        verdict = "The restore would be refused" if self.is_refused else "The restore would go through"
        return html_table(rows, columns=("uid", "fate", "what", "says"), caption=verdict)

    def __str__(self) -> str:
        rows = [(one.uid, one.fate.value, one.what, one.says) for one in self.parts]
        widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
        return "\n".join("  ".join([*(row[at].ljust(widths[at]) for at in range(3)), row[3]]) for row in rows)


def compare_with_savepoint(
    graph: StreamGraph,
    plan: Callable[[StreamGraph], PlannedJob],
    hooks: Collection[str],
    settings: RestoreSettings,
) -> Comparison:
    saved = savepoint_at(settings.place).metadata()
    graph = replace(graph, begun_chains=chains_of_savepoint(graph, saved))
    return compare_saved(saved, job_shape(graph, plan(graph), hooks), settings.rules)


def make_initial_metadata(
    graph: StreamGraph, planned: PlannedJob, hooks: Collection[str]
) -> SavepointMetadata:
    """Return the metadata of a savepoint that a program would write before reading any record."""
    chains = tuple(SavedChain(chain, {}, sinks) for chain, sinks in planned.read_by.items())
    return SavepointMetadata(
        savepoint="0" * 32,
        job="",
        job_uuid=JobUuid("0" * 32),
        checkpoint=CheckpointId(1),
        lineage=Lineage(0),
        batch=BatchId(0),
        decided_at_ms=0,
        shuffle_partitions=1,
        operators={
            uid: OperatorState(shape.max_parallelism, shape.key_types, meaning=shape.meaning)
            for uid, shape in planned.operators.items()
        },
        sources={node.uid: SourceFacts(node.source.kind) for node in graph.sources},
        chains=chains,
        hooks=dict.fromkeys(hooks),
    )


def compare_saved(saved: SavepointMetadata, job: JobShape, rules: RestoreRules) -> Comparison:
    report = check_restore(saved, job, rules)
    missing = check_restore(saved, job, RestoreRules(unpositioned=rules.unpositioned)).problems
    return Comparison(tuple(_parts(saved, job, report, missing)), bool(report.problems))


def _parts(
    saved: SavepointMetadata, job: JobShape, report: RestoreReport, missing: Collection[Problem]
) -> Iterator[ComparedPart]:
    refused: dict[str, list[Problem]] = {}
    for problem in report.problems:
        if problem.misfit not in _MISSING:
            refused.setdefault(problem.subject, []).append(problem)
    own: Mapping[str, str] = {
        **{uid: f"source {shape.kind}" for uid, shape in job.sources.items()},
        **{
            uid: f"operator state by {', '.join(shape.key_types) or 'partition'}, "
            f"{shape.max_parallelism} key groups"
            for uid, shape in job.operators.items()
        },
    }
    for uid, said in own.items():
        what, _, says = said.partition(" ")
        problems = refused.pop(uid, [])
        if problems:
            reasons = "; ".join(f"{one.misfit.value}: {one.detail}" for one in problems)
            yield ComparedPart(uid, Fate.REFUSED, what, reasons)
        elif uid in report.restored:
            yield ComparedPart(uid, Fate.RESTORED, what, says)
        else:
            yield ComparedPart(uid, Fate.NEW, what, "it begins without state")
    for hook in report.hooks:
        yield ComparedPart(hook, Fate.RESTORED, "hook", "it gets its state back")
    for problem in missing:
        if problem.misfit in _MISSING:
            says = "its state is dropped"
            if problem in report.problems:
                says = f"refused unless non_restored=NonRestoredState.{NonRestoredState.ALLOW.name}"
            yield ComparedPart(problem.subject, Fate.DROPPED, _MISSING[problem.misfit], says)
    for subject, problems in refused.items():
        reasons = "; ".join(f"{one.misfit.value}: {one.detail}" for one in problems)
        yield ComparedPart(subject, Fate.REFUSED, "chain", reasons)
