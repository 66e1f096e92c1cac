package io.github.flinkishspark.shim;

import org.apache.kafka.common.InvalidRecordException;
import org.apache.kafka.common.errors.AuthorizationException;
import org.apache.kafka.common.errors.ClusterAuthorizationException;
import org.apache.kafka.common.errors.InvalidTimestampException;
import org.apache.kafka.common.errors.RecordTooLargeException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.errors.TopicAuthorizationException;
import org.apache.kafka.common.errors.TransactionalIdAuthorizationException;

/**
 * A task could not stage its rows. Python recognises the cause by the marker in the message, because a task's exception
 * reaches the driver as text inside Spark's own.
 */
final class StagingException extends RuntimeException {
  private static final long serialVersionUID = 1L;
  private static final String BAD_RECORD = "[FLINKISH_BAD_RECORD] ";
  private static final String NOT_AUTHORIZED = "[FLINKISH_NOT_AUTHORIZED] ";

  private StagingException(String message, Throwable cause) {
    super(message, cause);
  }

  static StagingException attemptOutOfRange(String what, int index, int limit) {
    return new StagingException("this task's " + what + " is " + index + ", but transactional ids are leased for fewer than "
        + limit + "; lower spark.task.maxFailures or spark.stage.maxConsecutiveAttempts", null);
  }

  static StagingException secondAttempt(String transactionalId) {
    return new StagingException("this is not the first attempt of its task, so that " + transactionalId + " may hold records of"
        + " an earlier one; the transaction is given up, and the micro-batches of its checkpoint run again", null);
  }

  /** The record was seen to be one that cannot be written, before the client got it. */
  static StagingException refused(Refusal why) {
    return new StagingException(BAD_RECORD + why.sentence(), null);
  }

  static StagingException noTopic() {
    return new StagingException(BAD_RECORD + "a record names no topic and the sink has no default topic", null);
  }

  /** Maps whatever the client or the broker answered to one message; the topic may be unknown (null). */
  static RuntimeException of(Throwable error, String topic, String idPrefix, long limitBytes) {
    if (find(error, RecordTooLargeException.class) != null) {
      return new StagingException(BAD_RECORD + "the broker refuses a record for topic " + topic + " as too large although it is"
          + " within the limit of " + limitBytes + " bytes; raise the topic's max.message.bytes or lower max_record_bytes", error);
    }
    if (find(error, InvalidRecordException.class) != null || find(error, InvalidTimestampException.class) != null) {
      return new StagingException(BAD_RECORD + "the broker refuses a record for topic " + topic + " (" + error + ")", error);
    }
    AuthorizationException denied = find(error, AuthorizationException.class);
    if (denied != null) {
      return new StagingException(NOT_AUTHORIZED + "the producer's principal lacks " + missingRight(denied, idPrefix) + ".", error);
    }
    // A batch that is too large for its topic is sent again and again where the topic's limit is hidden.
    String hint = find(error, TimeoutException.class) == null ? "" : "; if brokers do answer, a topic may take less than"
        + " batch.size in max.message.bytes: lower the producer's batch.size, or let its user describe the topic's settings";
    return new StagingException("staging records in Kafka failed: " + error + hint, error);
  }

  private static String missingRight(AuthorizationException denied, String idPrefix) {
    if (denied instanceof TopicAuthorizationException topics) {
      return "WRITE and DESCRIBE on topics " + topics.unauthorizedTopics();
    }
    if (denied instanceof TransactionalIdAuthorizationException) {
      return "WRITE and DESCRIBE on transactional ids prefixed " + idPrefix;
    }
    return denied instanceof ClusterAuthorizationException ? "IDEMPOTENT_WRITE on the cluster" : "a right of this kind: "
        + denied.getClass().getSimpleName();
  }

  private static <T extends Throwable> T find(Throwable error, Class<T> type) {
    for (Throwable e = error; e != null; e = e.getCause()) {
      if (type.isInstance(e)) {
        return type.cast(e);
      }
    }
    return null;
  }
}
