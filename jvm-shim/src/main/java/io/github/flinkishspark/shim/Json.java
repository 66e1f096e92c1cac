package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;

/** The JSON that crosses the border to Python. One shared mapper: it is thread safe and costly to build. */
final class Json {
  private static final ObjectMapper MAPPER = new ObjectMapper();

  private Json() {}

  static ObjectNode object() {
    return MAPPER.createObjectNode();
  }

  /**
   * Parses an object. The parser's own message is left out of the exception on purpose: it quotes the text, and the text
   * may hold secrets.
   */
  static JsonNode parse(String text) {
    try {
      return MAPPER.readTree(text);
    } catch (JsonProcessingException e) {
      String where = e.getLocation() == null ? "" : " (column " + e.getLocation().getColumnNr() + ")";
      throw new IllegalArgumentException("the text from Python is not valid JSON" + where);
    }
  }

  /** A JSON array of elements that are JSON texts already. */
  static String arrayOf(Iterable<String> elements) {
    return "[" + String.join(",", elements) + "]";
  }

  /** A copy-free way to write {@code [[a, b], ...]} from numbers laid out one after the other, so many to each. */
  static ArrayNode tuples(long[] flat, int length, int width) {
    ArrayNode array = MAPPER.createArrayNode();
    for (int i = 0; i < length; i += width) {
      ArrayNode one = array.addArray();
      for (int j = i; j < i + width; j++) {
        one.add(flat[j]);
      }
    }
    return array;
  }
}
