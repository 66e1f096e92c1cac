package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonParseException;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.core.util.JsonParserDelegate;
import java.io.IOException;

/**
 * A parser of one text with one value, whose objects name each field once. Spark reads the first value and closes the parser: what
 * stands behind it, or under a name that comes again, would be lost without a word.
 */
final class OneValueParser extends JsonParserDelegate {
  private JsonProcessingException rest;

  OneValueParser(JsonParser parser) {
    super(parser);
    parser.enable(JsonParser.Feature.STRICT_DUPLICATE_DETECTION);
  }

  /** Closes the parser, and looks first whether anything is left if a value was read to its end. */
  @Override
  public void close() throws IOException {
    try {
      boolean isBehindValue = !isClosed() && hasCurrentToken() && getParsingContext().inRoot();
      if (isBehindValue && nextToken() != null) {
        rest = new JsonParseException(this, "there is more than one value");
      }
    } catch (JsonProcessingException noValueEither) {
      rest = noValueEither;
    } finally {
      super.close();
    }
  }

  /** What is wrong with the text behind the value; null if there is none. Spark hears of nothing that closing throws. */
  JsonProcessingException rest() {
    return rest;
  }
}
