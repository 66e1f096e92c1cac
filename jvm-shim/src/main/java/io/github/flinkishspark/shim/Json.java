package io.github.flinkishspark.shim;

import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;

/** The JSON that crosses the border to Python. One shared mapper: it is thread safe and costly to build. */
final class Json {
  private static final ObjectMapper MAPPER = new ObjectMapper();

  private Json() {}

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
}
