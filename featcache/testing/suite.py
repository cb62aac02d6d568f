"""The guarantees of an extractor, as a class of pytest tests."""

from __future__ import annotations

from featcache.testing.alone import AloneChecks
from featcache.testing.declared import DeclaredChecks
from featcache.testing.rows import RowChecks
from featcache.testing.values import ValueChecks


class ExtractorSuite(RowChecks, ValueChecks, AloneChecks, DeclaredChecks):
    """Inherit from it in a class whose name begins with `Test`, and set `config`.

    Whether values are correct is checked only if the class defines `reference`.

    Attributes:
        config: a YAML file, the name of a packaged config, or the content of a config as a dict. If it is only known
            when tests run, override the fixture `loaded` instead.
        device: to run on.
        tolerance: for floats, relative to a clip's largest value: how far values may differ by rounding, in batches of
            other shapes and in `reference`.
        ties: for codes, the share of frames that may differ there, since rounding decides between equally near
            codewords. Real errors change several per cent.
        seconds: approximate length of the longest clip. Increase it to reach effects in long clips, such as chunks.
        lengths: lengths of further clips, in samples.
    """
