"""How many utterances may fail before a run stops: `--max-failures`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from featcache.errors import ArgumentError

_MIN_TRIED = 100
"""The utterances that must be tried before a share of them counts."""

_TEXT = re.compile(r"(\d{1,9})|(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)


@dataclass(frozen=True)
class FailureLimit:
    """The utterances that may fail in a run: a number, or a share of those tried."""

    text: str
    count: float
    share: float
    """The share, 0 to 1; 1 if there is only a number."""

    @classmethod
    def parse(cls, text: str | int) -> FailureLimit:
        """Parse a number, such as `20`, or a percentage, such as `0.5%`. Raises ArgumentError
        if the text is neither."""
        text = str(text).strip()
        match = _TEXT.fullmatch(text)
        if match is None or float(match[2] or 0) > 100:
            raise ArgumentError(
                f"--max-failures is {text!r}: give a number of utterances, or a percentage "
                "such as 1%"
            )
        return cls(text, float(match[1] or math.inf), float(match[2] or 100) / 100)

    def fault(self, failed: int, tried: int, is_end: bool) -> str:
        """Return a message if too many have failed, otherwise an empty string. A share counts
        once 100 were tried, and at the end of the run."""
        share_counts = is_end or tried >= _MIN_TRIED
        if failed <= self.count and not (share_counts and failed > self.share * tried):
            return ""
        are = "utterance that was tried has" if tried == 1 else "utterances that were tried have"
        return f"{failed:,} of the {tried:,} {are} failed, and --max-failures allows {self.text}"
