"""What batching and precision do to an extractor's values, measured on this device with some utterances.

The reference is each utterance alone, at its own length, in fp32: how a model is run by hand. Every policy and
precision is held to it. So that batches are as full as a corpus makes them, though the sample is small, an utterance
is computed among strangers: cuts of the other utterances, as long as the policy lets the rows of a batch be. Each is
computed twice: once to warm up, and once for the time, among other strangers.

Rounding is measured, too: what becomes of an utterance among copies of itself, in the shape of a batch and with nothing
beside it that could disturb it. Four times the largest difference that this makes, and at least half a unit in the last
place below fp32, is taken for rounding at that precision.
"""
