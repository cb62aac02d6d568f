"""Imported by `featcache` processes of tests: a run that waits for another says so at once, and again."""

from featcache.engines import waiting

waiting.FIRST_SECONDS = 0.1
waiting.AGAIN_SECONDS = 0.2
