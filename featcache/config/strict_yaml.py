"""YAML as a config may have it: safe, without keys given twice, and no larger or deeper
than a config needs."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import chain
from typing import Any

import yaml

_MOST_DEPTH = 32
_MOST_VALUES = 100_000
"""The number of values of a config, of which each counts as often as an alias repeats it."""


def load_yaml(text: str) -> Any:
    """The only document of a text. Raises ValueError, in one line that says where, if it
    is no YAML, or too large."""
    try:
        return yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        # one line, whatever PyYAML makes of it
        problem = " ".join(str(getattr(error, "problem", error)).split())
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}not valid YAML: {problem}") from error


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML as yaml.safe_load does, but a key that is given twice and a merge key
    (`<<`) are errors, and depth and size are limited. From every method: yaml.YAMLError,
    whatever is wrong."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # by node: how many values it holds, and how deep they are
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > _MOST_DEPTH:
            raise _refused(f"nested more than {_MOST_DEPTH} deep", self.get_mark())
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        try:
            node = super().compose_node(parent, index)
        finally:
            self._depth -= 1
        if node is not None and not is_alias:
            self._measure(node)
        return node

    def _measure(self, node: yaml.Node) -> None:
        """Refuse a node that is too large, or too deep, by the aliases in it; what it
        holds has been measured."""
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        nodes = chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
        # none yet, if it holds itself
        sizes = [self._sizes.get(id(one), (_MOST_VALUES, 0)) for one in nodes]
        size, depth = (
            1 + sum(values for values, _ in sizes),
            max((deep + 1 for _, deep in sizes), default=0),
        )
        if size > _MOST_VALUES or depth > _MOST_DEPTH:
            raise _refused(
                f"more than {_MOST_VALUES:,} values, or {_MOST_DEPTH} levels, by aliases",
                node.start_mark,
            )
        self._sizes[id(node)] = size, depth

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            # Deep, since PyYAML would otherwise construct what is inside at the end, with
            # errors of its own.
            return super().construct_object(node, deep=True)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            shown = f"{node.value!r:.40}" if isinstance(node, yaml.ScalarNode) else "this"
            raise _refused(f"{shown} is no {kind}: {error}", node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _refused(
                    "merge keys (<<) are not read: write the keys out", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise _refused("a list or mapping cannot be a key", key_node.start_mark)
            if key in seen:
                raise _refused(f"the key {key!r:.40} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _refused(problem: str, mark: yaml.Mark | None) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=mark)
