package io.github.flinkishspark.shim;

/** The years 1 to 9999, which are those that a TIMESTAMP is documented to hold. */
final class UtcTimes {
  private static final long FIRST_SECOND = -62_135_596_800L;

  private static final long LAST_SECOND = 253_402_300_799L;

  private UtcTimes() {}

  /** Whether a second since 1970 is in none of the years 1 to 9999. */
  static boolean isOutside(long second) {
    return second < FIRST_SECOND || second > LAST_SECOND;
  }
}
