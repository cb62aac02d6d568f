"""JSON Schema of configs, for editors, from the models that validate them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from featcache import extractors
from featcache.config.config import SECTIONS, ConfigFile, listable_params
from featcache.errors import ConfigError


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of configs, with the parameters of every
    registered extractor, without what values say of each other."""
    models = {}
    for name in sorted(extractors.registered()):
        with suppress(ConfigError):  # an entry point of an incomplete package
            models[name] = extractors.find(name).Params
    all_models: list[type[BaseModel]] = [ConfigFile, *dict.fromkeys(models.values())]
    places, schema = models_json_schema(
        [(model, "validation") for model in all_models], schema_generator=_Described
    )
    definitions = schema["$defs"]
    for model in models.values():
        keys = definitions[model.__name__]["properties"]
        keys |= {name: _or_several(keys[name]) for name in listable_params(model)}
    top = definitions.pop(ConfigFile.__name__)
    keys = top["properties"]
    keys["extractor"] |= {"anyOf": [{"enum": [*models]}, {"pattern": ":"}]}
    keys |= {section: _or_empty(keys[section]) for section in SECTIONS}
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "A config of featcache",
        **top,
        "allOf": [
            _of_extractor(name, model, places[model, "validation"])
            for name, model in models.items()
        ],
        "$defs": definitions,
    }


class _Described(GenerateJsonSchema):
    """Leaves out titles, which would repeat the keys, and line ends in descriptions."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        described = super().model_schema(schema)
        described.pop("title", None)
        for key in described.get("properties", {}).values():
            if "description" in key:
                key["description"] = " ".join(key["description"].split())
        return described


def _of_extractor(name: str, model: type[BaseModel], params: dict[str, Any]) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"params": _or_empty(params)}}
    if any(field.is_required() for field in model.model_fields.values()):
        then = {"properties": {"params": params}, "required": ["params"]}
    condition = {"properties": {"extractor": {"const": name}}, "required": ["extractor"]}
    return {"if": condition, "then": then}


def _or_several(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter of which a config may list several values."""
    about, values = _apart(schema)
    return {**about, "anyOf": [values, {"type": "array", "items": values, "minItems": 1}]}


def _or_empty(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section that may be left empty."""
    about, values = _apart(schema)
    empty = {"type": "null"}
    choices = [choice for choice in values.get("anyOf", [values]) if choice != empty]
    return {**about, "anyOf": [*choices, empty]}


def _apart(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a schema says about a key, and about its values."""
    values = dict(schema)
    about: dict[str, Any] = {
        key: values.pop(key) for key in ("description", "default") if key in values
    }
    return about, values
