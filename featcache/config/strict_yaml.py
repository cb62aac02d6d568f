"""YAML of configs: safe, not too deep, without aliases and without keys given twice."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

_MOST_DEPTH = 32


def load_yaml(text: str) -> Any:
    """Read the only document of a text. Raises a ValueError of one line if it is no such YAML."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        where, mark = "", getattr(error, "problem_mark", None)
        if mark:
            where = f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise ValueError(f"{where}not valid YAML: {problem}") from error


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML as yaml.safe_load does, within these limits. Raises only yaml.YAMLError."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > _MOST_DEPTH:
            raise _refused(f"nested more than {_MOST_DEPTH} deep", self.get_mark())
        if self.check_event(yaml.AliasEvent):
            raise _refused("aliases (*) are not read: repeat the value", self.get_mark())
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            # otherwise PyYAML constructs inner nodes at the end, and raises other errors
            return super().construct_object(node, deep=True)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            value = "this"
            if isinstance(node, yaml.ScalarNode):
                value = f"{node.value!r:.40}"
            raise _refused(f"{value} is no {kind}: {error}", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                what = "merge keys (<<) are not read: write the keys out"
                raise _refused(what, key_node.start_mark)
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise _refused("a list or mapping cannot be a key", key_node.start_mark)
            if key in seen:
                raise _refused(f"the key {key!r:.40} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refused(problem: str, mark: yaml.Mark | None) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)
