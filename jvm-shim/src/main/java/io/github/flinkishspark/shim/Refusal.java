package io.github.flinkishspark.shim;

import java.util.Locale;

/** Why a record cannot be written as it is: a reason that programs read, a sentence for people. */
record Refusal(Reason reason, String sentence) {

  /** What is wrong; the text is what a dead letter's header {@code flinkish-error} says. */
  enum Reason {
    OVERSIZE, DOES_NOT_FIT, UNDECLARED_TOPIC, NO_SUCH_PARTITION, BAD_TIMESTAMP, NO_KEY;

    String text() {
      return name().toLowerCase(Locale.ROOT).replace('_', '-');
    }
  }

  static Refusal oversize(OutRecord record, long bytes, long limit) {
    return new Refusal(Reason.OVERSIZE, "a record for topic " + record.topic() + " takes up to " + bytes + " bytes and the limit is "
        + limit + " (its key: " + OutRecord.length(record.key()) + " bytes); raise max_record_bytes and the topic's"
        + " max.message.bytes, or choose another oversize policy");
  }

  static Refusal doesNotFit(OutRecord record, String what) {
    return of(Reason.DOES_NOT_FIT, "a record for topic " + record.topic() + " does not fit its format: " + what);
  }

  static Refusal undeclaredTopic(OutRecord record) {
    return of(Reason.UNDECLARED_TOPIC, "a record names the topic " + record.topic() + ", which the sink does not declare");
  }

  static Refusal noSuchPartition(OutRecord record, int partitions) {
    return of(Reason.NO_SUCH_PARTITION, "a record names partition " + record.partition() + " of topic " + record.topic()
        + ", which has the partitions 0 to " + (partitions - 1));
  }

  static Refusal badTimestamp(OutRecord record, String why) {
    return of(Reason.BAD_TIMESTAMP,
        "a record for topic " + record.topic() + " has a timestamp of " + record.timestampMs() + " ms, " + why);
  }

  static Refusal noKey(OutRecord record) {
    return of(Reason.NO_KEY, "a record for topic " + record.topic() + " has no key, and the topic is compacted");
  }

  private static Refusal of(Reason reason, String sentence) {
    return new Refusal(reason, sentence);
  }
}
