"""Statistics of a version, as `featcache stats` prints them: `moments` of features,
`usage` of codes."""

from featcache.stats.code_usage import Usage, usage
from featcache.stats.mean_variance import Stats, moments

__all__ = ["Stats", "Usage", "moments", "usage"]
