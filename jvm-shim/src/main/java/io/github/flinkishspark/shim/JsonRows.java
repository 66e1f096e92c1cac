package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonParseException;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import org.apache.spark.sql.Column;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.Expression;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.objects.Invoke;
import org.apache.spark.sql.catalyst.json.CreateJacksonParser;
import org.apache.spark.sql.catalyst.json.JSONOptions;
import org.apache.spark.sql.catalyst.json.JacksonParser;
import org.apache.spark.sql.catalyst.util.BadRecordException;
import org.apache.spark.sql.catalyst.util.FailureSafeParser;
import org.apache.spark.sql.classic.ExpressionUtils;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.ObjectType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.collection.Iterable;
import scala.collection.Iterator;
import scala.collection.JavaConverters;
import scala.collection.immutable.Map$;
import scala.collection.immutable.Seq;

/**
 * Does what from_json does, with Spark's own parser, in less time: from_json makes a reader of characters with a buffer of eight
 * kilobytes for each value, which takes most of the time of a short one. Here Jackson gets the bytes.
 *
 * <p>More is refused than by from_json, which reads the first value of a text, the last of fields of one name, and the nearest of a
 * number: see {@link OneValueParser} and {@link QuickJsonParser}. Of values that are no UTF-8 it does not matter what comes out here,
 * since the caller refuses them.
 */
public final class JsonRows implements Serializable {
  /** Makes generators of the texts of objects and arrays. */
  static final JsonFactory FACTORY = new JsonFactory();

  private static final long serialVersionUID = 1;

  private final StructType schema;
  private final scala.collection.immutable.Map<String, String> options;
  private final String timeZone;
  private transient FailureSafeParser<UTF8String> parser;
  private transient OneValueParser opened;

  private JsonRows(StructType schema, scala.collection.immutable.Map<String, String> options, String timeZone) {
    this.schema = schema;
    this.options = options;
    this.timeZone = timeZone;
  }

  /**
   * A column with the fields of JSON objects.
   *
   * @param text a column of strings
   * @param schemaJson the fields, in Spark's JSON form of a type
   * @param optionsJson an object with options of from_json; {@code mode} is FAILFAST or PERMISSIVE
   * @param timeZone in which times without a zone are
   */
  public static Column column(Column text, String schemaJson, String optionsJson, String timeZone) {
    var schema = (StructType) ((StructType) DataType.fromJson(schemaJson)).asNullable();
    var rows = new JsonRows(schema, scalaMap(Json.parse(optionsJson)), timeZone);
    Expression target = Literal.fromObject(rows, new ObjectType(JsonRows.class));
    Seq<Expression> arguments = seq(ExpressionUtils.expression(text));
    return ExpressionUtils.column(new Invoke(target, "row", schema, arguments, seq(), true, true, true));
  }

  /** The row of one value; generated code calls it, and not for null. */
  public InternalRow row(UTF8String text) {
    if (parser == null) {
      parser = newParser();
    }
    Iterator<InternalRow> rows = parser.parse(text);
    return rows.hasNext() ? rows.next() : null;
  }

  @Override
  public String toString() {
    return "json(" + schema.simpleString() + ")";
  }

  private FailureSafeParser<UTF8String> newParser() {
    var parsed = new JSONOptions(options, timeZone, "");
    String corrupt = parsed.columnNameOfCorruptRecord();
    var own = new StructField[schema.length()];
    int length = 0;
    for (StructField field : schema.fields()) {
      if (!field.name().equals(corrupt)) {
        own[length++] = field;
      }
    }
    var read = new StructType(java.util.Arrays.copyOf(own, length));
    JacksonParser jackson = new QuickJsonParser(read, parsed, seq());
    return new FailureSafeParser<>(text -> parsed(jackson, text), parsed.parseMode(), schema, corrupt);
  }

  private Iterable<InternalRow> parsed(JacksonParser jackson, UTF8String text) {
    Iterable<InternalRow> rows = jackson.parse(text, this::open, one -> one);
    JsonProcessingException rest = opened.rest();
    if (rest != null) {
      JsonRows.<RuntimeException>raise(new BadRecordException(() -> text, () -> new InternalRow[0], rest));
    }
    return rows;
  }

  /** Opens a value for Jackson; as bytes, unless it would take them for something else than UTF-8. */
  private JsonParser open(JsonFactory factory, UTF8String text) {
    ByteBuffer bytes = text.getByteBuffer();
    int at = bytes.arrayOffset() + bytes.position();
    int length = bytes.remaining();
    if (hasHalfLetter(bytes.array(), at, at + length)) {
      JsonRows.<RuntimeException>raise(new JsonParseException((JsonParser) null, "half of a letter is no text"));
    }
    // Of the encodings that Jackson looks for, all others show in the first two bytes: by a mark, or by a zero.
    if (length < 2 || bytes.array()[at] <= 0 || bytes.array()[at + 1] == 0) {
      opened = new OneValueParser(CreateJacksonParser.utf8String(factory, text));
      return opened;
    }
    InputStream stream = new ByteArrayInputStream(bytes.array(), at, length);
    try {
      opened = new OneValueParser(factory.createParser(stream));
      return opened;
    } catch (IOException e) {
      throw new UncheckedIOException(e);
    }
  }

  /** Whether one half of a letter in two parts is written as an escape without the other: in UTF-8 it would be a question mark. */
  private static boolean hasHalfLetter(byte[] text, int from, int to) {
    for (int at = from; at < to - 5; at++) {
      if (text[at] != '\\') {
        continue;
      }
      if (text[at + 1] != 'u') {
        at++;
      } else if (isHalf(text, at, to, "89abAB")) {
        if (!isHalf(text, at + 6, to, "cdefCDEF")) {
          return true;
        }
        at += 11;
      } else if (isHalf(text, at, to, "cdefCDEF")) {
        return true;
      }
    }
    return false;
  }

  private static boolean isHalf(byte[] text, int at, int to, String thirdOf) {
    return at + 6 <= to
        && text[at] == '\\'
        && text[at + 1] == 'u'
        && (text[at + 2] == 'd' || text[at + 2] == 'D')
        && thirdOf.indexOf(text[at + 3]) >= 0;
  }

  @SuppressWarnings("unchecked")
  private static <E extends Exception> void raise(Exception error) throws E {
    throw (E) error;
  }

  private static scala.collection.immutable.Map<String, String> scalaMap(JsonNode object) {
    scala.collection.immutable.Map<String, String> map = Map$.MODULE$.empty();
    for (var entry : object.properties()) {
      map = map.updated(entry.getKey(), entry.getValue().asText());
    }
    return map;
  }

  @SafeVarargs
  private static <T> Seq<T> seq(T... elements) {
    return JavaConverters.asScalaBuffer(java.util.List.of(elements)).toList();
  }
}
