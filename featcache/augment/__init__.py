"""Augmentation of features on their device: noise, SpecAugment, mixing; vectorised, without waiting for the device.

    augment = featcache.augment.SpecAugment(seed=0)
    features = augment(features, lengths, step=step)  # in training; in eval mode features are returned unchanged

The random numbers depend only on the seed, the step and the shapes: not on torch's global generators, which are neither
read nor changed, nor on anything else that ran. A resumed run draws the same numbers at each step. Give two
augmentations of the same kind different seeds, and each rank of a distributed run too.

Frames beyond an utterance's length, its padding, are not changed. A CPU and a GPU draw different numbers.
"""

from featcache.augment.base import Augmentation
from featcache.augment.gaussian_noise import GaussianNoise
from featcache.augment.mixing import Mixed, MixEnergies, Mixup
from featcache.augment.spec_augment import SpecAugment

__all__ = ["Augmentation", "GaussianNoise", "MixEnergies", "Mixed", "Mixup", "SpecAugment"]
