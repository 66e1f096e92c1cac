package io.github.flinkishspark.shim;

import org.apache.kafka.common.header.internals.RecordHeaders;

/**
 * One record on its way out. Partition and timestamp may be null (the partitioner's choice, now), key and value too, and headers
 * if there are none. The arrays belong to the client once it is sent.
 */
record OutRecord(String topic, Integer partition, Long timestampMs, byte[] key, byte[] value, RecordHeaders headers) {

  static int length(byte[] bytes) {
    return bytes == null ? 0 : bytes.length;
  }
}
