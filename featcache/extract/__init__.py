"""The main job: from a manifest and configs to shards of features."""
