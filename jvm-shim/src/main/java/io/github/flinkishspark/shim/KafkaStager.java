package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Iterator;
import java.util.List;
import org.apache.kafka.common.KafkaException;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;

/**
 * Stages the rows of one micro-batch in Kafka: in transactions, one per Spark task, that are left open; or, under a weaker
 * {@link Delivery}, just so.
 *
 * <p>Called from Python on the driver. What comes back names every transaction of the successful attempts; those of failed,
 * killed or speculative attempts that could not abort themselves are found by their ids, which are all of the form
 * {@code prefix-partition-attemptIndex}.
 */
public final class KafkaStager {
  private static final int TASK_ATTEMPTS_PER_STAGE_ATTEMPT = 16;

  private KafkaStager() {}

  /**
   * Runs one Spark job over the rows as they are stored, without making Row objects of them.
   *
   * @param df columns by position: kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT, key BINARY, value BINARY, topic
   *     STRING, then those that the options name; all but kind may be null, and a null topic stands for the default one
   * @param optionsJson see {@link StageOptions}; may hold secrets, never printed
   * @return a JSON array with one element per task, in the order of the partitions
   */
  public static String stage(Dataset<Row> df, String optionsJson) {
    StageOptions options = StageOptions.parse(optionsJson);
    return Json.arrayOf(((org.apache.spark.sql.classic.Dataset<Row>) df).queryExecution().toRdd().toJavaRDD()
        .mapPartitionsWithIndex((partition, rows) -> List.of(stagePartition(options, partition, rows)).iterator(), true)
        .collect());
  }

  /**
   * Checks a producer's settings as its constructor would, without connecting.
   *
   * @param optionsJson as for {@link #stage}
   * @return the setting that the client refuses, empty if it takes all of them
   */
  public static String refusedSetting(String optionsJson) {
    return ResumableProducer.refusedSetting(StageOptions.parse(optionsJson).producerProperties());
  }

  private static String stagePartition(StageOptions options, int partition, Iterator<InternalRow> rows) {
    TaskContext task = TaskContext.get();
    TaskAck ack = new TaskAck(partition, task.attemptNumber());
    Admission admission = new Admission(options);
    String transactionalId = options.delivery != Delivery.EXACTLY_ONCE ? null
        : options.shared != null ? options.shared.transactionalId()
        : options.transactionalIdPrefix + "-" + partition + "-" + attemptIndex(task, options.maxAttemptIndex);
    TaskOutput output = new TaskOutput(options, transactionalId, admission);
    try {
      writeRecords(new RowReader(options, admission.commonHeaders()), rows, ack, output);
      ObjectNode result = ack.toJson();
      output.stage(result);
      return result.toString();
    } catch (KafkaException e) {
      RuntimeException explained = output.explain(e);
      output.abandon(explained);
      throw explained;
    } catch (Throwable e) {
      output.abandon(e);
      throw e;
    }
  }

  private static void writeRecords(RowReader reader, Iterator<InternalRow> rows, TaskAck ack, TaskOutput output) {
    while (rows.hasNext()) {
      InternalRow row = rows.next();
      if (ack.admit(row)) {
        output.write(reader.read(row), reader.misfit(row));
      }
    }
  }

  /** Different for every attempt of a task within its stage, speculative ones included: two attempts must not share an id. */
  private static int attemptIndex(TaskContext task, int limit) {
    if (task.attemptNumber() >= TASK_ATTEMPTS_PER_STAGE_ATTEMPT) {
      throw StagingException.attemptOutOfRange("attempt number", task.attemptNumber(), TASK_ATTEMPTS_PER_STAGE_ATTEMPT);
    }
    int index = task.stageAttemptNumber() * TASK_ATTEMPTS_PER_STAGE_ATTEMPT + task.attemptNumber();
    if (index >= limit) {
      throw StagingException.attemptOutOfRange("attempt index", index, limit);
    }
    return index;
  }
}
