package io.github.flinkishspark.shim;

import com.fasterxml.jackson.databind.node.ObjectNode;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import org.apache.kafka.clients.producer.Callback;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeaders;

/**
 * The open Kafka transaction of one task attempt.
 *
 * <p>Life cycle: {@link #write} any number of times, then exactly one of {@link #stage} (the transaction stays open and is
 * described by a committable) and {@link #abandon} (it is aborted if that can be done quickly). The transaction begins at the
 * first record that is handed to the client, so a task without records leaves nothing behind at the broker.
 *
 * <p>InitProducerId runs for every transaction, re-used client or not. Without it a transactional id, producer id and epoch
 * would name two transactions, and committing the older handle would commit the newer data.
 */
final class TaskTransaction {
  private static final Duration ABORT_BOUND = Duration.ofSeconds(3);
  private static final int DEAD_LETTER_BYTES = 1024;
  /** A batch's header, a record's own fields, and the length fields of key and value, each at its longest. */
  private static final int RECORD_OVERHEAD_BYTES = 61 + 21 + 5 + 5;
  private static final int HEADER_OVERHEAD_BYTES = 5 + 5;

  private final StageOptions options;
  private final String transactionalId;
  private final RecordHeaders headers;
  private final int overheadBytes;
  private final Acks acks = new Acks();
  private ResumableProducer producer;
  private long sent;
  private long dropped;
  private long deadLettered;
  private long bytes;

  TaskTransaction(StageOptions options, String transactionalId) {
    this.options = options;
    this.transactionalId = transactionalId;
    this.headers = options.recordHeaders();
    int overhead = RECORD_OVERHEAD_BYTES;
    for (Header header : headers == null ? new RecordHeaders() : headers) {
      overhead += HEADER_OVERHEAD_BYTES + header.key().length() * 3 + header.value().length;
    }
    this.overheadBytes = overhead;
  }

  /** Hands one record to the client; key and value may be null and belong to the client from now on. */
  void write(String topic, byte[] key, byte[] value) {
    if (topic == null) {
      throw StagingException.noTopic();
    }
    long size = (long) overheadBytes + length(key) + length(value);
    if (size > options.maxRecordBytes) {
      // The client must not see it: its RecordTooLargeException would doom the whole transaction.
      writeOversize(topic, key, value, size);
    } else {
      send(topic, key, value, headers);
    }
  }

  private void writeOversize(String topic, byte[] key, byte[] value, long size) {
    switch (options.oversize) {
      case FAIL -> throw StagingException.tooLarge(topic, size, options.maxRecordBytes, length(key));
      case DROP -> dropped++;
      case DEAD_LETTER -> {
        RecordHeaders reason = new RecordHeaders();
        reason.add("flinkish-error", utf8("oversize"));
        reason.add("flinkish-topic", utf8(topic));
        reason.add("flinkish-size", utf8(Long.toString(size)));
        byte[] head = length(value) <= DEAD_LETTER_BYTES ? value : Arrays.copyOf(value, DEAD_LETTER_BYTES);
        send(options.deadLetterTopic, length(key) <= DEAD_LETTER_BYTES ? key : null, head, reason);
        deadLettered++;
      }
    }
  }

  private void send(String topic, byte[] key, byte[] value, RecordHeaders with) {
    if (producer == null) {
      begin();
    }
    producer.client().send(new ProducerRecord<>(topic, null, null, key, value, with), acks);
    acks.throwFirstError();
    sent++;
    bytes += length(key) + length(value);
  }

  private void begin() {
    producer = ProducerPool.borrow(options.producerProperties(), transactionalId);
    producer.client().initTransactions();
    producer.client().beginTransaction();
  }

  /**
   * Makes everything durable and invisible, and adds the counters and the committable to the task's ack. After this the
   * transaction is the driver's: it is ended by its id, producer id and epoch, by whoever holds the committable.
   */
  void stage(ObjectNode ack) {
    ack.put("dropped", dropped).put("dead_lettered", deadLettered).put("bytes", bytes);
    ObjectNode committable = producer == null ? null : committable();
    ack.set("committable", committable);
    if (producer != null) {
      ProducerPool.giveBack(options.producerProperties(), producer);
      producer = null;
    }
  }

  private ObjectNode committable() {
    producer.client().flush();
    acks.throwFirstError();
    if (acks.count != sent) {
      throw new IllegalStateException("bug: " + sent + " records were sent, but " + acks.count + " acknowledged after a flush");
    }
    if (acks.last == null) {
      throw new IllegalStateException("the broker acknowledged no record with its offset, so the transaction's fate could not"
          + " be proved later; the task has to run again");
    }
    ObjectNode result = Json.object();
    result.put("transactional_id", transactionalId);
    result.put("producer_id", producer.producerId()).put("producer_epoch", producer.producerEpoch());
    result.putObject("evidence").put("topic", acks.last.topic()).put("partition", acks.last.partition())
        .put("offset", acks.last.offset());
    return result.put("records", sent);
  }

  /** Aborts what was begun; never throws. What it could not abort in time the driver finds by the leased id. */
  void abandon(Throwable reason) {
    if (producer == null) {
      return;
    }
    // A killed task arrives here interrupted, and the client would then give up at once instead of aborting.
    boolean interrupted = Thread.interrupted();
    try {
      producer.closeAborting(ABORT_BOUND);
    } catch (RuntimeException e) {
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

  private static int length(byte[] bytes) {
    return bytes == null ? 0 : bytes.length;
  }

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  /** One callback for all sends. Runs on the client's thread; the flush before {@link #committable} orders its plain writes. */
  private static final class Acks implements Callback {
    private long count;
    private RecordMetadata last;
    private volatile String failedTopic;
    private volatile Exception error;

    @Override
    public void onCompletion(RecordMetadata metadata, Exception exception) {
      if (exception == null) {
        count++;
        if (metadata.hasOffset()) {
          last = metadata;
        }
      } else if (error == null) {
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
