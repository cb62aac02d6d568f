"""How batching and precision change an extractor's values, measured on this device with some utterances.

The reference is each utterance alone, at its own length, in fp32: the model run by hand. Every policy and precision is
compared with it. To make batches as full as in a corpus although the sample is small, an utterance is computed together
with cuts of the other utterances, of the lengths that the policy allows in one batch. Each is computed twice: once to
warm up, and once for the time, with other cuts.

Rounding is measured too: an utterance is computed together with copies of itself, in the shape of a batch and with
nothing that could disturb it. Four times the largest difference, and at least half a unit in the last place below fp32,
counts as rounding at that precision.
"""
