package io.github.flinkishspark.shim;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.utils.ByteUtils;
import org.apache.kafka.common.utils.Utils;

/**
 * Decides whether a record can be written as it is, and makes the dead letter of one that cannot. The client must not see such a
 * record: what it throws would doom the whole transaction.
 */
final class Admission {
  /** What is kept of a value that is too large, and the most that a header of ours says. */
  private static final int DEAD_LETTER_BYTES = 1024;
  private static final String SIZE = "flinkish-size";
  /**
   * The record's time, in milliseconds since 1970. A letter's own time is that of its writing: by it a topic's retention goes, which
   * would delete the letter of an old record at once.
   */
  private static final String TIME = "flinkish-timestamp";
  /** How many headers of its own a dead letter had to leave behind. */
  private static final String LEFT_OUT = "flinkish-headers-left-out";
  /** A batch's header, and what Java's client counts for a record beside key, value and headers. */
  private static final int RECORD_OVERHEAD_BYTES = 61 + 21;

  private final StageOptions options;
  private final RecordHeaders common;
  private final long commonBytes;

  Admission(StageOptions options) {
    this.options = options;
    this.common = options.recordHeaders();
    this.commonBytes = bytesOf(common);
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
    String wrongTime = wrongTime(record.timestampMs(), options.times);
    if (wrongTime != null) {
      return Refusal.badTimestamp(record, wrongTime);
    }
    if (record.key() == null && options.isCompacted(record.topic())) {
      return Refusal.noKey(record);
    }
    long bytes = bytesOf(record);
    return bytes > options.maxRecordBytes ? Refusal.oversize(record, bytes, options.maxRecordBytes) : null;
  }

  /** Why a time is none that Kafka and its topics take, and a TIMESTAMP holds: the sources refuse any other. Null if it is. */
  private static String wrongTime(Long timeMs, StageOptions.TimeLimits limits) {
    if (timeMs == null) {
      return null;
    }
    if (timeMs < 0) {
      return "before 1970";
    }
    if (UtcTimes.isOutside(timeMs / 1_000)) {
      return "after 9999";
    }
    long aheadMs = timeMs - System.currentTimeMillis();
    if (-aheadMs > limits.beforeMs()) {
      return "which message.timestamp.before.max.ms of a topic does not allow";
    }
    return aheadMs > limits.afterMs() ? "which message.timestamp.after.max.ms of a topic does not allow" : null;
  }

  /** The record that tells of a refused one: whole if the dead-letter topic takes it, else its head. */
  OutRecord deadLetter(OutRecord refused, Refusal why, String topic) {
    List<Header> own = ownHeaders(refused);
    // A dead letter itself says already where it comes from.
    List<Header> about = refused.topic().equals(topic) ? new ArrayList<>() : about(refused, why);
    OutRecord whole = new OutRecord(topic, null, null, refused.key(), refused.value(), joined(own, about));
    if (why.reason() != Refusal.Reason.OVERSIZE && bytesOf(whole) <= options.maxDeadLetterBytes) {
      return whole;
    }
    byte[] key = OutRecord.length(whole.key()) <= DEAD_LETTER_BYTES ? whole.key() : null;
    byte[] value = OutRecord.length(whole.value()) <= DEAD_LETTER_BYTES ? whole.value() : Arrays.copyOf(whole.value(), DEAD_LETTER_BYTES);
    about.add(new RecordHeader(SIZE, bounded(Long.toString(bytesOf(refused)))));
    OutRecord head = new OutRecord(topic, null, null, key, value, joined(own, about));
    if (bytesOf(head) <= options.maxDeadLetterBytes) {
      return head;
    }
    about.add(new RecordHeader(LEFT_OUT, bounded(Integer.toString(own.size()))));
    return new OutRecord(topic, null, null, key, value, joined(List.of(), about));
  }

  /** The headers that a record has of its own, in their order. */
  private List<Header> ownHeaders(OutRecord record) {
    List<Header> result = new ArrayList<>();
    if (record.headers() != null && record.headers() != common) {
      record.headers().forEach(result::add);
    }
    return result.isEmpty() || common == null ? result : result.subList(common.toArray().length, result.size());
  }

  /** The headers that say where a record was to go, and why it does not. */
  private List<Header> about(OutRecord refused, Refusal why) {
    List<Header> result = new ArrayList<>();
    result.add(new RecordHeader("flinkish-error", bounded(why.reason().text())));
    if (!options.uid.isEmpty()) {
      result.add(new RecordHeader("flinkish-sink", bounded(options.uid)));
    }
    result.add(new RecordHeader("flinkish-topic", bounded(refused.topic())));
    if (refused.partition() != null) {
      result.add(new RecordHeader("flinkish-partition", bounded(refused.partition().toString())));
    }
    if (why.reason() != Refusal.Reason.BAD_TIMESTAMP) {
      long timeMs = refused.timestampMs() == null ? System.currentTimeMillis() : refused.timestampMs();
      result.add(new RecordHeader(TIME, bounded(Long.toString(timeMs))));
    }
    if (why.reason() != Refusal.Reason.OVERSIZE) {
      result.add(new RecordHeader("flinkish-detail", bounded(why.sentence())));
    }
    return result;
  }

  private RecordHeaders joined(List<Header> own, List<Header> about) {
    RecordHeaders result = new RecordHeaders();
    own.forEach(result::add);
    about.forEach(result::add);
    if (common != null) {
      common.forEach(result::add);
    }
    return result;
  }

  /** What Java's client and the Python writer hold against a limit, too: the same record is too large for all or for none. */
  private long bytesOf(OutRecord record) {
    RecordHeaders headers = record.headers();
    return RECORD_OVERHEAD_BYTES + fieldBytes(record.key()) + fieldBytes(record.value())
        + (headers == common ? commonBytes : bytesOf(headers));
  }

  private static long bytesOf(RecordHeaders headers) {
    long bytes = 0;
    int count = 0;
    if (headers != null) {
      for (Header header : headers) {
        int name = Utils.utf8Length(header.key());
        bytes += ByteUtils.sizeOfVarint(name) + name + fieldBytes(header.value());
        count++;
      }
    }
    return bytes + ByteUtils.sizeOfVarint(count);
  }

  /** Of bytes behind their length; a length of -1 is null. */
  private static long fieldBytes(byte[] bytes) {
    return bytes == null ? ByteUtils.sizeOfVarint(-1) : (long) ByteUtils.sizeOfVarint(bytes.length) + bytes.length;
  }

  /** Text of a header, cut at a letter: names and reasons may hold whatever a record holds. */
  private static byte[] bounded(String text) {
    byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
    if (bytes.length <= DEAD_LETTER_BYTES) {
      return bytes;
    }
    int end = DEAD_LETTER_BYTES;
    while ((bytes[end] & 0xC0) == 0x80) {
      end--;
    }
    return Arrays.copyOf(bytes, end);
  }
}
