"""Restoring a savepoint into a new job directory, and rescaling to another number of shuffle partitions."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark.sql import SparkSession

from flinkish_spark.checkpoint.spark_log import SparkLog, place_of_bases
from flinkish_spark.connectors.kafka.client.admin import TopicPattern
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import InternalError, JobDirError, UserError
from flinkish_spark.core.job_dir import JobDir, seed_folder
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import make_directories
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.planning.rules.cut_chains import find_chain_ends
from flinkish_spark.planning.sink_rows import PlannedJob
from flinkish_spark.planning.stream_graph import StreamGraph
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.key_groups import BUNDLES_PER_PARTITION
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.plan_layout import Chain, NativeOperator, Position, ScanRole, source_of
from flinkish_spark.protocol.restore import (
    JobShape,
    Misfit,
    RestoreReport,
    SourceShape,
    begin_chain,
    check_chains,
    check_restore,
)
from flinkish_spark.protocol.savepoints import (
    ClaimMode,
    SavedChain,
    SavepointMetadata,
    Seed,
    SeededChain,
    SeedOrigin,
    StateFile,
)
from flinkish_spark.savepoints.export import export_state, make_durable
from flinkish_spark.savepoints.files import (
    RestoreSettings,
    SavepointDir,
    SavepointNotFoundError,
    savepoint_at,
)
from flinkish_spark.savepoints.seeds import (
    become_claimant,
    bundles_per_partition_of,
    find_beginning,
    find_claimant,
    find_layout,
    find_lost_seed,
    read_layout,
    read_seed,
    remove_below,
    shuffle_partitions_of,
    write_seed,
)

_OR_ALLOW = ", or allow it: non_restored=NonRestoredState.ALLOW"
_ADVICE = {
    Misfit.OPERATOR_MISSING: "give the operator its uid again" + _OR_ALLOW,
    Misfit.SOURCE_MISSING: "give the source its uid again" + _OR_ALLOW,
    Misfit.INPUT_MISSING: "read it again" + _OR_ALLOW,
    Misfit.HOOK_MISSING: "register the hook again" + _OR_ALLOW,
    Misfit.MAX_PARALLELISM: "use the stored number: it is fixed for the life of the state",
    Misfit.MEANING: "leave the operator as it was; or give it another uid, and allow its state to be left "
    "out: non_restored=NonRestoredState.ALLOW",
    Misfit.KEY_TYPE: "key by the stored type: other types have other key groups",
    Misfit.SOURCE_KIND: "use the kind of source that the savepoint was taken with",
    Misfit.NOT_POSITIONABLE: "make the DataFrame begin there, and say so: "
    "unpositioned=UnpositionedSources.BEGIN_WHERE_THEY_ARE",
    Misfit.CHAINS_JOINED: "leave operators and sinks on the streams that they were on",
    Misfit.FINISHED_CHANGED: "leave its readers as they were, or give the source another uid",
}


def job_shape(graph: StreamGraph, planned: PlannedJob, hooks: Collection[str]) -> JobShape:
    return JobShape(planned.operators, _sources(graph), planned.read_by, hooks)


def _sources(graph: StreamGraph) -> dict[str, SourceShape]:
    found = {}
    for node in graph.sources:
        pattern, topics = node.source.topic_pattern, node.source.topics
        inputs: Container[str] = TopicPattern(pattern) if pattern else frozenset(topics)
        found[node.uid] = SourceShape(node.source.kind, node.source.is_positionable, inputs)
    return found


def find_begun_chains(
    graph: StreamGraph, job_dir: JobDir, root: StoreSpec, restore: RestoreSettings | None
) -> frozenset[str] | None:
    """Return the names of the chains that a job has begun, or has to begin, with; None if it is free."""
    beginning = find_beginning(job_dir, root)
    layout = find_layout(job_dir)
    if layout is not None:
        return frozenset(one.chain for one in layout.operators)
    if beginning.seed is not None:
        return frozenset(one.chain.name for one in beginning.seed.chains)
    return None if restore is None else chains_of_savepoint(graph, savepoint_at(restore.place).metadata())


def chains_of_savepoint(graph: StreamGraph, metadata: SavepointMetadata) -> frozenset[str] | None:
    """Return the names of a savepoint's chains if a program's own chains do not fit it; else None."""
    sinks: dict[Chain, list[str]] = {}
    for sink in graph.sinks:
        for end in find_chain_ends(graph, sink.parent):
            sinks.setdefault(end.chain, []).append(sink.uid)
    problems = check_chains(metadata, JobShape({}, _sources(graph), sinks))
    return frozenset(saved.chain.name for saved in metadata.chains) if problems else None


@dataclass(frozen=True)
class Restore:
    """The restore of a job, at its first start and later ones.

    First everything is checked and nothing is written. Then, under the job's lock, the savepoint is claimed
    if the user wants that, its state files are copied below ``seeds/0/``, and ``seed.json`` is written. That
    is done before job.json exists, so a job with a restore never starts empty.
    """

    #: None for a start without a savepoint.
    settings: RestoreSettings | None
    graph: StreamGraph
    planned: PlannedJob
    job_dir: JobDir
    root: StoreSpec
    hooks: Collection[str] = ()

    def check(self) -> str:
        """Refuse a restore that cannot work; write nothing. Called before and after taking the lock."""
        begun, seed = self.job_dir.find_uuid() is not None, read_seed(self.job_dir, FIRST_LINEAGE)
        if self.settings is None:
            if seed is not None and not begun:
                raise self._to_refusal(
                    "was prepared for a restore and not started yet", "start it with the same restore"
                )
            self._find_needed_seed()
            return "" if seed is None else seed.savepoint
        if seed is not None:
            name = self._check_same(seed, self.settings)
            self._find_needed_seed()
            return name
        if begun:
            raise self._to_refusal(
                "has a job that did not begin with a savepoint", "restore into a new job_dir"
            )
        place = savepoint_at(self.settings.place)
        metadata = place.metadata()
        self._check_fit(metadata, self.settings)
        place.check_unclaimed(find_claimant(self.job_dir))
        place.check_files(self._files(metadata))
        sources = {node.uid: node.source for node in self.graph.sources}
        for begins in self._chains(metadata):
            for name, position in begins.positions.items():
                sources[source_of(name)].check_start(source_of(name), position)
        return metadata.savepoint

    def prepare(self, shuffle_partitions: int) -> str:
        """Write the seed of the savepoint into the job directory; return its name as :meth:`check` does."""
        name = self.check()
        if self.settings is None:
            return name
        place, folder = savepoint_at(self.settings.place), self.root.to_child(seed_folder(FIRST_LINEAGE))
        if read_seed(self.job_dir, FIRST_LINEAGE) is not None:
            again = self._find_needed_seed()
            if again is not None:
                _copy_durably(place, again.files, self.root.to_child(seed_folder(again.lineage)))
            return name
        metadata = place.metadata()
        report = self._check_fit(metadata, self.settings)
        if self.settings.claim is ClaimMode.CLAIM:
            place.claim(become_claimant(self.job_dir), self.root.url)
        # Left by a restore that was cut off.
        remove_below(folder)
        files = self._files(metadata)
        _copy_durably(place, files, folder)
        for node in self.graph.sources:
            if node.uid in metadata.sources and node.source.is_positionable:
                for fact, value in metadata.sources[node.uid].identity.items():
                    self.job_dir.record_fact(fact, value)
        write_seed(
            self.job_dir,
            Seed(
                lineage=FIRST_LINEAGE,
                origin=SeedOrigin.SAVEPOINT,
                savepoint=metadata.savepoint,
                checkpoint=metadata.checkpoint,
                shuffle_partitions=shuffle_partitions,
                chains=self._chains(metadata),
                hooks={hook: metadata.hooks[hook] for hook in report.hooks},
                finished=tuple(uid for uid in metadata.finished if uid in self.graph.uids()),
                files=files,
                claim=self.settings.claim,
                path=self.settings.place.to_text(),
                times=metadata.times,
            ),
        )
        return name

    def _check_fit(self, metadata: SavepointMetadata, settings: RestoreSettings) -> RestoreReport:
        report = check_restore(metadata, job_shape(self.graph, self.planned, self.hooks), settings.rules)
        if report.problems:
            first, *_ = report.problems
            reasons = "; ".join(f"{p.subject}: {p.misfit.value} ({p.detail})" for p in report.problems)
            raise UserError(
                f"the savepoint {settings.place.url} does not fit this job: {reasons}",
                what_to_do=_ADVICE[first.misfit],
                problems=tuple(report.problems),
            )
        return report

    def _files(self, metadata: SavepointMetadata) -> tuple[StateFile, ...]:
        return tuple(file for file in metadata.files if file.operator in self.planned.operators)

    def _chains(self, metadata: SavepointMetadata) -> tuple[SeededChain, ...]:
        """Return the beginnings of the job's chains, without operators that have no state file."""
        shape = job_shape(self.graph, self.planned, self.hooks)
        begun = [
            begin_chain(chain, sinks, metadata.chains, shape.positionable)
            for chain, sinks in shape.chains.items()
        ]
        return keep_stateful_operators(begun, metadata.files)

    def _check_same(self, seed: Seed, settings: RestoreSettings) -> str:
        """Refuse a restore from another savepoint than the job began with."""
        try:
            same = savepoint_at(settings.place).metadata().savepoint == seed.savepoint
        except SavepointNotFoundError:
            # The job has deleted a claimed savepoint, or the user one that is not needed any more.
            same = settings.place.to_text() == seed.path
        if not same:
            raise self._to_refusal(f"began with another savepoint, {seed.path}", "restore into a new job_dir")
        return seed.savepoint

    def _find_needed_seed(self) -> Seed | None:
        """Return the seed whose files have to be copied from the savepoint again; None if it is complete."""
        lost = find_lost_seed(self.job_dir, self.root)
        if lost is None:
            return None
        to_do = "begin with a new job_dir, and with a savepoint if you have one"
        if lost.origin is SeedOrigin.SAVEPOINT:
            to_do = "start it with the savepoint that it was restored from; or " + to_do
            place = None if self.settings is None else savepoint_at(self.settings.place)
            if place is not None and place.is_there(lost.savepoint):
                place.check_unclaimed(find_claimant(self.job_dir))
                place.check_files(lost.files)
                return lost
        raise JobDirError(
            f"the job directory {self.root.url} has neither a checkpoint nor the state it began with",
            why="state that a job begins with is kept until its first checkpoint, and the checkpoints are "
            "gone: they are deleted when a job with DELETE_ON_CANCELLATION is cancelled",
            what_to_do=to_do,
        )

    def _to_refusal(self, what: str, to_do: str) -> JobDirError:
        return JobDirError(
            f"the job directory {self.root.url} {what}",
            why="only the first start of a job directory can restore; later starts use its own checkpoints",
            what_to_do=to_do,
        )


def _copy_durably(place: SavepointDir, files: Collection[StateFile], folder: StoreSpec) -> None:
    place.copy_to_place(files, folder)
    make_durable(folder, files)


def keep_stateful_operators(
    chains: Collection[SeededChain], files: Collection[StateFile]
) -> tuple[SeededChain, ...]:
    there = {(file.operator, file.chain) for file in files}
    return tuple(
        replace(chain, states={uid: name for uid, name in chain.states.items() if (uid, name) in there})
        for chain in chains
    )


def check_rescale(
    job_dir: JobDir,
    root: StoreSpec,
    sources: Sequence[SourceNode],
    wanted: int,
    natives: Sequence[NativeOperator] = (),
) -> None:
    """Refuse another number of shuffle partitions for a job that cannot be rescaled."""
    now = _find_former_partitions(job_dir, root, wanted)
    if now is None:
        return
    if natives:
        native = natives[0]
        raise UserError(
            f"this job runs with {now} shuffle partitions and cannot change to {wanted}",
            why=f"'{native.uid}' contains {native.what}, and Spark does not move its own state to other "
            "partitions",
            what_to_do=f"set spark.sql.shuffle.partitions to {now} again",
        )
    fixed = [node.uid for node in sources if not node.source.is_positionable]
    if not fixed:
        return
    raise UserError(
        f"this job runs with {now} shuffle partitions and cannot change to {wanted}",
        why=f"its source '{fixed[0]}' is a DataFrame, or a Delta table that Spark's own source reads, and "
        "cannot be positioned",
        what_to_do=f"set spark.sql.shuffle.partitions to {now} again; or stop with a savepoint and "
        "restore it into a new job_dir, with a DataFrame that begins where the savepoint ends",
    )


def _find_former_partitions(job_dir: JobDir, root: StoreSpec, wanted: int) -> int | None:
    now = shuffle_partitions_of(job_dir, find_beginning(job_dir, root))
    return None if now == wanted else now


@dataclass(frozen=True)
class Rescaling:
    """Rescales a job to another number of shuffle partitions; a :class:`.Reseeding`.

    Spark fixes the number for the life of a checkpoint. Its own repartitioning (SPARK-54590) moves keys by
    the hash of the grouping column, which is a route that depends on the number of partitions; and it adds a
    micro-batch to Spark's logs that no staged file covers. So the state is exported as for a savepoint, and
    the next lineage begins with it.
    """

    spark: SparkSession
    #: The plan of the graph; independent of the number of partitions and the beginning.
    planned: PlannedJob
    sources: Sequence[SourceNode]
    job_dir: JobDir
    root: StoreSpec
    log: SparkLog
    shuffle_partitions: int

    def is_wanted(self, log_began_in: Lineage) -> bool:
        return _find_former_partitions(self.job_dir, self.root, self.shuffle_partitions) is not None

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Write the seed of `lineage`: state and positions of `decision`, or else the present beginning."""
        check_rescale(self.job_dir, self.root, self.sources, self.shuffle_partitions)
        # Left by a start that was cut off before the lineage began.
        remove_below(self.root.to_child(seed_folder(lineage)))
        seed = self._make_same_seed(lineage) if decision is None else self._from_checkpoint(decision, lineage)
        write_seed(self.job_dir, seed)

    def _from_checkpoint(self, decision: Decision, lineage: Lineage) -> Seed:
        beginning = find_beginning(self.job_dir, self.root)
        before = shuffle_partitions_of(self.job_dir, beginning)
        if before is None:
            raise InternalError("a job that has a checkpoint has no number of shuffle partitions")
        folder = self.root.to_child(seed_folder(lineage))
        if folder.is_local:
            # Tasks make folders in it.
            make_directories(folder.folder)
        layout, bases = read_layout(self.job_dir), place_of_bases(self.root, self.log)
        bundled = bundles_per_partition_of(self.job_dir, beginning)
        files, _ = export_state(
            self.spark, folder, self.log, bases, decision, self.planned.operators, layout, before, bundled
        )
        make_durable(folder, files)
        positions = layout.positions(LoggedOffsets.parse(decision.offsets_text).sources)
        chains = keep_stateful_operators(self._chains(positions), files)
        number = self.shuffle_partitions
        return Seed(lineage, SeedOrigin.RESCALE, "", decision.checkpoint, number, chains, files=files)

    def _make_same_seed(self, lineage: Lineage) -> Seed:
        """Return a seed with the present log's beginning, since no checkpoint was decided in it."""
        known = find_beginning(self.job_dir, self.root)
        if known.seed is None:
            chains = keep_stateful_operators(self._chains(self._first_positions()), ())
            checkpoint = CheckpointId(0)
            return Seed(lineage, SeedOrigin.RESCALE, "", checkpoint, self.shuffle_partitions, chains)
        before, after = known.folder.open(), self.root.to_child(seed_folder(lineage)).open()
        for file in known.seed.files:
            after.put(file.path, before.read(file.path))
        # The claim on the savepoint stays, too: there was no checkpoint since.
        return replace(
            known.seed,
            lineage=lineage,
            shuffle_partitions=self.shuffle_partitions,
            bundles_per_partition=BUNDLES_PER_PARTITION,
        )

    def _first_positions(self) -> dict[str, dict[str, Position]]:
        """Return where Spark's own Kafka source began; other sources record that themselves."""
        recorded = self.log.first_positions()
        found: dict[str, dict[str, Position]] = {}
        if not recorded:
            # The query was never started, and has no layout.
            return found
        layout, numbers = read_layout(self.job_dir), dict[tuple[ScanRole, str], int]()
        for at, scan in enumerate(layout.scans):
            # Spark numbers sources, and chains without a beginning share one.
            number = numbers.setdefault((scan.role, scan.uid), len(numbers))
            if scan.role is ScanRole.RECORDS and number in recorded:
                for chain, name in layout.inputs_of(at):
                    found.setdefault(chain, {})[name] = recorded[number]
        return found

    def _chains(self, positions: Mapping[str, Mapping[str, Position]]) -> tuple[SeededChain, ...]:
        chains = self.planned.read_by
        saved = [SavedChain(chain, positions.get(chain.name, {}), sinks) for chain, sinks in chains.items()]
        positionable = {node.uid for node in self.sources if node.source.is_positionable}
        return tuple(begin_chain(chain, sinks, saved, positionable) for chain, sinks in chains.items())
