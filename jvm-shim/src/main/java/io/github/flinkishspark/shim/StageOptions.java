package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Serializable;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;
import org.apache.kafka.common.header.internals.RecordHeaders;

/**
 * The options of one staging job, parsed and checked on the driver and shipped inside the task closure only.
 *
 * <p>The producer's properties may hold secrets, so this is neither a record nor does it have a {@code toString}: nothing here
 * may end in a log line, an exception message or Spark's UI by accident.
 */
final class StageOptions implements Serializable {
  private static final long serialVersionUID = 1L;
  private static final long DEFAULT_MAX_REQUEST_BYTES = 1_048_576;
  /** What the client adds to the record when it compares with max.request.size; ours is the larger bound by design. */
  private static final long REQUEST_SLACK_BYTES = 4_096;

  /** What to do with a record that is larger than {@link #maxRecordBytes}. */
  enum Oversize { FAIL, DROP, DEAD_LETTER }

  final String topic;
  final String transactionalIdPrefix;
  final int maxAttemptIndex;
  final long maxRecordBytes;
  final Oversize oversize;
  final String deadLetterTopic;
  private final HashMap<String, Object> producer;
  private final LinkedHashMap<String, String> headers;

  private StageOptions(JsonNode json) {
    topic = text(json, "topic", null);
    transactionalIdPrefix = required(json, "transactional_id_prefix").asText();
    maxAttemptIndex = (int) wholeNumber(json, "max_attempt_index");
    deadLetterTopic = text(json, "dead_letter_topic", null);
    oversize = oversize(text(json, "oversize", "fail"));
    if (oversize == Oversize.DEAD_LETTER && deadLetterTopic == null) {
      throw new IllegalArgumentException("oversize is dead-letter but dead_letter_topic is not set: name a topic");
    }
    headers = new LinkedHashMap<>(texts(json, "headers"));
    long asked = wholeNumber(json, "max_record_bytes");
    producer = producerProperties(texts(json, "producer"), asked, wholeNumber(json, "transaction_timeout_ms"));
    maxRecordBytes = Math.min(asked, Math.min(number(producer, "max.request.size"), number(producer, "buffer.memory")));
  }

  /** Parses what Python sent; an exception names the option and never its value. */
  static StageOptions parse(String json) {
    return new StageOptions(Json.parse(json));
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

  /**
   * Defaults suit a burst of one micro-batch; the user's properties win over them. What the transaction's correctness rests
   * on wins over the user.
   */
  private static HashMap<String, Object> producerProperties(Map<String, String> user, long maxRecordBytes, long timeoutMs) {
    HashMap<String, Object> result = new HashMap<>();
    result.put("linger.ms", "20");
    result.put("batch.size", "262144");
    result.put("buffer.memory", "67108864");
    result.put("compression.type", "none");
    // The client waits this long after every coordinator look-up, so each transaction pays it; the default is 100.
    result.put("retry.backoff.ms", "10");
    result.put("max.request.size", Long.toString(Math.max(DEFAULT_MAX_REQUEST_BYTES, maxRecordBytes + REQUEST_SLACK_BYTES)));
    result.putAll(user);
    result.put("acks", "all");
    result.put("enable.idempotence", "true");
    result.put("transaction.timeout.ms", Long.toString(timeoutMs));
    result.remove("transactional.id");
    result.remove("key.serializer");
    result.remove("value.serializer");
    return result;
  }

  private static Oversize oversize(String name) {
    return switch (name) {
      case "fail" -> Oversize.FAIL;
      case "drop" -> Oversize.DROP;
      case "dead-letter" -> Oversize.DEAD_LETTER;
      default -> throw new IllegalArgumentException("oversize must be fail, drop or dead-letter");
    };
  }

  private static long number(Map<String, Object> properties, String name) {
    try {
      return Long.parseLong(properties.get(name).toString().trim());
    } catch (NumberFormatException e) {
      throw new IllegalArgumentException(String.format(Locale.ROOT, "producer option %s must be a whole number", name));
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
