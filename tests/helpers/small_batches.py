"""Imported by `featcache` processes of tests: a batch is one utterance, so that a shard
has several."""

from featcache.device import BATCH_SECONDS

BATCH_SECONDS["cpu"] = 0.01
