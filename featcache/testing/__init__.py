"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or its content, as a dict

pytest runs each check; a failure names the guarantee and the clip that violates it. The
suite needs pytest and the extra `extract`.
"""

from featcache.testing.clips import extract, make_clip
from featcache.testing.differences import assert_same
from featcache.testing.suite import ExtractorSuite

__all__ = ["ExtractorSuite", "assert_same", "extract", "make_clip"]
