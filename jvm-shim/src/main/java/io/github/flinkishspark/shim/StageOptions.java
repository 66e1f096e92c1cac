package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.spark.sql.catalyst.InternalRow;

/**
 * The options of one sink in a staging job, parsed and checked on the driver and shipped inside the task closure only.
 *
 * <p>The producer's properties may hold secrets, so this is neither a record nor does it have a {@code toString}: nothing here
 * may end in a log line, an exception message or Spark's UI by accident.
 */
final class StageOptions implements Serializable {
  private static final long serialVersionUID = 1L;
  private static final long DEFAULT_MAX_REQUEST_BYTES = 1_048_576;
  /** What a task's producers may hold together; a pool keeps them, and a producer what it has once taken. */
  private static final long DEFAULT_BUFFER_BYTES = 67_108_864;
  /** What the client adds to the record when it compares with max.request.size; ours is the larger bound by design. */
  private static final long REQUEST_SLACK_BYTES = 4_096;

  private static final int ABSENT = -1;

  /** What to do with a record that cannot be written as it is. */
  enum Action { FAIL, DROP, DEAD_LETTER }

  /** The action, and the topic that it needs if it is DEAD_LETTER. */
  record Policy(Action action, String deadLetterTopic) implements Serializable {}

  /** Where the columns lie that not every sink has. */
  record Columns(int partition, int timestamp, int headers, int misfit, int sink) implements Serializable {
    boolean isAbsent(int column, InternalRow row) {
      return column == ABSENT || row.isNullAt(column);
    }
  }

  /** How far behind now and ahead of it the times of records may be. */
  record TimeLimits(long beforeMs, long afterMs) implements Serializable {}

  /** A transaction that all tasks of a checkpoint write into, and the next sequence number of each of its partitions. */
  record Shared(String transactionalId, long producerId, short producerEpoch, HashMap<TopicPartition, Integer> nextSequences)
      implements Serializable {}

  final Delivery delivery;
  final String topic;
  /** Of the sink, for its dead letters; may be empty. */
  final String uid;
  final String transactionalIdPrefix;
  final int maxAttemptIndex;
  final long maxRecordBytes;
  final long maxDeadLetterBytes;
  final TimeLimits times;
  final Columns columns;
  /** Null where each task has a transaction of its own. */
  final Shared shared;
  private final Policy oversize;
  private final Policy badRecord;
  /** Null if records cannot name topics, or may name any. */
  private final HashSet<String> topics;
  private final HashSet<String> compacted = new HashSet<>();
  private final HashMap<String, Integer> partitions;
  private final HashMap<String, Object> producer;
  private final LinkedHashMap<String, String> headers;

  private StageOptions(JsonNode json, int sinks) {
    delivery = Delivery.named(text(json, "delivery", "exactly-once"));
    topic = text(json, "topic", null);
    uid = text(json, "uid", "");
    boolean isExact = delivery == Delivery.EXACTLY_ONCE;
    transactionalIdPrefix = isExact ? required(json, "transactional_id_prefix").asText() : null;
    maxAttemptIndex = isExact ? (int) wholeNumber(json, "max_attempt_index") : 0;
    oversize = policy(text(json, "oversize", "fail"), text(json, "dead_letter_topic", null));
    badRecord = policy(text(json, "bad_record", "fail"), text(json, "bad_record_topic", null));
    headers = new LinkedHashMap<>(texts(json, "headers"));
    columns = new Columns(column(json, "partition"), column(json, "timestamp"), column(json, "headers"), column(json, "misfit"),
        column(json, "sink"));
    shared = json.hasNonNull("shared") ? shared(json.get("shared")) : null;
    topics = json.hasNonNull("topics") ? new HashSet<>() : null;
    if (topics != null) {
      json.get("topics").forEach(name -> topics.add(name.asText()));
    }
    json.path("compacted").forEach(name -> compacted.add(name.asText()));
    partitions = new HashMap<>();
    if (json.hasNonNull("partitions")) {
      json.get("partitions").properties().forEach(e -> partitions.put(e.getKey(), e.getValue().asInt()));
    }
    long asked = wholeNumber(json, "max_record_bytes");
    long timeoutMs = isExact ? wholeNumber(json, "transaction_timeout_ms") : 0;
    producer = producerProperties(delivery, texts(json, "producer"), asked, timeoutMs);
    producer.computeIfAbsent("buffer.memory",
        name -> Long.toString(Math.max(DEFAULT_BUFFER_BYTES / sinks, number(producer, "max.request.size"))));
    long letter = json.hasNonNull("max_dead_letter_bytes") ? wholeNumber(json, "max_dead_letter_bytes") : asked;
    // A batch that is larger than what a topic takes is refused, however small its records are.
    producer.computeIfPresent("batch.size", (name, bytes) -> smaller(bytes, Math.min(asked, letter)));
    long most = Math.min(number(producer, "max.request.size"), number(producer, "buffer.memory"));
    maxRecordBytes = Math.min(asked, most);
    maxDeadLetterBytes = Math.min(letter, most);
    times = timeLimits(json, "times");
  }

  /** Parses what Python sent, of each sink; an exception names the option and never its value. */
  static List<StageOptions> parseAll(String json) {
    List<StageOptions> result = new ArrayList<>();
    JsonNode sinks = Json.parse(json);
    sinks.forEach(one -> result.add(new StageOptions(one, sinks.size())));
    return result;
  }

  /** The producer's properties without the transactional id, ready to be the key of a pool. */
  Map<String, Object> producerProperties() {
    return producer;
  }

  /** The headers every record carries, or null if there are none (what a ProducerRecord takes for "no headers"). */
  RecordHeaders recordHeaders() {
    if (headers.isEmpty()) {
      return null;
    }
    RecordHeaders result = new RecordHeaders();
    headers.forEach((name, value) -> result.add(name, value.getBytes(StandardCharsets.UTF_8)));
    return result;
  }

  Policy policyFor(Refusal.Reason reason) {
    return reason == Refusal.Reason.OVERSIZE ? oversize : badRecord;
  }

  boolean declares(String name) {
    return topics == null || topics.contains(name);
  }

  /** Whether a topic takes no record without a key. */
  boolean isCompacted(String name) {
    return compacted.contains(name);
  }

  /** How many partitions a topic had when the job was planned; asked only where records name partitions. */
  int partitionsOf(String name) {
    return partitions.getOrDefault(name, 0);
  }

  /**
   * Defaults suit a burst of one micro-batch; the user's properties win over them. What the delivery's correctness rests on
   * wins over the user.
   */
  private static HashMap<String, Object> producerProperties(Delivery delivery, Map<String, String> user, long maxRecordBytes,
      long timeoutMs) {
    HashMap<String, Object> result = new HashMap<>();
    result.put("linger.ms", "20");
    result.put("batch.size", "262144");
    result.put("compression.type", "none");
    // The client waits this long after every coordinator look-up, so each transaction pays it; the default is 100.
    result.put("retry.backoff.ms", "10");
    result.put("max.request.size", Long.toString(Math.max(DEFAULT_MAX_REQUEST_BYTES, maxRecordBytes + REQUEST_SLACK_BYTES)));
    result.putAll(user);
    if (delivery != Delivery.NONE) {
      result.put("acks", "all");
      result.put("enable.idempotence", "true");
    }
    if (delivery == Delivery.EXACTLY_ONCE) {
      result.put("transaction.timeout.ms", Long.toString(timeoutMs));
    }
    result.remove("transactional.id");
    result.remove("key.serializer");
    result.remove("value.serializer");
    return result;
  }

  private static Shared shared(JsonNode json) {
    HashMap<TopicPartition, Integer> next = new HashMap<>();
    required(json, "next_sequences").properties().forEach(topic -> {
      for (int partition = 0; partition < topic.getValue().size(); partition++) {
        next.put(new TopicPartition(topic.getKey(), partition), topic.getValue().get(partition).asInt());
      }
    });
    return new Shared(required(json, "transactional_id").asText(), required(json, "producer_id").asLong(),
        (short) required(json, "producer_epoch").asInt(), next);
  }

  private static TimeLimits timeLimits(JsonNode json, String name) {
    JsonNode limits = json.path(name);
    return new TimeLimits(limits.path("before_ms").asLong(Long.MAX_VALUE), limits.path("after_ms").asLong(Long.MAX_VALUE));
  }

  private static Policy policy(String name, String deadLetterTopic) {
    Action action = switch (name) {
      case "fail" -> Action.FAIL;
      case "drop" -> Action.DROP;
      case "dead-letter" -> Action.DEAD_LETTER;
      default -> throw new IllegalArgumentException("a policy must be fail, drop or dead-letter");
    };
    if (action == Action.DEAD_LETTER && deadLetterTopic == null) {
      throw new IllegalArgumentException("a policy is dead-letter but its topic is not set: name a topic");
    }
    return new Policy(action, deadLetterTopic);
  }

  private static int column(JsonNode json, String name) {
    JsonNode columns = json.get("columns");
    return columns == null || !columns.hasNonNull(name) ? ABSENT : columns.get(name).asInt();
  }

  private static long number(Map<String, Object> properties, String name) {
    try {
      return Long.parseLong(properties.get(name).toString().trim());
    } catch (NumberFormatException e) {
      throw new IllegalArgumentException(String.format(Locale.ROOT, "producer option %s must be a whole number", name));
    }
  }

  /** Leaves what is no number to the client, which says so. */
  private static Object smaller(Object bytes, long limit) {
    try {
      return Long.parseLong(bytes.toString().trim()) > limit ? Long.toString(limit) : bytes;
    } catch (NumberFormatException e) {
      return bytes;
    }
  }

  private static JsonNode required(JsonNode json, String name) {
    JsonNode node = json.get(name);
    if (node == null || node.isNull()) {
      throw new IllegalArgumentException("staging option " + name + " is missing");
    }
    return node;
  }

  private static long wholeNumber(JsonNode json, String name) {
    JsonNode node = required(json, name);
    if (!node.canConvertToLong() || node.asLong() <= 0) {
      throw new IllegalArgumentException("staging option " + name + " must be a whole number above zero");
    }
    return node.asLong();
  }

  private static String text(JsonNode json, String name, String otherwise) {
    JsonNode node = json.get(name);
    return node == null || node.isNull() ? otherwise : node.asText();
  }

  private static Map<String, String> texts(JsonNode json, String name) {
    Map<String, String> result = new LinkedHashMap<>();
    JsonNode node = json.get(name);
    if (node != null) {
      node.properties().forEach(e -> result.put(e.getKey(), e.getValue().asText()));
    }
    return result;
  }
}
