package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.Map;
import java.util.Set;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.SupportsAdmissionControl;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * The control source of a job whose driver is the Python process that started this JVM: a source of barriers and watermarks.
 *
 * <p>What a micro-batch carries is said by the driver, in Python, as it is for the control source without this JAR: offsets are
 * the same texts, so a query may go on with either. A Python source of Spark's has a process for each of its questions, started
 * one after the other: several seconds of a start, and one more task in Python for each barrier.
 */
public final class ControlSource implements TableProvider {
  /** The driver's side, in Python; called by the threads of queries. */
  public interface Controls {
    /** Returns the offset before the first micro-batch of the control file `path`. */
    String initial(String path);

    /** Returns the offset up to which the next micro-batch goes; `start` itself if there is nothing new. */
    String latest(String path, String start);

    /** Returns the rows between two offsets: a JSON array of arrays, one number per column. */
    String rows(String path, String start, String end);
  }

  private static volatile Controls controls;

  /** The constructor that Spark calls. */
  public ControlSource() {}

  /** Takes the driver's side; the same for all queries of this JVM. */
  public static void connect(Controls driver) {
    controls = driver;
  }

  /** Returns whether there is a driver's side. */
  public static boolean isConnected() {
    return controls != null;
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    return StructType.fromDDL(options.get("columns"));
  }

  /** Reads are planned with the columns that the option `columns` names: one INT, then BIGINTs. */
  @Override
  public Table getTable(StructType schema, Transform[] partitioning, Map<String, String> properties) {
    return new ControlTable(new CaseInsensitiveStringMap(properties).get("path"), schema);
  }

  private record ControlTable(String path, StructType schema) implements Table, SupportsRead {
    @Override
    public String name() {
      return "flinkish-control";
    }

    @Override
    public Set<TableCapability> capabilities() {
      return Set.of(TableCapability.MICRO_BATCH_READ);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return () -> new ControlScan(path, schema);
    }
  }

  private record ControlScan(String path, StructType schema) implements Scan {
    @Override
    public StructType readSchema() {
      return schema;
    }

    @Override
    public String description() {
      return "flinkish-control";
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
      return new ControlStream(path);
    }
  }

  /** An offset as the driver wrote it; Spark compares and logs the text. */
  private static final class ControlOffset extends Offset {
    private final String json;

    ControlOffset(String json) {
      this.json = json;
    }

    @Override
    public String json() {
      return json;
    }
  }

  private record ControlStream(String path) implements MicroBatchStream, SupportsAdmissionControl {
    @Override
    public Offset initialOffset() {
      return new ControlOffset(controls.initial(path));
    }

    @Override
    public Offset latestOffset() {
      throw new UnsupportedOperationException("latestOffset(Offset, ReadLimit) is called instead");
    }

    @Override
    public Offset latestOffset(Offset start, ReadLimit limit) {
      return new ControlOffset(controls.latest(path, start.json()));
    }

    @Override
    public Offset deserializeOffset(String json) {
      return new ControlOffset(json);
    }

    @Override
    public InputPartition[] planInputPartitions(Offset start, Offset end) {
      JsonNode found = Json.parse(controls.rows(path, start.json(), end.json()));
      long[][] rows = new long[found.size()][];
      for (int i = 0; i < rows.length; i++) {
        JsonNode row = found.get(i);
        rows[i] = new long[row.size()];
        for (int column = 0; column < rows[i].length; column++) {
          rows[i][column] = row.get(column).longValue();
        }
      }
      return rows.length == 0 ? new InputPartition[0] : new InputPartition[] {new ControlRows(rows)};
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
      return new ControlReaders();
    }

    @Override
    public void commit(Offset end) {
      // The driver knows it from Spark's log.
    }

    @Override
    public void stop() {
      // There is nothing to let go of.
    }

    /** What a query's progress calls it. */
    @Override
    public String toString() {
      return "flinkish-control " + path;
    }
  }

  private record ControlRows(long[][] rows) implements InputPartition {}

  private static final class ControlReaders implements PartitionReaderFactory {
    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
      return new ControlReader(((ControlRows) partition).rows());
    }
  }

  private static final class ControlReader implements PartitionReader<InternalRow> {
    private final long[][] rows;
    private int read = 0;

    ControlReader(long[][] rows) {
      this.rows = rows;
    }

    @Override
    public boolean next() {
      read++;
      return read <= rows.length;
    }

    /** A row of its own each time: who reads may keep it. */
    @Override
    public InternalRow get() {
      long[] row = rows[read - 1];
      Object[] values = new Object[row.length];
      for (int column = 0; column < row.length; column++) {
        values[column] = row[column];
      }
      // The kind, as a row of records has it.
      values[0] = (int) row[0];
      return new GenericInternalRow(values);
    }

    @Override
    public void close() {
      // Nothing is open.
    }
  }
}
