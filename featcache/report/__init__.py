"""A report of a cache: its numbers, and a page of HTML that shows them, as `featcache
report` writes it."""

from featcache.report.clips import make_clips
from featcache.report.numbers import Report, collect
from featcache.report.page import make_page

__all__ = ["Report", "collect", "make_clips", "make_page"]
