"""One batch of utterances after the other, from files to features as they are stored: `batch.process` does it."""
