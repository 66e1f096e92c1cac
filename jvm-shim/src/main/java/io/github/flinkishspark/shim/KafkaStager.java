package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.KafkaException;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Stages the rows of one micro-batch in Kafka transactions, one per Spark task, and leaves the transactions open.
 *
 * <p>Called from Python on the driver. What comes back names every transaction of the successful attempts; those of failed,
 * killed or speculative attempts that could not abort themselves are found by their ids, which are all of the form
 * {@code prefix-partition-attemptIndex}.
 */
public final class KafkaStager {
  private static final int KEY = 4;
  private static final int VALUE = 5;
  private static final int TOPIC = 6;
  private static final int TASK_ATTEMPTS_PER_STAGE_ATTEMPT = 16;

  private KafkaStager() {}

  /**
   * Runs one Spark job over the rows as they are stored, without making Row objects of them.
   *
   * @param df columns by position: kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT, key BINARY, value BINARY, topic
   *     STRING; key, value and topic may be null, and a null topic stands for the default one
   * @param optionsJson see {@link StageOptions}; may hold secrets, never printed
   * @return a JSON array with one element per task, in the order of the partitions
   */
  public static String stage(Dataset<Row> df, String optionsJson) {
    StageOptions options = StageOptions.parse(optionsJson);
    return Json.arrayOf(((org.apache.spark.sql.classic.Dataset<Row>) df).queryExecution().toRdd().toJavaRDD()
        .mapPartitionsWithIndex((partition, rows) -> List.of(stagePartition(options, partition, rows)).iterator(), true)
        .collect());
  }

  private static String stagePartition(StageOptions options, int partition, Iterator<InternalRow> rows) {
    TaskContext task = TaskContext.get();
    TaskAck ack = new TaskAck(partition, task.attemptNumber());
    TaskTransaction transaction = new TaskTransaction(options,
        options.transactionalIdPrefix + "-" + partition + "-" + attemptIndex(task, options.maxAttemptIndex));
    try {
      writeRecords(options.topic, rows, ack, transaction);
      ObjectNode result = ack.toJson();
      transaction.stage(result);
      return result.toString();
    } catch (KafkaException e) {
      RuntimeException explained = transaction.explain(e);
      transaction.abandon(explained);
      throw explained;
    } catch (Throwable e) {
      transaction.abandon(e);
      throw e;
    }
  }

  private static void writeRecords(String defaultTopic, Iterator<InternalRow> rows, TaskAck ack, TaskTransaction transaction) {
    Map<UTF8String, String> topics = new HashMap<>();
    while (rows.hasNext()) {
      InternalRow row = rows.next();
      if (ack.admit(row)) {
        transaction.write(row.isNullAt(TOPIC) ? defaultTopic : topic(topics, row.getUTF8String(TOPIC)),
            row.isNullAt(KEY) ? null : row.getBinary(KEY), row.isNullAt(VALUE) ? null : row.getBinary(VALUE));
      }
    }
  }

  private static String topic(Map<UTF8String, String> topics, UTF8String name) {
    String known = topics.get(name);
    if (known == null) {
      known = name.toString();
      topics.put(name.clone(), known); // the row's bytes are overwritten by the next row
    }
    return known;
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
