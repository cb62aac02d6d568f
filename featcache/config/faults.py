"""Faults of a config in terms of YAML, each with its dotted path and the given value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

_SHOULD_BE = "Input should be "
_KINDS = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
    "string_type": "text",
    "none_required": "left out",
}
"""What a value should be, by pydantic's name of the fault, where pydantic's message is about Python and not YAML."""

_LONGEST = 40  # characters of a value in a message


def faults_of(
    error: ValidationError, document: Any, model: type[BaseModel], above: Sequence[str] = ()
) -> Iterator[str]:
    """Describe each fault of a document, which its model has found, in one line; `above` is the path of the document in
    the config, part by part.
    """
    wanted: dict[str, list[str]] = {}  # by path, since a union has a fault for each of its alternatives
    values: dict[str, Any] = {}
    for fault in error.errors():
        parts = _parts(fault["loc"], document)
        path = ".".join([*above, *parts])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            yield f"{path}: {_no_such_key(parts, model)}"
        elif fault["type"] in _KINDS or message.startswith(_SHOULD_BE):
            wanted.setdefault(path, []).append(_KINDS.get(fault["type"], message.removeprefix(_SHOULD_BE)))
            values[path] = fault["input"]
        else:
            yield f"{path}: {message[0].lower()}{message[1:]}"
    for path, kinds in wanted.items():
        yield f"{path}: should be {', or '.join(dict.fromkeys(kinds))}, not {_shown(values[path])}"


def _parts(location: Sequence[str | int], document: Any) -> list[str]:
    """The part of pydantic's location that is in the document: it also names the alternatives of unions."""
    parts, here = [], document
    for number, part in enumerate(location):
        inner = {str(key): value for key, value in here.items()} if isinstance(here, dict) else here
        if isinstance(inner, dict) and (str(part) in inner or number == len(location) - 1):
            here = inner.get(str(part))
        elif isinstance(inner, list) and isinstance(part, int):
            here = inner[part]
        else:
            continue
        parts.append(str(part))
    return parts


def _no_such_key(parts: Sequence[str], model: type[BaseModel]) -> str:
    models = [model]
    for part in parts[:-1]:
        fields = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for annotation in fields for inner in _models(annotation)] or models
    keys = list(dict.fromkeys(key for model in models for key in model.model_fields))
    if alike := difflib.get_close_matches(parts[-1], keys, 1):
        return f"there is no such key (did you mean {alike[0]}?)"
    return "there is no such key" + (f" (there are {', '.join(keys)})" if keys else ", nor any other")


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted paths of all keys of a model, and of the models in it."""
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        for inner in _models(field.annotation):
            yield from keys_of(inner, f"{above}{name}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _shown(value: Any) -> str:
    """A value as YAML writes it, or the beginning of a long one."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, (str, bool)) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
