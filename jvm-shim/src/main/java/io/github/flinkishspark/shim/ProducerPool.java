package io.github.flinkishspark.shim;

import java.io.File;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/**
 * The executor's idle producers, by their properties and the state of the files that these name: a client does not read a renewed
 * certificate, and would not reach a broker that was renewed, too. A micro-batch starts a transaction in every task; building a client for
 * each costs far more than the InitProducerId request that makes the transaction safe.
 *
 * <p>Only a producer whose records were all acknowledged comes back, see {@link #giveBack}. Idle ones are closed
 * after a minute, so that a stopped query holds neither connections nor buffers; closing leaves their transactions open.
 */
final class ProducerPool {
  private static final Duration IDLE_LIMIT = Duration.ofMinutes(1);
  private static final Map<Map<String, Object>, Deque<Idle>> IDLE = new HashMap<>();
  private static ScheduledExecutorService sweeper;

  private record Idle(ResumableProducer producer, long sinceNanos) {}

  private ProducerPool() {}

  /** By what a producer that is made now is lent and taken back. */
  static Map<String, Object> keyOf(Map<String, Object> properties) {
    Map<String, Object> key = new HashMap<>(properties);
    properties.forEach((name, value) -> {
      if (name.endsWith(".location")) {
        File file = new File(value.toString());
        key.put("state of " + name, List.of(file.lastModified(), file.length()));
      }
    });
    return key;
  }

  /**
   * A producer that is bound to the transactional id and has not called {@code initTransactions()} for it; a plain one if the
   * id is null. The properties of the two differ, so neither is ever lent as the other.
   */
  static ResumableProducer borrow(Map<String, Object> key, Map<String, Object> properties, String transactionalId) {
    for (Idle idle = poll(key); idle != null; idle = poll(key)) {
      if (transactionalId == null || idle.producer.rearm(transactionalId)) {
        return idle.producer;
      }
      idle.producer.closeLeavingOpen();
    }
    return ResumableProducer.create(properties, transactionalId);
  }

  /** Takes a producer back whose records are complete and flushed. A failed producer must be closed instead. */
  static synchronized void giveBack(Map<String, Object> key, ResumableProducer producer) {
    IDLE.computeIfAbsent(key, unused -> new ArrayDeque<>()).push(new Idle(producer, System.nanoTime()));
    if (sweeper == null) {
      sweeper = Executors.newSingleThreadScheduledExecutor(ProducerPool::daemon);
      sweeper.scheduleWithFixedDelay(ProducerPool::sweep, 15, 15, TimeUnit.SECONDS);
    }
  }

  private static synchronized Idle poll(Map<String, Object> key) {
    Deque<Idle> idle = IDLE.get(key);
    return idle == null ? null : idle.poll();
  }

  private static void sweep() {
    expired().forEach(ResumableProducer::closeLeavingOpen);
  }

  private static synchronized List<ResumableProducer> expired() {
    long oldest = System.nanoTime() - IDLE_LIMIT.toNanos();
    List<ResumableProducer> result = new ArrayList<>();
    for (Deque<Idle> deque : IDLE.values()) {
      for (Iterator<Idle> it = deque.descendingIterator(); it.hasNext();) {
        Idle idle = it.next();
        if (idle.sinceNanos - oldest > 0) {
          break;
        }
        it.remove();
        result.add(idle.producer);
      }
    }
    IDLE.values().removeIf(Deque::isEmpty);
    return result;
  }

  private static Thread daemon(Runnable work) {
    Thread thread = new Thread(work, "flinkish-producer-pool");
    thread.setDaemon(true);
    return thread;
  }
}
