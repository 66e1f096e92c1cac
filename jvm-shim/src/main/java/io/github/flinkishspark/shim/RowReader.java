package io.github.flinkishspark.shim;

import java.util.HashMap;
import java.util.Map;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.unsafe.types.UTF8String;

/** Takes the fields of a record out of a row; lives in one task. Keeps no row: iterators reuse them. */
final class RowReader {
  private static final int KEY = 4;
  private static final int VALUE = 5;
  private static final int TOPIC = 6;
  private static final int HEADER_FIELDS = 2;

  private final StageOptions.Columns columns;
  private final String defaultTopic;
  private final RecordHeaders common;
  private final Map<UTF8String, String> topics = new HashMap<>();

  RowReader(StageOptions options, RecordHeaders common) {
    this.columns = options.columns;
    this.defaultTopic = options.topic;
    this.common = common;
  }

  /** The record of a row; its headers are the common ones themselves if it has none of its own. */
  OutRecord read(InternalRow row) {
    return new OutRecord(row.isNullAt(TOPIC) ? defaultTopic : topic(row.getUTF8String(TOPIC)),
        columns.isAbsent(columns.partition(), row) ? null : (Integer) row.getInt(columns.partition()),
        columns.isAbsent(columns.timestamp(), row) ? null : (Long) row.getLong(columns.timestamp()),
        row.isNullAt(KEY) ? null : row.getBinary(KEY), row.isNullAt(VALUE) ? null : row.getBinary(VALUE),
        columns.isAbsent(columns.headers(), row) ? common : headers(row.getArray(columns.headers())));
  }

  /** Why the row's key or value does not fit its format; null if they do. */
  String misfit(InternalRow row) {
    return columns.isAbsent(columns.misfit(), row) ? null : row.getUTF8String(columns.misfit()).toString();
  }

  private RecordHeaders headers(ArrayData entries) {
    if (entries.numElements() == 0) {
      return common;
    }
    RecordHeaders result = common == null ? new RecordHeaders() : new RecordHeaders(common);
    for (int i = 0; i < entries.numElements(); i++) {
      InternalRow entry = entries.getStruct(i, HEADER_FIELDS);
      result.add(entry.getUTF8String(0).toString(), entry.isNullAt(1) ? null : entry.getBinary(1));
    }
    return result;
  }

  private String topic(UTF8String name) {
    String known = topics.get(name);
    if (known == null) {
      known = name.toString();
      topics.put(name.clone(), known); // the row's bytes are overwritten by the next row
    }
    return known;
  }
}
