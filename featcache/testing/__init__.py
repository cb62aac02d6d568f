"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or its content, as a dict

pytest then runs each check. If a check fails, it says what is violated, and by which clip. The suite needs pytest and
the extra `extract`.
"""

from featcache.testing.declared import DeclaredChecks
from featcache.testing.rows import RowChecks
from featcache.testing.values import AloneChecks, ValueChecks

__all__ = ["ExtractorSuite"]


class ExtractorSuite(RowChecks, ValueChecks, AloneChecks, DeclaredChecks):
    """The guarantees of an extractor, as tests: inherit from it in a class whose name begins with `Test`.

    Whether values are correct is checked only if the class defines `reference`.

    Attributes:
        config: A YAML file, the name of a packaged config, or the content of a config as a dict. If it is only known
            when tests run, override the fixture `loaded` instead.
        device: The device to run on.
        tolerance: For floats, how far values may differ by rounding, in batches of other shapes and from `reference`,
            relative to a clip's largest value.
        ties: For codes, the share of frames that may differ there, since rounding decides between equally near
            codewords. Real errors change several per cent.
        seconds: The approximate length of the longest clip. Increase it to reach effects in long clips, such as chunks.
        lengths: The lengths of further clips, in samples.
    """
