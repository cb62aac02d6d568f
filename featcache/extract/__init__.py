"""The main job: what of a manifest is missing, and how it becomes features in shards."""
