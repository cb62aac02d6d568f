"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or its content, as a dict

pytest then runs each check. If a check fails, it says what is violated, and by which clip. The suite needs pytest and
the extra `extract`.
"""

from featcache.testing.suite import ExtractorSuite

__all__ = ["ExtractorSuite"]
