"""Augmentation on the device where the features are: noise, SpecAugment, mixing; vectorised, and never waited for.

    augment = featcache.augment.SpecAugment(seed=0)
    features = augment(features, lengths, step=step)  # in training; in eval mode features come back as they are

What is drawn follows from the seed, the step and the shapes alone: not from torch's global generators, which are left
as they are, and not from what else ran. A resumed run draws at each step what the first one did. Two augmentations of
one kind in one model, and each rank of a distributed run, want a seed of their own.

Frames beyond an utterance's length, its padding, stay as they are. On a CPU and on a GPU other numbers are drawn.
"""

from featcache.augment.base import Augmentation
from featcache.augment.mixing import Mixed, MixEnergies, Mixup
from featcache.augment.noise import GaussianNoise
from featcache.augment.spec_augment import SpecAugment

__all__ = ["Augmentation", "GaussianNoise", "MixEnergies", "Mixed", "Mixup", "SpecAugment"]
