"""What a training reads, in DataLoader's workers and in processes of its own: pickled, so
in a module."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

import featcache
from featcache.errors import FeatcacheWarning, StoreError

REMEDY = re.compile(r"open(ed)? (it|the cache|the version)?.*again|featcache (repair|extract)")
"""What a message tells its reader to do."""


class Reading(Dataset):
    """Utterances by number, in the order of `ids`: the id, the bytes, and in their place
    the message of an error."""

    def __init__(self, cache, ids):
        self.cache, self.ids = cache, ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        id_ = self.ids[number]
        with warnings.catch_warnings():
            # of a damaged shard, which is not copied to a local disk
            warnings.simplefilter("ignore", FeatcacheWarning)
            try:
                return id_, np.asarray(self.cache[id_]).tobytes(), ""
            except StoreError as error:
                return id_, b"", str(error)


def read_with_local_copies(cache: str, disk: str, expected: str) -> None:
    """Read everything thrice, with copies on a local disk where something may go wrong;
    every value must be right."""
    values = {
        id_: bytes.fromhex(data) for id_, data in json.loads(Path(expected).read_text()).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatcacheWarning)
        opened = featcache.open(cache, copy_to=disk)
        for _ in range(3):
            for id_, data in values.items():
                assert np.asarray(opened[id_]).tobytes() == data, id_
            while opened._shards.is_at_work:
                opened.item(0)
