"""How work on a version tells what is done, shard by shard."""

from collections.abc import Callable
from typing import TypeAlias

OnShard: TypeAlias = Callable[[int, float, bool], object]
"""A function that is called after each shard: with the utterances and the seconds of audio
that are done, and true if the shard is damaged. A second pass has no more utterances."""


def no_progress(utterances: int, seconds: float, is_damaged: bool) -> None:
    """Show nothing, as an `OnShard`."""
