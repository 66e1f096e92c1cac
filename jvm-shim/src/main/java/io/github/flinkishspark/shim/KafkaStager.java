package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import org.apache.kafka.common.KafkaException;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.catalyst.InternalRow;

/**
 * Stages the rows of one micro-batch in Kafka: in transactions, one per Spark task and sink, that are left open; or, under a
 * weaker {@link Delivery}, just so.
 *
 * <p>Called from Python on the driver. What comes back names every transaction of the successful attempts; those of failed,
 * killed or speculative attempts that could not abort themselves are found by their ids, which are all of the form
 * {@code prefix-partition-attemptIndex}.
 */
public final class KafkaStager {
  private static final int TASK_ATTEMPTS_PER_STAGE_ATTEMPT = 16;
  private static final Duration ABORT_BOUND = Duration.ofSeconds(3);

  private KafkaStager() {}

  /**
   * Runs one Spark job over the rows as they are stored, without making Row objects of them.
   *
   * @param df columns by position: kind INT, checkpoint BIGINT, channel BIGINT, hash BIGINT, key BINARY, value BINARY, topic
   *     STRING, then those that the options name; all but kind may be null, and a null topic stands for the default one
   * @param optionsJson an array with the options of each sink, see {@link StageOptions}; of several the column {@code sink}
   *     says whose a row is, by place. May hold secrets, never printed
   * @return a JSON array with one element per task, in the order of the partitions: an array with one report per sink
   */
  public static String stage(Dataset<Row> df, String optionsJson) {
    List<StageOptions> sinks = StageOptions.parseAll(optionsJson);
    return Json.arrayOf(((org.apache.spark.sql.classic.Dataset<Row>) df).queryExecution().toRdd().toJavaRDD()
        .mapPartitionsWithIndex((partition, rows) -> List.of(stagePartition(sinks, partition, rows)).iterator(), true)
        .collect());
  }

  /**
   * Checks a producer's settings as its constructor would, without connecting.
   *
   * @param optionsJson as for {@link #stage}, of one sink
   * @return the setting that the client refuses, empty if it takes all of them
   */
  public static String refusedSetting(String optionsJson) {
    return ResumableProducer.refusedSetting(StageOptions.parseAll(optionsJson).get(0).producerProperties());
  }

  private static String stagePartition(List<StageOptions> sinks, int partition, Iterator<InternalRow> rows) {
    List<SinkTask> tasks = sinks.stream().map(options -> new SinkTask(options, partition)).toList();
    int sink = sinks.get(0).columns.sink();
    try {
      while (rows.hasNext()) {
        InternalRow row = rows.next();
        tasks.get(tasks.size() == 1 ? 0 : row.getInt(sink)).take(row);
      }
      List<String> reports = new ArrayList<>();
      for (SinkTask task : tasks) {
        reports.add(task.stage());
      }
      return Json.arrayOf(reports);
    } catch (Throwable e) {
      // Also of those that are staged: nobody is told of their transactions, which the sweep finds by their ids.
      // All in the time that one may take: a brokers' outage must not hold the task back for each sink anew.
      long end = System.nanoTime() + ABORT_BOUND.toNanos();
      tasks.forEach(task -> task.output.abandon(e, Duration.ofNanos(Math.max(0, end - System.nanoTime()))));
      throw e;
    }
  }

  /** What one task does for one sink. */
  private static final class SinkTask {
    private final TaskAck ack;
    private final RowReader reader;
    private final TaskOutput output;

    SinkTask(StageOptions options, int partition) {
      TaskContext task = TaskContext.get();
      Admission admission = new Admission(options);
      String transactionalId = options.delivery != Delivery.EXACTLY_ONCE ? null
          : options.shared != null ? options.shared.transactionalId()
          : options.transactionalIdPrefix + "-" + partition + "-" + attemptIndex(task, options.maxAttemptIndex);
      ack = new TaskAck(partition, task.attemptNumber());
      reader = new RowReader(options, admission.commonHeaders());
      output = new TaskOutput(options, transactionalId, admission);
    }

    void take(InternalRow row) {
      if (ack.admit(row)) {
        try {
          output.write(reader.read(row), reader.misfit(row));
        } catch (KafkaException e) {
          throw output.explain(e);
        }
      }
    }

    String stage() {
      ObjectNode result = ack.toJson();
      try {
        output.stage(result);
      } catch (KafkaException e) {
        throw output.explain(e);
      }
      return result.toString();
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
