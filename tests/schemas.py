"""Fifty JSON schemas of every kind. All are bounded, so that a model that knows nothing still comes to an end."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 12}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
ZIP: Schema = {"type": "string", "pattern": "^[0-9]{5}$"}
COLOUR: Schema = {"enum": ["red", "green", "blue"]}


def obj(properties: dict[str, Schema], required: list[str] | None = None, **more: Any) -> Schema:
    """A closed object, all of whose properties are required unless said otherwise."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


def array(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TREE: Schema = {
    "$defs": {"leaf": obj({"value": DIGIT}), "pair": obj({"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}})},
    "$ref": "#/$defs/pair",
}

SCHEMAS: dict[str, Schema] = {
    "text": TEXT,
    "short-text": {"type": "string", "minLength": 2, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{3}-[0-9]{2}$"},
    "pattern-alternatives": {"type": "string", "pattern": "^(yes|no|maybe)$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integer": {"type": "integer", "minimum": -20, "maximum": 120},
    "above-and-below": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5},
    "number": {"type": "number", "minimum": 0.5, "maximum": 2.25, "multipleOf": 0.01},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "constant": {"const": {"a": [1, 2, {"b": None}], "c": "d"}},
    "constant-text": {"const": "Grüße, 世界 🎉"},
    "enum": COLOUR,
    "enum-mixed": {"enum": [1, "one", None, True, [1], {"one": 1}]},
    "enum-prefixes": {"enum": ["a", "ab", "abc", "abcd", "b"]},
    "enum-unicode": {"enum": ["日本語", "русский", "ελληνικά", "🙂🙃"]},
    "enum-escapes": {"enum": ['quote"d', "back\\slash", "line\nbreak", "tab\there"]},
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    "any-of": {"anyOf": [DIGIT, {"type": "boolean"}, {"enum": ["none"]}]},
    "one-of": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 6}]},
    "one-of-objects": {
        "oneOf": [
            obj({"kind": {"const": "circle"}, "radius": DIGIT}),
            obj({"kind": {"const": "square"}, "side": DIGIT}),
        ]
    },
    "any-of-objects": {"anyOf": [obj({"name": TEXT}), obj({"id": DIGIT, "name": TEXT})]},
    "all-of": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 8}]},
    "empty-object": obj({}),
    "object": obj({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "object-optional": obj({"name": TEXT, "nick": TEXT, "age": DIGIT}, ["name"]),
    "object-all-optional": obj({"a": DIGIT, "b": DIGIT, "c": DIGIT}, []),
    "object-unicode-keys": obj({"größe": DIGIT, "名前": TEXT, "emoji 🙂": {"type": "boolean"}}),
    "object-odd-keys": obj({'a"b': DIGIT, "c\\d": DIGIT, "": DIGIT, "<tool_call>": DIGIT}),
    "object-values": {"type": "object", "properties": {"total": DIGIT}, "required": ["total"], "additionalProperties": False},
    "object-pattern": obj({"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, "ok": {"type": "boolean"}}),
    "array": array(DIGIT, 2, 5),
    "array-of-texts": array({"type": "string", "maxLength": 6}, 1, 3),
    "array-of-enums": array(COLOUR, 3, 3),
    "array-empty": array(DIGIT, 0, 0),
    "array-of-objects": array(obj({"id": DIGIT, "colour": COLOUR}), 1, 2),
    "array-of-arrays": array(array(DIGIT, 1, 2), 2, 2),
    "tuple": {"type": "array", "prefixItems": [COLOUR, DIGIT, {"type": "boolean"}], "items": False, "minItems": 3},
    "nested": obj({"user": obj({"name": TEXT, "address": obj({"city": TEXT, "zip": ZIP})})}),
    "deeply-nested": obj({"a": obj({"b": obj({"c": obj({"d": obj({"e": DIGIT})})})})}),
    "references": TREE,
    "reference-twice": {
        "$defs": {"point": obj({"x": DIGIT, "y": DIGIT})},
        **obj({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "linked": {
        "$defs": {"node": obj({"value": DIGIT, "next": {"anyOf": [{"type": "null"}, obj({"value": DIGIT})]}})},
        "$ref": "#/$defs/node",
    },
    "order": obj({
        "id": {"type": "string", "pattern": "^ord-[0-9]{4}$"},
        "items": array(obj({"sku": TEXT, "count": {"type": "integer", "minimum": 1, "maximum": 20}}), 1, 2),
        "status": {"enum": ["open", "paid", "sent"]},
        "note": {"type": ["string", "null"], "maxLength": 10},
    }),
    "weather": obj({
        "city": TEXT,
        "celsius": {"type": "number", "minimum": -40, "maximum": 50, "multipleOf": 0.1},
        "sky": array({"enum": ["clear", "cloud", "rain", "snow"]}, 1, 2),
        "wind": obj({"kmh": {"type": "integer", "minimum": 0, "maximum": 200}, "from": {"enum": ["N", "E", "S", "W"]}}),
        "sure": {"type": "boolean"},
    }),
}  # fmt: skip

assert len(SCHEMAS) == 50, len(SCHEMAS)
