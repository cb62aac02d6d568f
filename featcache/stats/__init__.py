"""What a version's values are like: `moments` of features, `usage` of codes; what `featcache stats` prints."""

from featcache.stats.codes import Usage, usage
from featcache.stats.features import moments
from featcache.stats.result import Stats

__all__ = ["Stats", "Usage", "moments", "usage"]
