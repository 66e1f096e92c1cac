package io.github.flinkishspark.shim;

import java.util.Iterator;
import java.util.NoSuchElementException;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.util.CollectionAccumulator;

/**
 * Sits in front of a writer that is not ours (Delta's, Parquet's): passes the records on, swallows the control rows, and
 * notes per task what went by, so that such a sink can be checked against the others like one of our own.
 *
 * <p>A task acks when its input is exhausted; a writer that stops early leaves no ack, and the driver sees that one is missing.
 */
public final class RowTap {
  private RowTap() {}

  /**
   * Taps a Dataset whose first four columns are kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT; any may follow.
   *
   * @param name shown in Spark's UI beside the accumulator
   */
  public static TappedRows tap(Dataset<Row> df, String name) {
    var dataset = (org.apache.spark.sql.classic.Dataset<Row>) df;
    var session = (org.apache.spark.sql.classic.SparkSession) dataset.sparkSession();
    CollectionAccumulator<String> acks = session.sparkContext().collectionAccumulator(name);
    JavaRDD<InternalRow> records = dataset.queryExecution().toRdd().toJavaRDD().mapPartitionsWithIndex(
        (partition, rows) -> new Records(rows, new TaskAck(partition, TaskContext.get().attemptNumber()), acks), true);
    return new TappedRows(session.internalCreateDataFrame(records.rdd(), df.schema(), false), records.getNumPartitions(), acks);
  }

  /**
   * The record rows of one partition. Looks one row ahead, and only when asked, because the row handed out is overwritten as
   * soon as the input moves.
   */
  private static final class Records implements Iterator<InternalRow> {
    private final Iterator<InternalRow> rows;
    private final TaskAck ack;
    private final CollectionAccumulator<String> acks;
    private InternalRow next;
    private boolean exhausted;

    Records(Iterator<InternalRow> rows, TaskAck ack, CollectionAccumulator<String> acks) {
      this.rows = rows;
      this.ack = ack;
      this.acks = acks;
    }

    @Override
    public boolean hasNext() {
      while (next == null && !exhausted) {
        if (!rows.hasNext()) {
          exhausted = true;
          acks.add(ack.toJson().toString());
        } else {
          InternalRow row = rows.next();
          next = ack.admit(row) ? row : null;
        }
      }
      return next != null;
    }

    @Override
    public InternalRow next() {
      if (!hasNext()) {
        throw new NoSuchElementException();
      }
      InternalRow row = next;
      next = null;
      return row;
    }
  }
}
