"""Statistics of a version: `moments` of features, `usage` of codes, as printed by `featcache stats`."""

from featcache.stats.codes import Usage, usage
from featcache.stats.features import moments
from featcache.stats.result import Stats

__all__ = ["Stats", "Usage", "moments", "usage"]
