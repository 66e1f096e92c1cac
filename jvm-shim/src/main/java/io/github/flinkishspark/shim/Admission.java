package io.github.flinkishspark.shim;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeaders;

/**
 * Decides whether a record can be written as it is, and makes the dead letter of one that cannot. The client must not see such a
 * record: what it throws would doom the whole transaction.
 */
final class Admission {
  private static final int DEAD_LETTER_BYTES = 1024;
  /** A batch's header, a record's own fields, and the length fields of key and value, each at its longest. */
  private static final int RECORD_OVERHEAD_BYTES = 61 + 21 + 5 + 5;
  private static final int HEADER_OVERHEAD_BYTES = 5 + 5;

  private final StageOptions options;
  private final RecordHeaders common;
  private final int commonBytes;

  Admission(StageOptions options) {
    this.options = options;
    this.common = options.recordHeaders();
    this.commonBytes = RECORD_OVERHEAD_BYTES + bytesOf(common);
  }

  /** The headers that every record carries; null if there are none. Never changed after this. */
  RecordHeaders commonHeaders() {
    return common;
  }

  /** Why the record cannot be written, null if it can. What its format says comes first, as in the Python writer. */
  Refusal refusal(OutRecord record, String misfit) {
    if (misfit != null) {
      return Refusal.doesNotFit(record, misfit);
    }
    if (!options.declares(record.topic())) {
      return Refusal.undeclaredTopic(record);
    }
    if (record.partition() != null) {
      int partitions = options.partitionsOf(record.topic());
      if (record.partition() < 0 || record.partition() >= partitions) {
        return Refusal.noSuchPartition(record, partitions);
      }
    }
    if (!hasUsableTime(record)) {
      return Refusal.badTimestamp(record);
    }
    long bytes = bytesOf(record);
    return bytes > options.maxRecordBytes ? Refusal.oversize(record, bytes, options.maxRecordBytes) : null;
  }

  /** Whether its time is one that Kafka takes and a TIMESTAMP holds: the sources refuse any other. */
  private static boolean hasUsableTime(OutRecord record) {
    Long timeMs = record.timestampMs();
    return timeMs == null || (timeMs >= 0 && !UtcTimes.isOutside(timeMs / 1_000));
  }

  /** The record that tells of a refused one: whole if the dead-letter topic takes it, else its head. */
  OutRecord deadLetter(OutRecord refused, Refusal why, String topic) {
    RecordHeaders headers = new RecordHeaders();
    headers.add("flinkish-error", utf8(why.reason().text()));
    headers.add("flinkish-topic", utf8(refused.topic()));
    if (why.reason() == Refusal.Reason.OVERSIZE) {
      headers.add("flinkish-size", utf8(Long.toString(why.bytes())));
    } else {
      headers.add("flinkish-detail", utf8(why.sentence()));
    }
    if (common != null) {
      common.forEach(headers::add);
    }
    Long timeMs = hasUsableTime(refused) ? refused.timestampMs() : null;
    OutRecord whole = new OutRecord(topic, null, timeMs, refused.key(), refused.value(), headers);
    long bytes = RECORD_OVERHEAD_BYTES + bytesOf(headers) + OutRecord.length(whole.key()) + (long) OutRecord.length(whole.value());
    if (why.reason() != Refusal.Reason.OVERSIZE && bytes <= options.maxDeadLetterBytes) {
      return whole;
    }
    byte[] key = OutRecord.length(whole.key()) <= DEAD_LETTER_BYTES ? whole.key() : null;
    byte[] value = OutRecord.length(whole.value()) <= DEAD_LETTER_BYTES ? whole.value() : Arrays.copyOf(whole.value(), DEAD_LETTER_BYTES);
    return new OutRecord(topic, null, whole.timestampMs(), key, value, headers);
  }

  private long bytesOf(OutRecord record) {
    RecordHeaders headers = record.headers();
    long around = headers == common ? commonBytes : RECORD_OVERHEAD_BYTES + bytesOf(headers);
    return around + OutRecord.length(record.key()) + OutRecord.length(record.value());
  }

  private static int bytesOf(RecordHeaders headers) {
    int bytes = 0;
    if (headers != null) {
      for (Header header : headers) {
        bytes += HEADER_OVERHEAD_BYTES + header.key().length() * 3 + OutRecord.length(header.value());
      }
    }
    return bytes;
  }

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }
}
