"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or what is in it, as a dict

pytest then runs each of its checks, and a failure says what does not hold and for which clip. It needs pytest, and
nothing else that extraction does not need.
"""

from featcache.testing.suite import ExtractorSuite

__all__ = ["ExtractorSuite"]
