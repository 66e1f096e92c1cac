package io.github.flinkishspark.shim;

import java.util.TreeMap;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.util.CollectionAccumulator;

/** A tapped Dataset and, once an action over it has finished, what its tasks saw. */
public final class TappedRows {
  private final Dataset<Row> records;
  private final int partitions;
  private final CollectionAccumulator<String> acks;

  TappedRows(Dataset<Row> records, int partitions, CollectionAccumulator<String> acks) {
    this.records = records;
    this.partitions = partitions;
    this.acks = acks;
  }

  /** The records only, with the schema of the input. */
  public Dataset<Row> records() {
    return records;
  }

  /** How many acks a complete action leaves. Fewer mean that the writer did not read its input to the end. */
  public int partitions() {
    return partitions;
  }

  /**
   * The acks as a JSON array in the order of the partitions; call it after the action over {@link #records} has returned.
   * The accumulator lists them as they came in, and of a partition that was computed more than once the newest counts.
   */
  public String acksJson() {
    TreeMap<Integer, String> newest = new TreeMap<>();
    for (String ack : acks.value()) {
      newest.put(Json.parse(ack).get("partition").asInt(), ack);
    }
    return Json.arrayOf(newest.values());
  }
}
