"""Bridges to other toolkits, one file each. Nothing else of featcache imports them, and each imports its own alone."""
