"""Patterns in streams as a user writes them: `CEP.pattern(stream, pattern).process(...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from flinkish_spark.cep.compiler import compile_pattern
from flinkish_spark.cep.conditions import ColumnCondition
from flinkish_spark.cep.factories import Patterns
from flinkish_spark.cep.functions import Match, MeasuredMatches, PatternContext, PatternProcessFunction
from flinkish_spark.cep.pattern import Pattern
from flinkish_spark.cep.pattern_operator import LookedFor, PatternSearch
from flinkish_spark.cep.stages import OpenMatches, Skip
from flinkish_spark.core.elements import OutputTag, OutputType, TimeDomain
from flinkish_spark.core.errors import ConfigError, PatternError
from flinkish_spark.core.fields import Arity, check_arguments
from flinkish_spark.core.validation import check_function, instance_of
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.datastream.keyed_stream import KeyedStream
from flinkish_spark.planning.declare import declare_operator, infer_output, resolve_uid
from flinkish_spark.planning.stream_graph import KeyedEntry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Orders two events of one time: below, at or above zero.
Comparator = Callable[[Any, Any], int]


class CEP:
    """An entry point for patterns in streams, as Flink's library CEP; see docs/cep.md."""

    @staticmethod
    @check_arguments("stream", "comparator", pattern='give one, as Pattern.begin("first")')
    def pattern(
        stream: DataStream | KeyedStream, pattern: Pattern, comparator: Comparator | None = None
    ) -> PatternStream:
        """Look for a pattern among the events of each key; without a key, among all, in one task.

        Parameters
        ----------
        stream
            The events, in event time unless :meth:`PatternStream.in_processing_time` is called.
        comparator
            Orders events of the same time; by default their order of arrival.

        Raises
        ------
        PatternError
            The pattern cannot be compiled.
        ConfigError
            It is no stream, or no function of two events.
        """
        return CEP.patterns(stream, {"": pattern}, comparator)

    @staticmethod
    @check_arguments(stream="give it a stream: CEP.pattern(readings.key_by('cell'), pattern)")
    def patterns(
        stream: DataStream | KeyedStream,
        patterns: Mapping[str, Pattern],
        comparator: Annotated[Comparator, Arity(2)] | None = None,
    ) -> PatternStream:
        """Look for several patterns in one pass; the context's `pattern_name()` returns the one found.

        Parameters
        ----------
        patterns
            By name, which is part of the stored state. Each event is tried with them in this order.
        stream, comparator
            As of :meth:`pattern`, which also says what is raised.
        """
        if not patterns:
            raise ConfigError("no pattern is looked for", what_to_do='name one: {"rising": pattern}')
        wanted = []
        for name, pattern in patterns.items():
            wanted.append(LookedFor(name, compile_pattern(pattern), pattern.skip, pattern.stages))
        keyed = stream.key_by(_no_key, key="INT") if isinstance(stream, DataStream) else stream
        return PatternStream(keyed, PatternSearch(tuple(wanted), _Nothing(), compare=comparator))


class PatternStream:
    """A stream in which patterns are looked for; made by :class:`CEP`. Each method returns a new one."""

    def __init__(self, stream: KeyedStream, search: PatternSearch) -> None:
        self._stream, self._search = stream, search

    def in_processing_time(self) -> PatternStream:
        """Give events the time of their micro-batch, and process them as they arrive; none is late."""
        return self._replace_search(clock=TimeDomain.PROCESSING_TIME, time_field=None)

    @check_arguments(field='name a field: in_event_time("at")')
    def in_event_time(self, field: str | None = None) -> PatternStream:
        """Process events in the order of their own times, when the watermark reaches them.

        Parameters
        ----------
        field
            The field with the time: LONG in milliseconds, or TIMESTAMP. By default it is the time assigned by
            :meth:`DataStream.assign_timestamps_and_watermarks` or by the operator before. After a count
            window, whose last instant is the end of all time, a field is required.
        """
        return self._replace_search(clock=TimeDomain.EVENT_TIME, time_field=field)

    @check_arguments()
    def side_output_late_data(self, tag: OutputTag) -> PatternStream:
        """Send late events to a side output; by default they are dropped and counted."""
        return self._replace_search(late_output=tag)

    @check_arguments(limit="give one, as OpenMatches(10_000)")
    def limit_open_matches(self, limit: OpenMatches) -> PatternStream:
        """Limit the number of open partial matches per key and pattern.

        Parameters
        ----------
        limit
            For example ``OpenMatches(10_000, Overflow.DISCARD_OLDEST)``.
        """
        return self._replace_search(limit=limit)

    @check_arguments()
    def process(
        self,
        function: PatternProcessFunction,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Call a function with each match, and with each partial match that times out.

        Parameters
        ----------
        function
            Serialised here, once, together with the patterns' conditions.
        output
            Fields of the emitted rows; by default those in the type hint of `process_match`.
        uid, max_parallelism
            As of :meth:`KeyedStream.process`.

        Raises
        ------
        ConfigError, GraphError, SchemaError, UserFunctionError
            As of :meth:`KeyedStream.process`.
        """
        uid = resolve_uid(self._stream._environment.graph, uid, "process", self._stream._entry)
        if output is None:
            output = infer_output(
                function.process_match, f"'{uid}'", function.process_timed_out_match, is_iterable=True
            )
        return self._add_operator(function, output, uid, max_parallelism)

    def select(
        self,
        select: Callable[[Match], Any] | str,
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        timed_out: tuple[OutputTag, Callable[[Match, int], Any]] | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make one row of each match.

        Parameters
        ----------
        select
            From a match to a row; or SQL text with the columns of a row, where a field of an event follows
            the event's name in the pattern: ``first.user, last.amount AS amount``. Text is evaluated over
            columns of many matches if possible, and defines the fields: `output` must be left out. See
            docs/cep.md.
        timed_out
            A side output, and a function that makes a row for it from a partial match and the time when its
            window ended.
        output, uid, max_parallelism
            As of :meth:`process`; by default those in the type hint of `select`.
        """
        uid = resolve_uid(self._stream._environment.graph, uid, "select", self._stream._entry)
        if isinstance(select, str):
            if output is not None:
                raise ConfigError(
                    f"select() of '{uid}' got SQL text and an output",
                    why="the text defines the fields of the rows",
                    what_to_do="leave output out, or cast in the text: CAST(first.id AS BIGINT) AS id",
                )
            lost = None if timed_out is None else _make_timeout_select(uid, timed_out, _Select)
            return self._add_operator(MeasuredMatches(select, lost), None, uid, max_parallelism)
        if output is None:
            output = infer_output(select, f"'{uid}'", is_iterable=False)
        return self._add_select(select, False, output, uid, timed_out, max_parallelism)

    def flat_select(
        self,
        select: Callable[[Match], Iterable[Any] | None],
        *,
        output: OutputType | None = None,
        uid: str | None = None,
        timed_out: tuple[OutputTag, Callable[[Match, int], Iterable[Any] | None]] | None = None,
        max_parallelism: int | None = None,
    ) -> DataStream:
        """Make any number of rows of each match; see :meth:`select`."""
        uid = resolve_uid(self._stream._environment.graph, uid, "flat_select", self._stream._entry)
        if output is None:
            output = infer_output(select, f"'{uid}'", is_iterable=True)
        return self._add_select(select, True, output, uid, timed_out, max_parallelism)

    def _add_select(
        self,
        select: Callable[[Match], Any],
        is_flat: bool,
        output: OutputType,
        uid: str,
        timed_out: tuple[OutputTag, Callable[[Match, int], Any]] | None,
        max_parallelism: int | None,
    ) -> DataStream:
        check_function(select, f"select of '{uid}'", 1, is_rows=is_flat)
        kind = _FlatSelect if is_flat else _Select
        lost = (
            kind(select, None, None)
            if timed_out is None
            else _make_timeout_select(uid, timed_out, kind, select)
        )
        return self._add_operator(lost, output, uid, max_parallelism)

    def _add_operator(
        self,
        function: PatternProcessFunction,
        output: OutputType | None,
        uid: str,
        max_parallelism: int | None,
    ) -> DataStream:
        stream, entry = self._stream, self._stream._entry
        leaves = (leaf for one in self._search.patterns for leaf in one.automaton.leaves)
        texts = tuple(dict.fromkeys(leaf.text for leaf in leaves if isinstance(leaf, ColumnCondition)))
        if texts:
            answers = _Answers(texts, self._is_for_few)
            with_answers = DataStream(stream._environment, entry.parent).transform(answers)
            entry = KeyedEntry(with_answers._node, entry.keys)
        search = replace(self._search, function=function, column_conditions=texts)
        graph = stream._environment.graph
        node = declare_operator(graph, [entry], Patterns(search), output, uid, max_parallelism)
        return DataStream(stream._environment, node)

    @property
    def _is_for_few(self) -> bool:
        """True if events for which no condition holds may be dropped early without changing results."""
        search = self._search
        return search.late_output is None and all(
            one.automaton.passes_over_others
            and all(isinstance(leaf, ColumnCondition) for leaf in one.automaton.leaves)
            # Which of two matches that end together survives a skip may depend on later events.
            and (one.skip.kind is Skip.NONE or not one.automaton.has_pending)
            for one in search.patterns
        )

    def _replace_search(self, **facts: Any) -> PatternStream:
        return PatternStream(self._stream, replace(self._search, **facts))


class _Nothing(PatternProcessFunction):
    def process_match(self, match: Match, ctx: PatternContext) -> None:
        """Do nothing."""


class _Select(PatternProcessFunction):
    def __init__(
        self,
        select: Callable[[Match], Any],
        tag: OutputTag | None,
        of_lost: Callable[[Match, int], Any] | None,
    ) -> None:
        self._select, self._tag, self._of_lost = select, tag, of_lost

    def process_match(self, match: Match, ctx: PatternContext) -> Iterable[Any] | None:
        return self._rows(self._select(match))

    def process_timed_out_match(self, match: Match, ctx: PatternContext) -> None:
        if self._tag is not None and self._of_lost is not None:
            for row in self._rows(self._of_lost(match, ctx.timestamp())) or ():
                ctx.output(self._tag, row)

    def _rows(self, result: Any) -> Iterable[Any] | None:
        return (result,)


def _make_timeout_select(
    uid: str,
    timed_out: tuple[OutputTag, Callable[[Match, int], Any]],
    kind: type[_Select],
    select: Callable[[Match], Any] | None = None,
) -> _Select:
    tag, of_lost = timed_out
    check_function(of_lost, f"timed_out of '{uid}'", 2, is_rows=kind is _FlatSelect)
    instance_of("timed_out", tag, OutputTag, what_to_do="give it an OutputTag and a function")
    return kind(select or _no_row, tag, of_lost)


def _no_row(match: Match) -> None:
    return None


class _FlatSelect(_Select):
    """A select function that makes any number of rows of each match."""

    def _rows(self, result: Any) -> Iterable[Any] | None:
        rows: Iterable[Any] | None = result
        return rows


class _Answers:
    """A transform that appends results of conditions to records; may drop records where none holds."""

    def __init__(self, texts: tuple[str, ...], is_for_few: bool) -> None:
        self._texts, self._is_for_few = texts, is_for_few

    def __call__(self, records: DataFrame) -> DataFrame:
        from pyspark.errors import AnalysisException
        from pyspark.sql import functions as F

        for at, text in enumerate(self._texts):
            try:
                holds = F.coalesce(F.expr(text).cast("boolean"), F.lit(False))
                records = records.select("*", holds.alias(f"__holds_{at}"))
            except AnalysisException as error:
                names = ", ".join(name for name in records.columns if not name.startswith("_"))
                raise PatternError(
                    f"Spark cannot evaluate the condition {text!r}",
                    why=str(error).partition("\n")[0],
                    what_to_do=f"correct it; events have {names}",
                ) from None
        if not self._is_for_few:
            return records
        return records.where(" OR ".join(f"__holds_{at}" for at in range(len(self._texts))))


def _no_key(record: Any) -> int:
    return 0
