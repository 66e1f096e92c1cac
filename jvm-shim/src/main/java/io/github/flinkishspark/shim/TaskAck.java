package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Arrays;
import org.apache.spark.sql.catalyst.InternalRow;

/**
 * What one task saw: the evidence by which the driver decides whether a sink received the same rows as every other sink, and
 * whether each barrier passed each channel.
 *
 * <p>Contract of the rows: the first four columns are kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT. The digest is
 * the wrapping sum of the hashes, so it does not depend on the order of the rows or on how they are spread over tasks.
 *
 * <p>Lives in one task, on one thread. It keeps no row: iterators reuse them.
 */
final class TaskAck {
  static final int KIND = 0;
  static final int CHECKPOINT = 1;
  static final int CHANNEL = 2;
  static final int HASH = 3;
  private static final int RECORD_KIND = 0;
  private static final int BARRIER_KIND = 1;
  private static final int MARKER_KIND = 4;
  private static final int FIRST_REPORT_KIND = 16;
  /** Who reports that a latency marker has reached a sink. */
  private static final long SINK_REPORTER = 1L << 20;

  private final int partition;
  private final int attempt;
  private long rows;
  private long digest;
  private long[] barriers = new long[8];
  private int barriersLength;
  private long[] reports = new long[8];
  private int reportsLength;

  TaskAck(int partition, int attempt) {
    this.partition = partition;
    this.attempt = attempt;
  }

  /**
   * Counts the row and says whether it is a record. Barriers and reports about time are noted, of a latency marker when it came;
   * other control rows are ignored. The caller passes on records only. Must be called once per row.
   */
  boolean admit(InternalRow row) {
    int kind = row.getInt(KIND);
    if (kind == RECORD_KIND) {
      rows++;
      digest += row.getLong(HASH);
      return true;
    }
    if (kind == BARRIER_KIND) {
      addBarrier(row.getLong(CHECKPOINT), row.getLong(CHANNEL));
    } else if (kind == MARKER_KIND) {
      addReport(SINK_REPORTER, row.getLong(CHANNEL), row.getLong(CHECKPOINT), System.currentTimeMillis());
    } else if (kind >= FIRST_REPORT_KIND) {
      addReport(kind - FIRST_REPORT_KIND, row.getLong(CHANNEL), row.getLong(CHECKPOINT), row.getLong(HASH));
    }
    return false;
  }

  private void addReport(long reporter, long place, long first, long second) {
    if (reportsLength == reports.length) {
      reports = Arrays.copyOf(reports, reports.length * 2);
    }
    reports[reportsLength++] = reporter;
    reports[reportsLength++] = place;
    reports[reportsLength++] = first;
    reports[reportsLength++] = second;
  }

  private void addBarrier(long checkpoint, long channel) {
    if (barriersLength == barriers.length) {
      barriers = Arrays.copyOf(barriers, barriers.length * 2);
    }
    barriers[barriersLength++] = checkpoint;
    barriers[barriersLength++] = channel;
  }

  /** The digest is text: a JSON reader that maps numbers to doubles would lose its low bits. */
  ObjectNode toJson() {
    ObjectNode json = Json.object();
    json.put("partition", partition).put("attempt", attempt).put("rows", rows).put("digest", Long.toString(digest));
    json.set("barriers", Json.tuples(barriers, barriersLength, 2));
    if (reportsLength > 0) {
      json.set("reports", Json.tuples(reports, reportsLength, 4));
    }
    return json;
  }
}
