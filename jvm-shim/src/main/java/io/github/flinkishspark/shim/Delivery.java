package io.github.flinkishspark.shim;

import java.util.Locale;

/** What becomes of records when something fails. */
enum Delivery {
  /** In a transaction that is left open and ended by the driver. */
  EXACTLY_ONCE,
  /** Acknowledged by all in-sync replicas before the task is done; a task that runs again writes again. */
  AT_LEAST_ONCE,
  /** As the producer's own settings say. */
  NONE;

  static Delivery named(String name) {
    for (Delivery delivery : values()) {
      if (delivery.name().toLowerCase(Locale.ROOT).replace('_', '-').equals(name)) {
        return delivery;
      }
    }
    throw new IllegalArgumentException("delivery must be exactly-once, at-least-once or none");
  }
}
