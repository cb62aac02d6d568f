"""The main job: from a manifest and configs to shards of features.
`featcache.engines.main_job` does all of it."""
