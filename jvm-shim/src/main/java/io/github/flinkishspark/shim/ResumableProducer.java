package io.github.flinkishspark.shim;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.time.Duration;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigException;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.utils.AppInfoParser;
import org.apache.kafka.common.utils.ProducerIdAndEpoch;

/**
 * A Kafka producer whose transaction outlives it: its id and epoch can be read, so that any process can end the transaction,
 * and it can turn to another transactional id while the transaction it leaves behind stays open.
 *
 * <p>All reflection into the Kafka client is in this class. It is needed because no released client can hand over a prepared
 * transaction (KIP-939). If a client's internals differ, every method fails with one message that names the client's version.
 *
 * <p>Not thread safe: one task at a time. A producer that has failed in any way must be closed, never re-armed.
 */
final class ResumableProducer {
  private static final int NO_REQUEST_IN_FLIGHT = -1;
  private static final AtomicInteger CREATED = new AtomicInteger();

  private final KafkaProducer<byte[], byte[]> producer;
  /** Null in a producer without idempotence. */
  private final Object transactionManager;

  private ResumableProducer(KafkaProducer<byte[], byte[]> producer) {
    this.producer = producer;
    this.transactionManager = get(producer, "transactionManager");
  }

  /**
   * Builds a producer, without transactions if the id is null; a refusal names the property, never the value, and drops the
   * client's message, which quotes it.
   */
  static ResumableProducer create(Map<String, Object> properties, String transactionalId) {
    Map<String, Object> all = new HashMap<>(properties);
    if (transactionalId != null) {
      all.put("transactional.id", transactionalId);
    }
    // The client's own default holds the first transactional id, which would mislead once the producer has turned to another.
    all.putIfAbsent("client.id", "flinkish-spark-" + CREATED.incrementAndGet());
    try {
      return new ResumableProducer(new KafkaProducer<>(all, new ByteArraySerializer(), new ByteArraySerializer()));
    } catch (KafkaException e) {
      throw new IllegalArgumentException("the Kafka client refuses the producer's options" + suspects(e, properties.keySet())
          + " (" + e.getClass().getSimpleName() + "; its message is withheld, it may quote a secret)");
    }
  }

  /** The names of the properties that the client refuses, without its message, which quotes values; empty if there are none. */
  static String refusedSetting(Map<String, Object> properties) {
    Map<String, Object> all = new HashMap<>(properties);
    all.put("key.serializer", ByteArraySerializer.class);
    all.put("value.serializer", ByteArraySerializer.class);
    try {
      new ProducerConfig(all);
      return "";
    } catch (ConfigException e) {
      String found = suspects(e, properties.keySet());
      return found.isEmpty() ? "; the client does not say which" : found;
    }
  }

  private static String suspects(Throwable error, Collection<String> names) {
    StringBuilder text = new StringBuilder();
    for (Throwable e = error; e != null; e = e.getCause()) {
      text.append(e.getMessage()).append('\n');
    }
    String found = String.join(", ", names.stream().filter(n -> text.indexOf(n) >= 0).sorted().toList());
    return found.isEmpty() ? "" : "; look at " + found;
  }

  KafkaProducer<byte[], byte[]> client() {
    return producer;
  }

  long producerId() {
    return (long) get(get(transactionManager, "producerIdAndEpoch"), "producerId");
  }

  short producerEpoch() {
    return (short) get(get(transactionManager, "producerIdAndEpoch"), "epoch");
  }

  /** Frees the threads and leaves the transaction open at the broker. Any longer close would abort it. */
  void closeLeavingOpen() {
    producer.close(Duration.ZERO);
  }

  /** Aborts the open transaction if that can be done within the bound, and closes in any case. */
  void closeAborting(Duration bound) {
    producer.close(bound);
  }

  /**
   * Forgets the current transaction without ending it and takes another transactional id. The caller must run
   * {@code initTransactions()} next; that obtains a fresh producer id and epoch from the broker. Returns false if the client
   * still has work under way, in which case it has to be closed instead.
   *
   * <p>Everything the client remembers about the old transaction is dropped: sequence numbers (a new producer id starts at
   * zero), the partitions already added (else they would not be added to the new transaction and the broker would refuse the
   * records), and the coordinator (another id may have another one).
   */
  boolean rearm(String transactionalId) {
    synchronized (transactionManager) {
      boolean idle = get(transactionManager, "currentState").toString().equals("IN_TRANSACTION")
          && get(transactionManager, "lastError") == null
          && ((Collection<?>) get(transactionManager, "pendingRequests")).isEmpty()
          && (int) get(transactionManager, "inFlightRequestCorrelationId") == NO_REQUEST_IN_FLIGHT
          && ((Map<?, ?>) get(transactionManager, "partitionsWithUnresolvedSequences")).isEmpty();
      if (!idle) {
        return false;
      }
      set(transactionManager, "transactionalId", transactionalId);
      set(transactionManager, "currentState", stateNamed("UNINITIALIZED"));
      set(transactionManager, "pendingTransition", null);
      set(transactionManager, "transactionCoordinator", null);
      set(transactionManager, "transactionStarted", false);
      set(transactionManager, "epochBumpRequired", false);
      for (String partitions : Arrays.asList("newPartitionsInTransaction", "pendingPartitionsInTransaction",
          "partitionsInTransaction", "partitionsToRewriteSequences")) {
        ((Collection<?>) get(transactionManager, partitions)).clear();
      }
      call(get(transactionManager, "txnPartitionMap"), "reset");
      return true;
    }
  }

  /**
   * Goes on with a transaction that another process began, in place of {@code initTransactions()} and {@code beginTransaction()}.
   * All of its partitions were added to it, and none will be by this producer.
   *
   * <p>What the client would do about a refused sequence number, take another epoch, would abort the transaction of everybody.
   * It does so only where it has seen that the coordinator can.
   */
  void resume(long producerId, short producerEpoch, Map<TopicPartition, Integer> nextSequences) {
    synchronized (transactionManager) {
      ProducerIdAndEpoch id = new ProducerIdAndEpoch(producerId, producerEpoch);
      set(transactionManager, "producerIdAndEpoch", id);
      set(transactionManager, "coordinatorSupportsBumpingEpoch", false);
      Object entries = get(transactionManager, "txnPartitionMap");
      call(entries, "reset");
      @SuppressWarnings("unchecked")
      Collection<Object> partitions = (Collection<Object>) get(transactionManager, "partitionsInTransaction");
      partitions.clear();
      nextSequences.forEach((partition, next) -> {
        Object entry = created(entries, partition);
        set(entry, "producerIdAndEpoch", id);
        set(entry, "nextSequence", next);
        set(entry, "lastAckedSequence", next - 1);
        partitions.add(partition);
      });
      set(transactionManager, "transactionStarted", true);
      set(transactionManager, "currentState", stateNamed("IN_TRANSACTION"));
    }
  }

  private static Object created(Object entries, TopicPartition partition) {
    try {
      Method method = entries.getClass().getDeclaredMethod("getOrCreate", TopicPartition.class);
      method.setAccessible(true);
      return method.invoke(entries, partition);
    } catch (ReflectiveOperationException | RuntimeException e) {
      throw unknownInternals("getOrCreate", e);
    }
  }

  private Object stateNamed(String name) {
    for (Object state : field(transactionManager, "currentState").getType().getEnumConstants()) {
      if (state.toString().equals(name)) {
        return state;
      }
    }
    throw unknownInternals("state " + name, null);
  }

  private static Object get(Object target, String name) {
    try {
      return field(target, name).get(target);
    } catch (ReflectiveOperationException e) {
      throw unknownInternals(name, e);
    }
  }

  private static void set(Object target, String name, Object value) {
    try {
      field(target, name).set(target, value);
    } catch (ReflectiveOperationException e) {
      throw unknownInternals(name, e);
    }
  }

  private static void call(Object target, String name) {
    try {
      Method method = target.getClass().getDeclaredMethod(name);
      method.setAccessible(true);
      method.invoke(target);
    } catch (ReflectiveOperationException | RuntimeException e) {
      throw unknownInternals(name, e);
    }
  }

  private static Field field(Object target, String name) {
    try {
      Field field = target.getClass().getDeclaredField(name);
      field.setAccessible(true);
      return field;
    } catch (NoSuchFieldException | RuntimeException e) {
      throw unknownInternals(name, e);
    }
  }

  private static IllegalStateException unknownInternals(String name, Exception cause) {
    return new IllegalStateException("kafka-clients " + AppInfoParser.getVersion() + " does not have the internals flinkish_spark"
        + " relies on (missing: " + name + "); use kafka-clients 3.9.x", cause);
  }
}
