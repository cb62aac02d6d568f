"""Batches of utterances, from files to features as stored; see `batch.process`."""
