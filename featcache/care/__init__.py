"""Whether a version is what it should be, and what to do about it: verify, repair, prune,
copy, remove."""
