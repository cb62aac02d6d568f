"""What must hold of an extractor, as a class of pytest's tests."""

from __future__ import annotations

from featcache.testing.alone import AloneChecks
from featcache.testing.declared import DeclaredChecks
from featcache.testing.rows import RowChecks
from featcache.testing.values import ValueChecks


class ExtractorSuite(RowChecks, ValueChecks, AloneChecks, DeclaredChecks):
    """Inherit it, in a class whose name begins with `Test`, and say which config.

    What cannot be checked of any extractor, that its values are the right ones, is checked where the class has
    a `reference`.

    Attributes:
        config: a YAML file, a packaged config's name, or what is in such a file. Where it is only known when
            tests run, override the fixture `loaded` instead.
        device: to run on.
        tolerance: of floats, in parts of a clip's largest: how far two ways to compute them may lie apart where
            they round differently, in batches of other shapes and in `reference`.
        ties: of codes, the share of frames that may differ there. Of two codewords that are equally near, rounding
            chooses. Where anything else is wrong, it is some per cent.
        seconds: the longest clip's, about. Give more where something begins later: chunks, say.
        lengths: of further clips, in samples.
    """
