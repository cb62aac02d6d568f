"""JSON Schema of configs, for editors, from the models that validate them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from featcache import extractors
from featcache.config.config import SECTIONS, ConfigFile
from featcache.errors import ConfigError


def config_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of configs, with the parameters of every registered
    extractor.

    What a config's values say of each other, and what is found when an extractor is
    built, is not in it."""
    models = {}
    for name in sorted(extractors.registered()):
        with suppress(ConfigError):  # an entry point of a package that is not whole
            models[name] = extractors.find(name).Params
    all_models: list[type[BaseModel]] = [ConfigFile, *dict.fromkeys(models.values())]
    places, schema = models_json_schema(
        [(model, "validation") for model in all_models], schema_generator=_Described
    )
    definitions = schema["$defs"]
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


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The string below each field, in the class or where it was inherited from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, below in pairwise(definition.body):  # type: ignore[attr-defined]
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    found[name] = " ".join(text.split())
    return found


class _Described(GenerateJsonSchema):
    """Says of each key what it means, and no titles, which would be the keys again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> Any:
        made = super().model_schema(schema)
        made.pop("title", None)
        with suppress(OSError):  # of a class without its source
            for key, meaning in meanings(schema["cls"]).items():
                if key in made.get("properties", {}):
                    made["properties"][key]["description"] = meaning
        return made


def _of_extractor(name: str, model: type[BaseModel], params: dict[str, Any]) -> dict[str, Any]:
    is_needed = any(field.is_required() for field in model.model_fields.values())
    then: dict[str, Any] = {"properties": {"params": params if is_needed else _or_empty(params)}}
    if is_needed:
        then["required"] = ["params"]
    named = {"properties": {"extractor": {"const": name}}, "required": ["extractor"]}
    return {"if": named, "then": then}


def _or_empty(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a section that may be left empty."""
    beside: dict[str, Any] = {
        key: schema[key] for key in ("description", "default") if key in schema
    }
    rest = {key: value for key, value in schema.items() if key not in beside}
    choices = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {**beside, "anyOf": [one for one in choices if one != _EMPTY] + [_EMPTY]}


_EMPTY = {"type": "null"}
