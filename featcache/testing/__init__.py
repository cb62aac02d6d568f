"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or its content, as a dict

pytest runs each check; a failure names the guarantee and the clip that violates it. The
suite needs pytest and the extra `extract`.
"""

from featcache.testing.clips import assert_same, extract, make_clip
from featcache.testing.declarations import Declarations
from featcache.testing.independence import Independence
from featcache.testing.rows import RowChecks
from featcache.testing.values import Values

__all__ = ["ExtractorSuite", "assert_same", "extract", "make_clip"]


class ExtractorSuite(Declarations, Values, Independence, RowChecks):
    """The guarantees of an extractor, as tests: inherit from it in a class whose name
    begins with `Test`.

    Whether values are correct is checked only if the class defines `reference`.

    Attributes:
        config: A YAML file, the name of a packaged config, or the content of a config as
            a dict. If it is only known when tests run, override the fixture `loaded`
            instead.
        device: The device to run on. On a GPU, torch is configured as in a run (no TF32,
            repeatable kernels), and stays so for the rest of the process.
        tolerance: For floats, how far values may differ by rounding, in batches of other
            shapes and from `reference`, relative to a clip's largest value.
        ties: For codes, the share of frames that may differ there, since rounding decides
            between equally near codewords. Real errors change several per cent.
        seconds: The approximate length of the longest clip. Increase it to reach effects
            in long clips, such as chunks.
        lengths: The lengths of further clips, in samples.
    """
