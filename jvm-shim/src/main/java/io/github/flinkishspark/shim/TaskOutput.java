package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.spark.TaskContext;

/**
 * What one task attempt writes: under {@link Delivery#EXACTLY_ONCE} an open Kafka transaction, else plain records.
 *
 * <p>Life cycle: {@link #write} any number of times, then exactly one of {@link #stage} (a transaction stays open and is
 * described by a committable) and {@link #abandon} (it is aborted if that can be done quickly). Nothing begins before the first
 * record is handed to the client, so a task without records leaves nothing behind at the broker.
 *
 * <p>InitProducerId runs for every transaction, re-used client or not. Without it a transactional id, producer id and epoch
 * would name two transactions, and committing the older handle would commit the newer data. In a transaction that all tasks of
 * a checkpoint share the driver does that, and adds the partitions; a task only writes, and only its first attempt does.
 */
final class TaskOutput {
  /** A flush that acknowledges nothing is repeated so often, with pauses: parts of a batch may just be made. */
  private static final int MOST_IDLE_FLUSHES = 100;
  private static final Duration PAUSE = Duration.ofMillis(10);
  /** With which version of EndTxn the handle is to be ended; 3 does not raise the epoch, so a repeat is answered alike. */
  private static final int END_TXN_VERSION = 3;

  private final StageOptions options;
  private final String transactionalId;
  private final Admission admission;
  private final Acks acks = new Acks();
  private ResumableProducer producer;
  private Map<String, Object> pooledBy;
  private long sent;
  private long dropped;
  private long deadLettered;
  private long bytes;

  /** The transactional id is null where there is no transaction. */
  TaskOutput(StageOptions options, String transactionalId, Admission admission) {
    this.options = options;
    this.transactionalId = transactionalId;
    this.admission = admission;
  }

  /** Hands one record to the client, or does with it what the policy for refused ones says. */
  void write(OutRecord record, String misfit) {
    if (record.topic() == null) {
      throw StagingException.noTopic();
    }
    Refusal refusal = admission.refusal(record, misfit);
    if (refusal == null) {
      send(record);
    } else {
      refuse(record, refusal);
    }
  }

  private void refuse(OutRecord record, Refusal why) {
    StageOptions.Policy policy = options.policyFor(why.reason());
    switch (policy.action()) {
      case FAIL -> throw StagingException.refused(why);
      case DROP -> dropped++;
      case DEAD_LETTER -> {
        send(admission.deadLetter(record, why, policy.deadLetterTopic()));
        deadLettered++;
      }
    }
  }

  private void send(OutRecord record) {
    if (producer == null) {
      begin();
    }
    producer.client().send(new ProducerRecord<>(record.topic(), record.partition(), record.timestampMs(), record.key(),
        record.value(), record.headers()), acks);
    acks.throwFirstError();
    sent++;
    bytes += OutRecord.length(record.key()) + OutRecord.length(record.value());
  }

  private void begin() {
    StageOptions.Shared shared = options.shared;
    TaskContext task = TaskContext.get();
    if (shared != null && task.attemptNumber() + task.stageAttemptNumber() > 0) {
      // An earlier attempt may have written, and may still do so; a broker cannot tell the two apart.
      throw StagingException.secondAttempt(transactionalId);
    }
    Map<String, Object> properties = options.producerProperties();
    pooledBy = ProducerPool.keyOf(properties);
    producer = ProducerPool.borrow(pooledBy, properties, transactionalId);
    if (shared != null) {
      producer.resume(shared.producerId(), shared.producerEpoch(), shared.nextSequences());
    } else if (transactionalId != null) {
      producer.client().initTransactions();
      producer.client().beginTransaction();
    }
  }

  /**
   * Waits until everything is acknowledged, and adds the counters and the committable to the task's ack. After this a
   * transaction is the driver's: it is ended by its id, producer id and epoch, by whoever holds the committable.
   */
  void stage(ObjectNode ack) {
    ack.put("dropped", dropped).put("dead_lettered", deadLettered).put("bytes", bytes);
    if (producer != null) {
      flush();
    }
    if (options.shared != null) {
      ArrayNode written = ack.putArray("written");
      acks.counts.forEach((place, count) -> written.addArray().add(place.topic()).add(place.partition()).add(count));
    }
    ack.set("committable", producer == null || transactionalId == null ? null : committable());
    if (producer != null) {
      ProducerPool.giveBack(pooledBy, producer);
      producer = null;
    }
  }

  private void flush() {
    producer.client().flush();
    acks.throwFirstError();
    // The client's flush does not wait for the parts of a batch that a broker found too large (KAFKA-19479).
    for (int idle = 0; acks.count != sent && idle < MOST_IDLE_FLUSHES; idle++) {
      long before = acks.count;
      LockSupport.parkNanos(PAUSE.toNanos());
      producer.client().flush();
      acks.throwFirstError();
      idle = acks.count == before ? idle : -1;
    }
    if (acks.count != sent) {
      throw new IllegalStateException("bug: " + sent + " records were sent, but " + acks.count + " acknowledged after a flush");
    }
  }

  private ObjectNode committable() {
    if (acks.last == null) {
      throw new IllegalStateException("the broker acknowledged no record with its offset, so the transaction's fate could not"
          + " be proved later; the task has to run again");
    }
    ObjectNode result = Json.object();
    result.put("transactional_id", transactionalId);
    result.put("producer_id", producer.producerId()).put("producer_epoch", producer.producerEpoch());
    result.putObject("evidence").put("topic", acks.last.topic()).put("partition", acks.last.partition())
        .put("offset", acks.last.offset());
    return result.put("records", sent).put("protocol_version", END_TXN_VERSION);
  }

  /**
   * Aborts what was begun; never throws. What it could not abort in time the driver finds by the leased id. Without a
   * transaction nothing can be taken back: what was sent stays, what was not is given up.
   */
  void abandon(Throwable reason, Duration within) {
    if (producer == null) {
      return;
    }
    // A killed task arrives here interrupted, and the client would then give up at once instead of aborting.
    boolean interrupted = Thread.interrupted();
    try {
      if (transactionalId == null || options.shared != null || within.isZero()) {
        producer.closeLeavingOpen();
      } else {
        producer.closeAborting(within);
      }
    } catch (RuntimeException | Error e) {
      reason.addSuppressed(e);
    } finally {
      producer = null;
      if (interrupted) {
        Thread.currentThread().interrupt();
      }
    }
  }

  /** The error to fail the task with: our own as they are, the client's mapped to one message. */
  RuntimeException explain(Throwable error) {
    return StagingException.of(error, acks.failedTopic, options.transactionalIdPrefix, options.maxRecordBytes);
  }

  /** One callback for all sends. Runs on the client's thread alone; the count orders its plain writes. */
  private static final class Acks implements Callback {
    private volatile long count;
    private final Map<TopicPartition, Long> counts = new HashMap<>();
    private RecordMetadata last;
    private volatile String failedTopic;
    private volatile Exception error;

    @Override
    public void onCompletion(RecordMetadata metadata, Exception exception) {
      if (exception == null) {
        counts.merge(new TopicPartition(metadata.topic(), metadata.partition()), 1L, Long::sum);
        if (metadata.hasOffset()) {
          last = metadata;
        }
        count++;
      } else if (error == null || error.getClass() == KafkaException.class) {
        // Of a batch that is refused for some of its records, the others are told only that.
        failedTopic = metadata == null ? null : metadata.topic();
        error = exception;
      }
    }

    private void throwFirstError() {
      Exception first = error;
      if (first != null) {
        throw first instanceof RuntimeException known ? known : new IllegalStateException(first);
      }
    }
  }
}
