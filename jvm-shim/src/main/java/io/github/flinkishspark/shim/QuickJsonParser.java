package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.io.UncheckedIOException;
import org.apache.spark.sql.catalyst.json.JSONOptions;
import org.apache.spark.sql.catalyst.json.JacksonParser;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.Function1;
import scala.collection.immutable.Seq;

/**
 * Spark's parser of JSON, with a shorter way for the two kinds of values that most records have.
 *
 * <p>Spark looks for a zone by regular expressions in each timestamp, and changes the parser's settings for each string. Texts for a
 * STRING, and times in UTC as {@link UtcTimes} knows them, need neither; whatever else stands there goes Spark's way.
 */
final class QuickJsonParser extends JacksonParser {

  QuickJsonParser(StructType schema, JSONOptions options, Seq<org.apache.spark.sql.sources.Filter> filters) {
    super(schema, options, false, filters);
  }

  // Called by the constructor of the parent, so it must not use what would be a field here.
  @Override
  public Function1<JsonParser, Object> makeConverter(DataType kind) {
    Function1<JsonParser, Object> sparks = super.makeConverter(kind);
    if (kind == DataTypes.StringType) {
      return parser -> isText(parser) ? UTF8String.fromString(text(parser)) : sparks.apply(parser);
    }
    if (kind == DataTypes.TimestampType && hasUsualTimes()) {
      return parser -> {
        long micros = isText(parser) ? micros(parser) : UtcTimes.NONE;
        return micros == UtcTimes.NONE ? sparks.apply(parser) : (Object) micros;
      };
    }
    return sparks;
  }

  /** Whether times are written as Spark writes them, and not in a format of the user's or of old. */
  private boolean hasUsualTimes() {
    return options().timestampFormatInRead().isEmpty()
        && !"LEGACY".equals(SQLConf.get().legacyTimeParserPolicy().toString());
  }

  /** Whether the value at hand is a text; behind the name of a field the parser goes on to its value, as Spark's ways do. */
  private static boolean isText(JsonParser parser) {
    try {
      var token = parser.currentToken();
      return (token == JsonToken.FIELD_NAME ? parser.nextToken() : token) == JsonToken.VALUE_STRING;
    } catch (IOException e) {
      throw sneaky(e);
    }
  }

  private static String text(JsonParser parser) {
    try {
      return parser.getText();
    } catch (IOException e) {
      throw sneaky(e);
    }
  }

  private static long micros(JsonParser parser) {
    try {
      return UtcTimes.micros(parser.getTextCharacters(), parser.getTextOffset(), parser.getTextLength());
    } catch (IOException e) {
      throw sneaky(e);
    }
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
