package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonEncoding;
import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.core.JsonParseException;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.time.LocalDateTime;
import java.time.ZoneId;
import java.util.regex.Pattern;
import org.apache.spark.sql.catalyst.json.JSONOptions;
import org.apache.spark.sql.catalyst.json.JacksonParser;
import org.apache.spark.sql.catalyst.util.DateTimeUtils;
import org.apache.spark.sql.catalyst.util.IntervalUtils;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DayTimeIntervalType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.YearMonthIntervalType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.Function1;
import scala.collection.immutable.Seq;

/**
 * Spark's parser of JSON, but a value is what stands there or the record is bad. Spark's own rounds decimals, wraps a TINYINT
 * and a TIMESTAMP out of a number, makes an infinity of 1e400, cuts what is finer than a microsecond or behind a date, and writes
 * numbers anew where a text is wanted.
 *
 * <p>For the two kinds of values that most records have there is a shorter way: Spark looks for a zone by regular expressions in each
 * timestamp, and changes the parser's settings for each string. Texts for a STRING, and times in UTC as {@link UtcTimes} knows
 * them, need neither.
 */
final class QuickJsonParser extends JacksonParser {
  private static final Pattern DATE = Pattern.compile("\\s*[+-]?\\d{4,7}(-\\d{1,2}){0,2}\\s*");
  private static final Pattern YEAR_IN_FRONT = Pattern.compile("\\s*[+-]?\\d{4,7}(?!\\d|:).*", Pattern.DOTALL);
  private static final Pattern FINER_THAN_MICROS = Pattern.compile(".*\\.\\d{6}\\d*[1-9].*", Pattern.DOTALL);
  private static final Pattern NUMBER = Pattern.compile("[+-]?(?:[0-9]+(?:\\.[0-9]*)?|\\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?");

  QuickJsonParser(StructType schema, JSONOptions options, Seq<org.apache.spark.sql.sources.Filter> filters) {
    super(schema, options, false, filters);
  }

  /** A converter of Spark's, or one that goes on to it; may throw what Jackson throws. */
  private interface Conversion {
    Object of(JsonParser parser) throws IOException;
  }

  // Called by the constructor of the parent, so it must not use what would be a field here.
  @Override
  public Function1<JsonParser, Object> makeConverter(DataType kind) {
    Function1<JsonParser, Object> sparks = super.makeConverter(kind);
    if (kind == DataTypes.StringType) {
      return converter(QuickJsonParser::string);
    }
    if (kind == DataTypes.TimestampType) {
      boolean isUsual = hasUsualTimes();
      ZoneId zone = options().zoneId();
      return converter(parser -> timestamp(parser, sparks, isUsual, zone));
    }
    if (kind == DataTypes.TimestampNTZType) {
      return converter(parser -> isText(parser) ? inRange(checkedTime(parser), sparks.apply(parser)) : sparks.apply(parser));
    }
    if (kind == DataTypes.DateType) {
      return converter(parser -> date(parser, sparks));
    }
    if (kind == DataTypes.ByteType) {
      return converter(parser -> tinyint(parser, sparks));
    }
    if (kind == DataTypes.DoubleType || kind == DataTypes.FloatType) {
      return converter(parser -> finite(parser, sparks.apply(parser)));
    }
    if (kind instanceof DecimalType decimal) {
      return converter(parser -> decimal(parser, decimal, sparks));
    }
    if (kind instanceof DayTimeIntervalType days) {
      return converter(parser -> isText(parser)
          ? (Object) IntervalUtils.castStringToDTInterval(notFiner(parser), days.startField(), days.endField())
          : sparks.apply(parser));
    }
    if (kind instanceof YearMonthIntervalType months) {
      return converter(parser -> isText(parser)
          ? (Object) IntervalUtils.castStringToYMInterval(notFiner(parser), months.startField(), months.endField())
          : sparks.apply(parser));
    }
    return sparks;
  }

  private static Function1<JsonParser, Object> converter(Conversion conversion) {
    return parser -> {
      try {
        return conversion.of(parser);
      } catch (IOException e) {
        throw sneaky(e);
      }
    };
  }

  /** Whether times are written as Spark writes them, and not in a format of the user's or of old. */
  private boolean hasUsualTimes() {
    return options().timestampFormatInRead().isEmpty()
        && !"LEGACY".equals(SQLConf.get().legacyTimeParserPolicy().toString());
  }

  // -- texts --------------------------------------------------------------------------------------

  private static Object string(JsonParser parser) throws IOException {
    JsonToken token = value(parser);
    switch (token) {
      case VALUE_STRING:
        return UTF8String.fromString(parser.getText());
      case VALUE_NULL:
        return null;
      case START_OBJECT:
      case START_ARRAY:
        return structure(parser);
      default:
        return UTF8String.fromString(parser.getText());
    }
  }

  /** An object or array as text, without blanks, with every number as it stands there: a generator would write a double. */
  private static UTF8String structure(JsonParser parser) throws IOException {
    var bytes = new ByteArrayOutputStream();
    try (JsonGenerator generator = JsonRows.FACTORY.createGenerator(bytes, JsonEncoding.UTF8)) {
      int depth = 0;
      do {
        JsonToken token = parser.currentToken();
        depth += token.isStructStart() ? 1 : token.isStructEnd() ? -1 : 0;
        if (token.isNumeric()) {
          generator.writeNumber(parser.getText());
        } else {
          generator.copyCurrentEvent(parser);
        }
      } while (depth > 0 && parser.nextToken() != null);
    }
    return UTF8String.fromBytes(bytes.toByteArray());
  }

  // -- numbers ------------------------------------------------------------------------------------

  private static Object tinyint(JsonParser parser, Function1<JsonParser, Object> sparks) throws IOException {
    if (value(parser) != JsonToken.VALUE_NUMBER_INT) {
      return sparks.apply(parser);
    }
    int number = parser.getIntValue();
    if (number != (byte) number) {
      throw bad(parser, "it is no TINYINT"); // Jackson takes 128 to 255, too, and makes them negative
    }
    return (byte) number;
  }

  /** The number, unless digits became an infinity. */
  private static Object finite(JsonParser parser, Object number) throws IOException {
    if (number != null && parser.currentToken().isNumeric() && Double.isInfinite(((Number) number).doubleValue())) {
      String text = parser.getText();
      if (!text.equals("Infinity") && !text.equals("-Infinity")) {
        throw bad(parser, "it is too large");
      }
    }
    return number;
  }

  private static Object decimal(JsonParser parser, DecimalType kind, Function1<JsonParser, Object> sparks) throws IOException {
    JsonToken token = value(parser);
    if (token != JsonToken.VALUE_STRING && !token.isNumeric()) {
      return sparks.apply(parser);
    }
    String text = parser.getText();
    if (!NUMBER.matcher(text).matches()) { // Spark leaves commas out, so that 1,5 were 15
      throw bad(parser, "it is no number");
    }
    var exact = new java.math.BigDecimal(text);
    if (exact.signum() == 0) {
      exact = java.math.BigDecimal.ZERO;
    }
    // Before anything is scaled: of 1e999999999 that would take all memory.
    long whole = (long) exact.precision() - exact.scale();
    if (whole > kind.precision() - kind.scale() && exact.signum() != 0) {
      throw bad(parser, "it has too many digits");
    }
    exact = exact.stripTrailingZeros();
    if (exact.scale() > kind.scale()) {
      throw bad(parser, "it has more digits behind the point");
    }
    return Decimal.apply(exact, kind.precision(), kind.scale());
  }

  // -- times --------------------------------------------------------------------------------------

  private static Object timestamp(JsonParser parser, Function1<JsonParser, Object> sparks, boolean isUsual, ZoneId zone)
      throws IOException {
    JsonToken token = value(parser);
    if (token == JsonToken.VALUE_NUMBER_INT) {
      long seconds = parser.getLongValue();
      if (UtcTimes.isOutside(seconds)) {
        throw bad(parser, "its seconds are in no year from 1 to 9999");
      }
      return seconds * 1_000_000;
    }
    if (token != JsonToken.VALUE_STRING) {
      return sparks.apply(parser);
    }
    if (isUsual) {
      long micros = UtcTimes.micros(parser.getTextCharacters(), parser.getTextOffset(), parser.getTextLength());
      if (micros != UtcTimes.NONE) {
        return micros;
      }
    }
    Object micros = inRange(checkedTime(parser), sparks.apply(parser));
    checkClock(parser, zone);
    return micros;
  }

  /** Refuses a time that no clock of its zone has shown, in spring: Spark would read one an hour later. */
  private static void checkClock(JsonParser parser, ZoneId session) throws IOException {
    var parts = DateTimeUtils.parseTimestampString(UTF8String.fromString(parser.getText()));
    int[] at = parts._1();
    ZoneId zone = parts._2().isDefined() ? parts._2().get() : session;
    if (at.length == 0 || zone.getRules().isFixedOffset()) {
      return;
    }
    var local = LocalDateTime.of(at[0], at[1], at[2], at[3], at[4], at[5]);
    if (zone.getRules().getValidOffsets(local).isEmpty()) {
      throw bad(parser, "no clock of its time zone has shown it");
    }
  }

  /** The parser, if its text is a time with a date, and not finer than what there is. */
  private static JsonParser checkedTime(JsonParser parser) throws IOException {
    notFiner(parser);
    // Of a time of day alone Spark makes one of today, which is another one tomorrow.
    if (!YEAR_IN_FRONT.matcher(parser.getText()).matches()) {
      throw bad(parser, "it has no date");
    }
    return parser;
  }

  private static Object inRange(JsonParser parser, Object micros) throws IOException {
    if (micros != null && UtcTimes.isOutside(Math.floorDiv((Long) micros, 1_000_000L))) {
      throw bad(parser, "it is in no year from 1 to 9999");
    }
    return micros;
  }

  private static UTF8String notFiner(JsonParser parser) throws IOException {
    String text = parser.getText();
    if (text.indexOf('.') >= 0 && FINER_THAN_MICROS.matcher(text).matches()) {
      throw bad(parser, "it is finer than a microsecond");
    }
    return UTF8String.fromString(text);
  }

  private static Object date(JsonParser parser, Function1<JsonParser, Object> sparks) throws IOException {
    if (value(parser) == JsonToken.VALUE_STRING && !DATE.matcher(parser.getText()).matches()) {
      throw bad(parser, "it is more than a date, or none");
    }
    Object days = sparks.apply(parser);
    if (days != null && UtcTimes.isOutside((Integer) days * 86_400L)) {
      throw bad(parser, "it is in no year from 1 to 9999");
    }
    return days;
  }

  // -- the parser ---------------------------------------------------------------------------------

  /** The token of the value at hand; behind the name of a field the parser goes on to its value, as Spark's ways do. */
  private static JsonToken value(JsonParser parser) throws IOException {
    JsonToken token = parser.currentToken();
    return token == JsonToken.FIELD_NAME ? parser.nextToken() : token;
  }

  private static boolean isText(JsonParser parser) throws IOException {
    return value(parser) == JsonToken.VALUE_STRING;
  }

  private static JsonParseException bad(JsonParser parser, String why) {
    return new JsonParseException(parser, "a value is not what its type holds: " + why);
  }

  /** Throws what Jackson has thrown as it is: Spark tells bad records from other failures by its class. */
  private static UncheckedIOException sneaky(IOException error) {
    QuickJsonParser.<RuntimeException>raise(error);
    throw new AssertionError(error);
  }

  @SuppressWarnings("unchecked")
  private static <E extends Exception> void raise(Exception error) throws E {
    throw (E) error;
  }
}
