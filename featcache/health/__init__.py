"""Whether what was extracted is right: verify, recompute, repair, probe."""
