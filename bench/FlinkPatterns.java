import java.time.Duration;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.cep.CEP;
import org.apache.flink.cep.functions.PatternProcessFunction;
import org.apache.flink.cep.pattern.Pattern;
import org.apache.flink.cep.pattern.conditions.IterativeCondition;
import org.apache.flink.cep.pattern.conditions.SimpleCondition;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.util.Collector;

/**
 * The bench's patterns in Flink's own library, in a cluster in this process: {@code work events keys parallelism}.
 *
 * <p>Events are those of the bench as JSON, an event a millisecond, made in the task in place of being read from Kafka;
 * matches are made JSON and dropped. Both counts for Flink. Checkpoints every ten seconds. Prints rates of two runs in
 * one process, of which the first one warms up.
 */
public final class FlinkPatterns {
    static final long FIRST_MS = 1_767_225_600_000L;
    static final long WITHIN_MS = 60_000;

    /** An order; fields as Flink's serializer for plain objects wants them. */
    public static class Order {
        public String user;
        public long amount;
        public long at;
    }

    /** As JSON; which user and amount follows from the number alone. */
    static final class Orders implements GeneratorFunction<Long, String> {
        private final long keys;

        Orders(long keys) {
            this.keys = keys;
        }

        @Override
        public String map(Long number) {
            long mixed = mix(number);
            long user = Long.remainderUnsigned(mixed, keys);
            long amount = Long.remainderUnsigned(mix(mixed), 1000);
            return "{\"user\":\"user-" + user + "\",\"product\":\"p" + amount % 100 + "\",\"amount\":" + amount
                    + ",\"at\":" + (FIRST_MS + number) + "}";
        }

        private static long mix(long given) {
            long z = given + 0x9E3779B97F4A7C15L;
            z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
            z = (z ^ (z >>> 27)) * 0x94D049BB133111EBL;
            return z ^ (z >>> 31);
        }
    }

    static SimpleCondition<Order> below(long amount) {
        return SimpleCondition.of(order -> order.amount < amount);
    }

    static SimpleCondition<Order> from(long amount) {
        return SimpleCondition.of(order -> order.amount >= amount);
    }

    static final class IsMore extends IterativeCondition<Order> {
        @Override
        public boolean filter(Order order, Context<Order> context) throws Exception {
            return order.amount > context.getEventsForPattern("first").iterator().next().amount;
        }
    }

    static Pattern<Order, ?> pattern(String work) {
        Duration within = Duration.ofMillis(WITHIN_MS);
        Pattern<Order, Order> first = Pattern.begin("first");
        switch (work) {
            case "rises":
                return first.next("last").where(new IsMore()).within(within);
            case "logins":
                return first.where(below(200)).times(3).consecutive().next("last").where(from(200)).within(within);
            default:
                return first.where(from(900)).notFollowedBy("paid").where(below(100)).within(within);
        }
    }

    static final class AsJson extends PatternProcessFunction<Order, String> {
        @Override
        public void processMatch(Map<String, List<Order>> match, Context context, Collector<String> out) {
            Order first = match.get("first").get(0);
            Order last = match.getOrDefault("last", match.get("first")).get(0);
            out.collect("{\"user\":\"" + first.user + "\",\"begins\":" + first.at + ",\"total\":" + last.amount + "}");
        }
    }

    static Order parsed(ObjectMapper json, String text) throws Exception {
        JsonNode tree = json.readTree(text);
        Order order = new Order();
        order.user = tree.get("user").asText();
        order.amount = tree.get("amount").asLong();
        order.at = tree.get("at").asLong();
        return order;
    }

    static final class Parse implements org.apache.flink.api.common.functions.MapFunction<String, Order> {
        private transient ObjectMapper json;

        @Override
        public Order map(String text) throws Exception {
            if (json == null) {
                json = new ObjectMapper();
            }
            return parsed(json, text);
        }
    }

    public static void main(String[] given) throws Exception {
        String work = given[0];
        long events = Long.parseLong(given[1]);
        for (int run = 0; run < 3; run++) {
            StreamExecutionEnvironment env =
                    StreamExecutionEnvironment.createLocalEnvironment(Integer.parseInt(given[3]), new Configuration());
            env.enableCheckpointing(10_000);
            DataStream<Order> orders =
                    env.fromSource(
                                    new DataGeneratorSource<>(
                                            new Orders(Long.parseLong(given[2])), events, Types.STRING),
                                    WatermarkStrategy.noWatermarks(),
                                    "orders")
                            .map(new Parse())
                            .returns(Order.class)
                            .assignTimestampsAndWatermarks(
                                    WatermarkStrategy.<Order>forBoundedOutOfOrderness(Duration.ofSeconds(1))
                                            .withTimestampAssigner((order, time) -> order.at));
            if (work.equals("unpaid")) {
                orders = orders.filter(order -> order.amount < 100 || order.amount >= 900);
            }
            CEP.pattern(orders.keyBy(order -> order.user), pattern(work))
                    .process(new AsJson())
                    .sinkTo(new DiscardingSink<>());
            long begun = System.nanoTime();
            long cpu = cpu();
            env.execute();
            double seconds = (System.nanoTime() - begun) / 1e9;
            System.out.printf(
                    "{\"run\": %d, \"events_per_s\": %.0f, \"cpu_seconds\": %.1f}%n",
                    run, events / seconds, (cpu() - cpu) / 1e9);
        }
    }

    private static long cpu() {
        return ((com.sun.management.OperatingSystemMXBean)
                        java.lang.management.ManagementFactory.getOperatingSystemMXBean())
                .getProcessCpuTime();
    }
}
