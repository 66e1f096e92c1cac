import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.typeutils.TypeSerializer;
import org.apache.flink.api.common.typeutils.base.IntSerializer;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.cep.nfa.NFA;
import org.apache.flink.cep.nfa.NFAState;
import org.apache.flink.cep.nfa.aftermatch.AfterMatchSkipStrategy;
import org.apache.flink.cep.nfa.compiler.NFACompiler;
import org.apache.flink.cep.nfa.sharedbuffer.SharedBufferAccessor;
import org.apache.flink.cep.pattern.Pattern;
import org.apache.flink.cep.pattern.WithinType;
import org.apache.flink.cep.pattern.conditions.IterativeCondition;
import org.apache.flink.cep.utils.TestSharedBuffer;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.node.ArrayNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.node.ObjectNode;

/**
 * Flink's own matcher behind a pipe: a line of JSON in, a line of JSON out.
 *
 * <p>A line holds a pattern, a skip strategy and steps; tests/support/flink_cep.py says their form. The answer has
 * what each step gave: matches, timed-out partial matches, and how many partial matches are open behind it.
 */
public final class FlinkMatcher {
    private static final ObjectMapper JSON = new ObjectMapper();

    /** An element: its number in the input, a name and a value. */
    public static class Event implements Serializable {
        final int id;
        final String name;
        final long value;

        Event(int id, String name, long value) {
            this.id = id;
            this.name = name;
            this.value = value;
        }
    }

    /** What `subtype` asks for. */
    public static final class Special extends Event {
        Special(int id, String name, long value) {
            super(id, name, value);
        }
    }

    /** A condition as it stands in the line. */
    static final class Condition extends IterativeCondition<Event> {
        private final String kind;
        private final String text;
        private final String operator;
        private final long number;
        private final Condition[] parts;

        Condition(JsonNode given) {
            Map.Entry<String, JsonNode> only = given.fields().next();
            kind = only.getKey();
            JsonNode value = only.getValue();
            boolean nested = kind.equals("and") || kind.equals("or") || kind.equals("not");
            boolean compares = value.isArray() && !nested;
            parts = new Condition[nested ? value.size() : 0];
            for (int i = 0; i < parts.length; i++) {
                parts[i] = new Condition(value.get(i));
            }
            int at = kind.equals("value") || kind.equals("time") ? 0 : 1;
            text = compares ? value.get(0).asText() : value.asText();
            operator = compares ? value.get(at).asText() : "";
            number = compares ? value.get(at + 1).asLong() : 0;
        }

        @Override
        public boolean filter(Event event, Context<Event> context) throws Exception {
            switch (kind) {
                case "true":
                    return true;
                case "name":
                    return event.name.equals(text);
                case "value":
                    return compare(event.value);
                case "time":
                    return compare(context.timestamp());
                case "not":
                    return !parts[0].filter(event, context);
                case "and":
                    for (Condition part : parts) {
                        if (!part.filter(event, context)) {
                            return false;
                        }
                    }
                    return true;
                case "or":
                    for (Condition part : parts) {
                        if (part.filter(event, context)) {
                            return true;
                        }
                    }
                    return false;
                case "count":
                case "sum":
                case "last":
                case "total":
                    long count = 0;
                    long sum = kind.equals("sum") ? event.value : 0;
                    long difference = 0;
                    for (Event before : context.getEventsForPattern(text)) {
                        count++;
                        sum += before.value;
                        difference = event.value - before.value;
                    }
                    return compare(kind.equals("count") ? count : kind.equals("last") ? difference : sum);
                default:
                    throw new IllegalArgumentException("no condition " + kind);
            }
        }

        private boolean compare(long value) {
            switch (operator) {
                case "<":
                    return value < number;
                case "<=":
                    return value <= number;
                case "==":
                    return value == number;
                case ">=":
                    return value >= number;
                case ">":
                    return value > number;
                default:
                    throw new IllegalArgumentException("no operator " + operator);
            }
        }
    }

    private static AfterMatchSkipStrategy skip(JsonNode given) {
        String kind = given.path(0).asText("none");
        boolean raises = given.path(2).asBoolean(false);
        switch (kind) {
            case "none":
                return AfterMatchSkipStrategy.noSkip();
            case "next":
                return AfterMatchSkipStrategy.skipToNext();
            case "past_last":
                return AfterMatchSkipStrategy.skipPastLastEvent();
            case "first":
                return raises
                        ? AfterMatchSkipStrategy.skipToFirst(given.get(1).asText()).throwExceptionOnMiss()
                        : AfterMatchSkipStrategy.skipToFirst(given.get(1).asText());
            case "last":
                return raises
                        ? AfterMatchSkipStrategy.skipToLast(given.get(1).asText()).throwExceptionOnMiss()
                        : AfterMatchSkipStrategy.skipToLast(given.get(1).asText());
            default:
                throw new IllegalArgumentException("no strategy " + kind);
        }
    }

    private static Pattern<Event, Event> pattern(JsonNode stages, AfterMatchSkipStrategy skip) {
        Pattern<Event, Event> made = null;
        for (JsonNode stage : stages) {
            made = applied(linked(made, stage, skip), stage.path("calls"));
        }
        return made;
    }

    private static Pattern<Event, Event> linked(
            Pattern<Event, Event> before, JsonNode stage, AfterMatchSkipStrategy skip) {
        String link = stage.get("link").asText();
        if (stage.has("group")) {
            Pattern<Event, Event> group = pattern(stage.get("group"), AfterMatchSkipStrategy.noSkip());
            switch (link) {
                case "begin":
                    return Pattern.begin(group, skip);
                case "next":
                    return before.next(group);
                case "followed_by":
                    return before.followedBy(group);
                case "followed_by_any":
                    return before.followedByAny(group);
                default:
                    throw new IllegalArgumentException("no link " + link);
            }
        }
        String name = stage.get("name").asText();
        switch (link) {
            case "begin":
                return Pattern.begin(name, skip);
            case "next":
                return before.next(name);
            case "followed_by":
                return before.followedBy(name);
            case "followed_by_any":
                return before.followedByAny(name);
            case "not_next":
                return before.notNext(name);
            case "not_followed_by":
                return before.notFollowedBy(name);
            default:
                throw new IllegalArgumentException("no link " + link);
        }
    }

    @SuppressWarnings("unchecked")
    private static Pattern<Event, Event> applied(Pattern<Event, Event> made, JsonNode calls) {
        for (JsonNode call : calls) {
            JsonNode first = call.path(1);
            JsonNode second = call.path(2);
            switch (call.get(0).asText()) {
                case "where":
                    made = made.where(new Condition(first));
                    break;
                case "or_where":
                    made = made.or(new Condition(first));
                    break;
                case "subtype":
                    Pattern<Event, ?> narrowed = made.subtype(Special.class);
                    made = (Pattern<Event, Event>) narrowed;
                    break;
                case "until":
                    made = made.until(new Condition(first));
                    break;
                case "optional":
                    made = made.optional();
                    break;
                case "greedy":
                    made = made.greedy();
                    break;
                case "consecutive":
                    made = made.consecutive();
                    break;
                case "allow_combinations":
                    made = made.allowCombinations();
                    break;
                case "one_or_more":
                    made = made.oneOrMore(duration(first));
                    break;
                case "times_or_more":
                    made = made.timesOrMore(first.asInt(), duration(second));
                    break;
                case "times":
                    made = made.times(first.asInt(), duration(second));
                    break;
                case "times_range":
                    made = made.times(first.asInt(), second.asInt(), duration(call.path(3)));
                    break;
                case "within":
                    made =
                            made.within(
                                    duration(first),
                                    second.asText("first_and_last").equals("first_and_last")
                                            ? WithinType.FIRST_AND_LAST
                                            : WithinType.PREVIOUS_AND_CURRENT);
                    break;
                default:
                    throw new IllegalArgumentException("no call " + call);
            }
        }
        return made;
    }

    private static Duration duration(JsonNode given) {
        return given.isNumber() ? Duration.ofMillis(given.asLong()) : null;
    }

    private static ObjectNode json(Map<String, List<Event>> match) {
        ObjectNode found = JSON.createObjectNode();
        match.forEach(
                (name, events) -> {
                    ArrayNode ids = found.putArray(name);
                    events.forEach(event -> ids.add(event.id));
                });
        return found;
    }

    @SuppressWarnings({"unchecked", "rawtypes"})
    private static ObjectNode answer(JsonNode line) throws Exception {
        ObjectNode answer = JSON.createObjectNode();
        ArrayNode steps = answer.putArray("steps");
        AfterMatchSkipStrategy skip = skip(line.path("skip"));
        NFA<Event> nfa;
        try {
            Pattern<Event, Event> pattern = pattern(line.get("pattern"), skip);
            skip = pattern.getAfterMatchSkipStrategy();
            nfa = NFACompiler.compileFactory(pattern, true).createNFA();
            answer.put("empty", NFACompiler.canProduceEmptyMatches(pattern));
            answer.put("states", nfa.getStates().size());
        } catch (Exception error) {
            return answer.put("refused", error.getClass().getSimpleName()).put("says", error.getMessage());
        }
        TypeSerializer serializer = IntSerializer.INSTANCE;
        TestSharedBuffer<Event> buffer = TestSharedBuffer.createTestBuffer(serializer);
        try {
            NFAState state = nfa.createInitialNFAState();
            int id = 0;
            for (JsonNode step : line.get("steps")) {
                ObjectNode gave = steps.addObject();
                ArrayNode matches = gave.putArray("matches");
                ArrayNode timeouts = gave.putArray("timeouts");
                long time = step.get(0).asLong();
                try (SharedBufferAccessor<Event> accessor = buffer.getAccessor()) {
                    Tuple2<Collection<Map<String, List<Event>>>, Collection<Tuple2<Map<String, List<Event>>, Long>>>
                            over = nfa.advanceTime(accessor, state, time, skip);
                    over.f0.forEach(match -> matches.add(json(match)));
                    over.f1.forEach(lost -> timeouts.addArray().add(json(lost.f0)).add(lost.f1));
                    if (step.size() > 1) {
                        String name = step.get(1).asText();
                        long value = step.path(2).asLong();
                        Event event =
                                step.path(3).asBoolean() ? new Special(id, name, value) : new Event(id, name, value);
                        id++;
                        nfa.process(accessor, state, event, time, skip, () -> 0L)
                                .forEach(match -> matches.add(json(match)));
                    }
                }
                gave.put("open", state.getPartialMatches().size()).put("held", state.getCompletedMatches().size());
                gave.put("empty", buffer.isEmpty());
            }
        } catch (Exception error) {
            Throwable cause = error;
            while (cause.getCause() != null) {
                cause = cause.getCause();
            }
            answer.put("failed", cause.getClass().getSimpleName()).put("says", cause.getMessage());
        } finally {
            buffer.releaseCacheStatisticsTimer();
        }
        return answer;
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(answer(JSON.readTree(line)));
            if (!in.ready()) {
                out.flush();
            }
        }
        out.flush();
    }
}
