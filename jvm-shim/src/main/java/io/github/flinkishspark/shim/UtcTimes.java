package io.github.flinkishspark.shim;

/**
 * Times as most programs write them: {@code 2026-01-31T23:59:59Z}, with up to six digits of a second behind a point, {@code T} or a
 * space before the time of day, and {@code Z} at the end. All others are for somebody who knows more.
 */
final class UtcTimes {
  /** Says that a text is no such time. It would be the year -290308, which no such text has. */
  static final long NONE = Long.MIN_VALUE;

  /** Of the years 1 to 9999, which are those that a TIMESTAMP is documented to hold. */
  private static final long FIRST_SECOND = -62_135_596_800L;

  private static final long LAST_SECOND = 253_402_300_799L;

  private static final int SHORTEST = "2026-01-31T23:59:59Z".length();
  private static final int LONGEST = SHORTEST + ".123456".length();
  private static final int[] DAYS = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};

  private UtcTimes() {}

  /** Whether a second since 1970 is in none of the years 1 to 9999. */
  static boolean isOutside(long second) {
    return second < FIRST_SECOND || second > LAST_SECOND;
  }

  /** The microseconds since 1970, or {@link #NONE}. */
  static long micros(char[] text, int at, int length) {
    if (length < SHORTEST || length > LONGEST || text[at + length - 1] != 'Z' || !hasMarks(text, at)) {
      return NONE;
    }
    int year = 100 * two(text, at) + two(text, at + 2);
    int month = two(text, at + 5);
    int day = two(text, at + 8);
    int hour = two(text, at + 11);
    int minute = two(text, at + 14);
    int second = two(text, at + 17);
    long fraction = fraction(text, at + SHORTEST - 1, at + length - 1);
    boolean isTime = hour >= 0 && hour < 24 && minute >= 0 && minute < 60 && second >= 0 && second < 60 && fraction >= 0;
    if (!isTime || two(text, at) < 0 || two(text, at + 2) < 0 || year < 1 || !isDay(year, month, day)) {
      return NONE;
    }
    long seconds = (epochDay(year, month, day) * 24 + hour) * 3600 + minute * 60L + second;
    return seconds * 1_000_000 + fraction;
  }

  private static boolean hasMarks(char[] text, int at) {
    char between = text[at + 10];
    return text[at + 4] == '-'
        && text[at + 7] == '-'
        && (between == 'T' || between == ' ')
        && text[at + 13] == ':'
        && text[at + 16] == ':';
  }

  /** The number that two digits are; far below zero if they are none. */
  private static int two(char[] text, int at) {
    int tens = text[at] - '0';
    int ones = text[at + 1] - '0';
    return tens < 0 || tens > 9 || ones < 0 || ones > 9 ? -1_000_000 : 10 * tens + ones;
  }

  /** Microseconds behind the point, of which there may be none; negative if something else stands there. */
  private static long fraction(char[] text, int from, int to) {
    if (from == to) {
      return 0;
    }
    if (text[from] != '.' || from + 1 == to) {
      return -1;
    }
    long micros = 0;
    for (int at = from + 1; at < from + 7; at++) {
      int digit = at < to ? text[at] - '0' : 0;
      if (digit < 0 || digit > 9) {
        return -1;
      }
      micros = 10 * micros + digit;
    }
    return micros;
  }

  private static boolean isDay(int year, int month, int day) {
    if (month < 1 || month > 12 || day < 1) {
      return false;
    }
    return day <= (month == 2 && isLeap(year) ? 29 : DAYS[month - 1]);
  }

  private static boolean isLeap(int year) {
    return year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
  }

  /** Days since 1970 of a day in the Gregorian calendar: years are counted from March, so that a leap day is a year's last. */
  private static long epochDay(int year, int month, int day) {
    int fromMarch = month > 2 ? month - 3 : month + 9;
    long years = month > 2 ? year : year - 1;
    long daysOfYears = 365 * years + years / 4 - years / 100 + years / 400;
    return daysOfYears + (153 * fromMarch + 2) / 5 + day - 1 - 719_468;
  }
}
