"""JSON Schema: columns, validity with its reasons, and schemas of rows."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, cast

import pytest

from flinkish_spark import JsonSchema, OnSchemaChange
from flinkish_spark.connectors.formats import json_schema
from flinkish_spark.connectors.formats.reader import CodecError
from flinkish_spark.core.errors import EnvironmentFault, SchemaError
from flinkish_spark.types.ddl import parse_ddl

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"


def an_object(**properties: Any) -> str:
    return json.dumps({"type": "object", "properties": properties})


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["null", "integer"]}, "bigint"),
        ({"type": ["integer", "number"]}, "double"),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, "boolean"),
        ({"enum": ["A", "B", None]}, "string"),
        ({"type": "array", "items": {"type": "number"}}, "array<double>"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "map<string,bigint>"),
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, "struct<x:bigint>"),
        ({"$ref": "item.json"}, "struct<q:bigint>"),
        ({"allOf": [{"$ref": "item.json#/properties/q"}]}, "bigint"),
    ],
)
def test_each_type_is_what_the_page_says(schema: Any, column: str) -> None:
    references = [("item.json", an_object(q={"type": "integer"}))]
    found = json_schema.fields_of(an_object(f=schema), references)
    assert found.simpleString() == f"struct<f:{column}>"


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": ["string", "integer"]}, "may be of 2 types"),
        ({}, "may be anything"),
        ({"anyOf": [{"type": "string"}, {"type": "boolean"}]}, "may be of several types"),
        (True, "may be anything"),
        ({"$ref": "http://example.com/schema.json"}, "which is not there"),
        ({"$ref": "#"}, "contains itself"),
        ({"$ref": "#/properties/f"}, "refers to itself"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "of different types in parts"),
        ({"type": "array"}, "is of type array"),
    ],
)
def test_what_is_no_column_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(SchemaError, match="no column follows from the JSON Schema for 'f") as refused:
        json_schema.fields_of(an_object(f=schema))
    assert why in str(refused.value)


ID = {"properties": {"id": {"type": "string"}}}
QUANTITY = {"properties": {"q": {"type": "integer"}}}
REQUIRED = {"anyOf": [{"required": ["q"]}, {"required": ["id"]}]}


@pytest.mark.parametrize(
    ("schema", "columns"),
    [
        ({**QUANTITY, "allOf": [{"$ref": "#/definitions/id"}]}, "q:bigint,id:string"),
        ({**QUANTITY, "allOf": [{"allOf": [ID]}, True, REQUIRED]}, "q:bigint,id:string"),
        (
            {"allOf": [{"properties": {"n": ID}}, {"properties": {"n": QUANTITY}}]},
            "n:struct<id:string,q:bigint>",
        ),
        ({**ID, "allOf": [{"properties": {"id": {"maxLength": 5}}}]}, "id:string"),
        # Drafts 7 and before take nothing beside a reference.
        ({**QUANTITY, "$ref": "#/definitions/id"}, "id:string"),
        ({**QUANTITY, "$ref": "#/definitions/id", "$schema": DRAFT_2020}, "q:bigint,id:string"),
        ({**ID, "oneOf": [{"properties": {"id": {"const": one}}} for one in "ab"]}, "id:string"),
        ({**ID, "if": {"properties": {"id": {"const": "a"}}}, "else": {"required": ["id"]}}, "id:string"),
        ({**ID, "patternProperties": {"^x-": False}}, "id:string"),
        ({**ID, "oneOf": [QUANTITY, {"type": "object"}]}, "'q'"),
        ({"properties": {"n": {**ID, "anyOf": [{"$ref": "#/definitions/q"}, {}]}}}, "'n.q'"),
        ({**ID, "if": {}, "then": QUANTITY}, "'q'"),
        ({**ID, "dependencies": {"id": QUANTITY, "x": ["id"]}}, "'q'"),
        ({**ID, "patternProperties": {"^x-": {}}}, "'^x-'"),
        ({**ID, "allOf": [{"properties": {"id": {"type": "integer"}}}]}, "'id'"),
    ],
)
def test_a_schema_has_the_columns_of_all_its_records_or_is_refused_by_name(schema: Any, columns: str) -> None:
    text = json.dumps({"definitions": {"id": ID, "q": QUANTITY}, **schema})
    if columns.startswith("'"):
        with pytest.raises(
            SchemaError, match=re.escape(f"no column follows from the JSON Schema for {columns}")
        ):
            json_schema.fields_of(text)
        return
    found = json_schema.fields_of(text)
    assert found.simpleString() == f"struct<{columns}>"
    assert json_schema.differences(text, (), found).left_out == []


@pytest.mark.parametrize(
    ("base", "item"),
    [
        ({}, "item.json"),
        ({}, "http://own/item.json"),
        ({"$id": "http://shop/order.json"}, "item.json"),
        ({"$id": "http://shop/order.json"}, "http://shop/item.json"),
        ({"$id": "http://shop/order.json"}, "http://own/item.json"),
    ],
)
def test_a_reference_is_found_by_each_name_and_has_definitions_of_its_own(base: Any, item: str) -> None:
    """Each document says what `N` is; the item's is not the root's, and it names a third one."""
    names_n = {"n": {"$ref": "#/definitions/N"}, "d": {"$ref": "deep.json"}}
    others = (
        (
            "item.json",
            json.dumps({"$id": "http://own/item.json", "properties": names_n, "definitions": {"N": ID}}),
        ),
        ("deep.json", '{"type": "boolean"}'),
    )
    properties = {"i": {"$ref": item}, "k": {"$ref": "#/definitions/N"}}
    text = json.dumps({**base, "properties": properties, "definitions": {"N": QUANTITY}})
    found = json_schema.fields_of(text, others)
    assert found.simpleString() == "struct<i:struct<n:struct<id:string>,d:boolean>,k:struct<q:bigint>>"
    validator = json_schema.validator_of(text, others)
    assert json_schema.why_invalid('{"i": {"n": {"id": "x"}, "d": true}, "k": {"q": 1}}', validator) is None
    assert "i.d: 1 is not of" in str(json_schema.why_invalid('{"i": {"d": 1}}', validator))


def test_a_reference_that_is_no_schema_is_named() -> None:
    with pytest.raises(SchemaError, match=r"item\.json: 5 is not valid"):
        json_schema.validator_of(an_object(i={"$ref": "item.json"}), [("item.json", '{"type": 5}')])


def test_a_reference_leads_to_whatever_its_document_names() -> None:
    named = {"a b": {"type": "string"}, "c": {"$anchor": "c", "type": "integer"}}
    pointers = {
        "a": {"$ref": "#/$defs/a%20b"},
        "b": {"$ref": "http://x/o.json#/$defs/c"},
        "c": {"$ref": "#c"},
    }
    text = json.dumps(
        {"$schema": DRAFT_2020, "$id": "http://x/o.json", "properties": pointers, "$defs": named}
    )
    assert json_schema.fields_of(text).simpleString() == "struct<a:string,b:bigint,c:bigint>"


def reader(schema: str, *references: tuple[str, str]) -> Any:
    fields = parse_ddl("a BIGINT").json()
    made = json_schema.JsonSchemaReader(schema, references, fields, None, OnSchemaChange.FAIL)
    return made.make_converter()


def test_what_is_valid_is_given_as_it_stands_there() -> None:
    text = '{"a": 1.00000000000000000000001, "more": "\u00e4"}'
    assert reader(an_object(a={"type": "number"}))(text.encode()) == text


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"a": "x"}', "it is not valid by its JSON Schema: a: 'x' is not of type 'integer'"),
        (b"[]", "it is not valid by its JSON Schema: the object: [] is not of type 'object'"),
        (b"{", "it is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"a": NaN}', "it is no JSON: NaN is no number of JSON"),
        (b"\xff", "it is no UTF-8: invalid start byte"),
    ],
)
def test_what_is_not_valid_has_a_reason(data: bytes, why: str) -> None:
    with pytest.raises(CodecError) as refused:
        reader(an_object(a={"type": "integer"}))(data)
    assert str(refused.value) == why


@pytest.mark.parametrize(
    ("schema", "number", "why"),
    [
        ({"multipleOf": 0.01}, "19.99", None),
        ({"multipleOf": 0.01}, "19.995", "19.995 is not a multiple of 0.01"),
        ({"multipleOf": 0.1}, "3", None),
        ({"multipleOf": 3}, "1e30", "is not a multiple of 3"),
        ({"multipleOf": 1e-30}, "1e30", None),
        ({"exclusiveMaximum": 1}, "0.99999999999999999999", None),
        (
            {"maximum": 9007199254740992},
            "9007199254740992.5",
            "is greater than the maximum of 9007199254740992",
        ),
        ({"enum": [0.1]}, "0.10000000000000000001", "0.10000000000000000001 is not one of [0.1]"),
        ({"uniqueItems": True}, "[0.1, 0.10000000000000000001]", None),
        ({"uniqueItems": True}, "[1, 1.0]", "[1, 1] has non-unique elements"),
        ({"const": True}, "1.0", "True was expected"),
        ({"type": "integer"}, "1.0", None),
        ({"type": "integer"}, "1E+3", None),
        ({"type": "integer"}, "9007199254740993.5", "9007199254740993.5 is not of type 'integer'"),
        ({"type": "boolean"}, '{"in": [1.50]}', "{'in': [1.50]} is not of type 'boolean'"),
        # Drafts 3 and 4 tell integers by how they are written.
        ({"type": "integer", "$schema": DRAFT_4}, "1.0", "1.0 is not of type 'integer'"),
        ({"type": "integer", "$schema": DRAFT_4}, "1", None),
        ({}, "1e999999999", "a number has more than 4300 digits"),
        ({}, "-1e-999999999", "a number has more than 4300 digits"),
        ({}, f"0.{'1' * 5000}", "a number has more than 4300 digits"),
        ({}, f"1e{'9' * 30}", "a number has more than 4300 digits"),
    ],
)
def test_numbers_are_held_against_a_schema_as_they_are_written(
    schema: Any, number: str, why: str | None
) -> None:
    found = json_schema.why_invalid(number, json_schema.validator_of(json.dumps(schema)))
    assert found is None if why is None else why in str(found)


def test_nothing_is_fetched() -> None:
    with pytest.raises(SchemaError, match="cannot be used"):
        reader(an_object(a={"$ref": "http://127.0.0.1:1/schema.json"}))(b'{"a": 1}')
    known = ("item.json", '{"type": "integer"}')
    assert reader(an_object(a={"$ref": "item.json"}), known)(b'{"a": 1}') == '{"a": 1}'


def test_what_a_reader_leaves_out() -> None:
    inner = {"oneOf": [{"type": "null"}, {"properties": {"x": {}, "y": {"type": ["string", "number"]}}}]}
    writer = an_object(a={}, n=inner, l={"items": {"$ref": "item.json"}}, b=True, m={"$ref": "#/nowhere"})
    ours = parse_ddl("a INT, n STRUCT<x: INT>, l ARRAY<STRUCT<p: INT>>, m MAP<STRING, INT>")
    references = [("item.json", an_object(p={}, q={}))]
    assert json_schema.differences(writer, references, ours).left_out == ["n.y", "l[].q", "b"]


def test_a_derived_schema_takes_what_a_sink_writes() -> None:
    fields = parse_ddl("a BIGINT, f DOUBLE, s STRING, l ARRAY<STRUCT<x: BIGINT>>, m MAP<STRING, BOOLEAN>")
    text = json_schema.derive_schema(fields)
    write = json_schema.JsonSchemaWriter(text, b"\0").make_converter()
    for row in (
        {"a": 1, "f": 5e-324, "s": "x", "l": [{"x": None}, None], "m": {"k": True}},
        {"a": None, "f": 0.5, "s": None, "l": None, "m": None},
    ):
        data = json.dumps(row).encode()
        assert write(data) == b"\0" + data
    for text in (b'{"a": "x"}', b'{"f": "NaN"}'):
        with pytest.raises(CodecError):
            write(text)
    assert json_schema.fields_of(json_schema.derive_schema(fields)) == fields


REQUIRED = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "integer"}, "o": {"type": "string"}}
        | {"r": {"properties": {"x": {"anyOf": [{"type": "number"}, {"type": "null"}]}}, "required": ["x"]}},
        "required": ["a", "b"],
    }
)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a":"x","b":1}', '{"a":"x","b":1}'),
        ('{"b":1.0E2}', '{"b":1.0E2,"a":null}'),
        (
            '{"b":9007199254740993,"o":"\\u2028é","r":{}}',
            '{"b":9007199254740993,"o":"\u2028é","r":{"x":null},"a":null}',
        ),
        ('{"b":1,"r":{"x":-0.0}}', '{"b":1,"r":{"x":-0.0},"a":null}'),
    ],
)
def test_null_is_written_where_the_schema_requires_a_value_that_may_be_null(text: str, written: str) -> None:
    assert (
        json_schema.JsonSchemaWriter(REQUIRED, b"p").make_converter()(text.encode()) == f"p{written}".encode()
    )


def test_a_value_that_is_required_and_must_not_be_null_makes_a_row_bad() -> None:
    with pytest.raises(CodecError, match="the object: 'b' is a required property"):
        json_schema.JsonSchemaWriter(REQUIRED).make_converter()(b'{"a":"x"}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"a": {"type": "integer"}}, "'a' is written as string, and the schema has integer"),
        ({"n": {"type": "boolean"}}, "'n' is written as integer"),
        ({"r": {"type": "object", "properties": {"x": {"type": "boolean"}}}}, "'r.x' is written as string"),
        ({"l": {"type": "array", "items": {"type": "string"}}}, "'l[]' is written as number"),
        ({"m": {"type": "object", "additionalProperties": {"type": "string"}}}, "'m[]' is written as number"),
        ({"l": {"type": "object", "additionalProperties": {"type": "string"}}}, "'l' is written as array"),
        ({"n": {"type": "number"}, "l": {"type": "array", "items": {"type": "integer"}}}, None),
        ({"r": {"type": "object", "additionalProperties": {"type": "string"}}}, None),
    ],
)
def test_columns_that_can_never_be_valid_are_refused(schema: Any, why: str | None) -> None:
    columns = parse_ddl("a STRING, n INT, r STRUCT<x: DATE>, l ARRAY<DOUBLE>, m MAP<STRING, FLOAT>")
    form = JsonSchema(an_object(**schema))
    if why is None:
        form.check_fields(columns, "the value")
        return
    with pytest.raises(SchemaError, match=re.escape(why)):
        form.check_fields(columns, "the value")


def test_fields_name_the_columns_of_a_sink() -> None:
    choice = json.dumps({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]})
    columns = parse_ddl("a STRING, b INT, c LONG")
    for form, wanted in (
        (JsonSchema(choice, fields="a STRING, b INT"), ["a", "b"]),
        (JsonSchema(fields="b INT"), ["b"]),
    ):
        assert form.make_writer(columns, ["t"], "value").fields.names == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"then": {"$ref": "#/nope"}},
        {"properties": {"a": {"not": {"$ref": "other.json"}}}},
        {"$defs": {"x": {"items": {"$ref": "#/$defs/y"}}}, "$schema": DRAFT_2020},
    ],
)
def test_a_reference_of_a_sink_that_leads_nowhere_is_no_record_s_affair(schema: Any) -> None:
    with pytest.raises(SchemaError, match="which is not there"):
        json_schema.check_references(json.dumps(schema))


def test_a_reference_within_the_schema_may_lead_around() -> None:
    json_schema.check_references(
        '{"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/definitions/b"}}, "definitions": {"b": {}}}'
    )


@pytest.mark.parametrize("form", [JsonSchema(), JsonSchema(an_object(a={"type": "integer"}))])
def test_a_sink_without_the_library_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, form: JsonSchema
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(EnvironmentFault, match="a format needs jsonschema"):
        form.check_start(cast("Any", None), parse_ddl("a INT"), "the value")
