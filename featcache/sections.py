"""The base of a config's sections, and of the models inside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A section of a config, which refuses unknown names, NaN, infinity, and true or false
    for numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for 1, and YAML takes `low_freq: yes` for true."""
        if _may_be_bool(cls.model_fields[info.field_name or ""].annotation):
            return value
        if isinstance(value, list):
            return [_Truth(inner) if isinstance(inner, bool) else inner for inner in value]
        return _Truth(value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class _Truth:
    """True or false, as a value that pydantic takes for nothing else."""

    value: bool

    def __str__(self) -> str:
        return str(self.value).lower()


def _may_be_bool(annotation: Any) -> bool:
    return (
        annotation in (bool, Any, object)
        or annotation is True
        or any(map(_may_be_bool, get_args(annotation)))
    )
