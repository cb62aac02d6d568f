"""The ids of copies: what is made of an id, what is read from one, and what is refused."""

import contextlib
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from featcache.errors import ManifestError
from featcache.manifest.copies import PLAIN, copies_of, expand
from featcache.manifest.read import manifest_of
from featcache.manifest.strings import Strings

SPEEDS = st.lists(
    st.sampled_from([0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 2.0]), min_size=1, unique=True
)
SNRS = st.lists(st.sampled_from([-5.0, 0.0, 2.5, 5.0, 10.0, 15.0, 20.0]), unique=True)
IDS = st.lists(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12), unique=True
)


def section(speeds, snrs=()):
    noise = {"snr": list(snrs), "manifest": "n.csv", "seed": 0, "content": "…"} if snrs else None
    return {"augment": {"speed": list(speeds), "noise": noise}}


def test_every_speed_has_a_clean_copy_and_one_for_each_snr():
    """Numbers in suffixes are written as short as they can be."""
    copies = copies_of(section([0.9, 1.0, 2.0], [-2.5, 15.0]))
    assert copies == pickle.loads(pickle.dumps(copies)) != copies_of(section([0.9, 1.0]))
    assert copies.suffixes == [
        speed + snr for speed in ("_sp0.9", "", "_sp2") for snr in ("", "_snr-2.5", "_snr15")
    ]
    assert copies.speeds.tolist() == [0.9] * 3 + [1.0] * 3 + [2.0] * 3
    np.testing.assert_array_equal(copies.snrs, [np.nan, -2.5, 15] * 3)


def test_a_config_without_the_section_makes_the_utterance_itself():
    for config in ({}, {"augment": None}, section([1.0])):
        copies = copies_of(config)
        assert list(copies) == [PLAIN]
        assert copies.are_plain
        ids = Strings.of(["a", "b_sp0.9"])
        assert copies.ids(ids) is ids
        assert copies.copy_of("b_sp0.9") == PLAIN


@given(IDS, SPEEDS, SNRS)
def test_an_id_tells_which_copy_it_is(ids, speeds, snrs):
    copies = copies_of(section(speeds, snrs))
    assume(not any(id_.endswith(suffix) for id_ in ids for suffix in copies.suffixes if suffix))
    made = list(copies.ids(Strings.of(ids)))
    assert made == [f"{id_}{copy.suffix}" for id_ in ids for copy in copies]
    assert len(set(made)) == len(made)
    assert [copies.copy_of(id_).suffix for id_ in made] == copies.suffixes * len(ids)
    assert copies.numbers(Strings.of(made)).tolist() == list(range(len(copies))) * len(ids)


@given(IDS, SPEEDS, SNRS, st.data())
def test_ids_that_end_like_copies_are_refused_and_no_others(ids, speeds, snrs, data):
    copies = copies_of(section(speeds, snrs))
    suffixes = tuple(filter(None, copies.suffixes))
    if suffixes and ids and data.draw(st.booleans()):
        ids = [*ids[:-1], ids[-1] + data.draw(st.sampled_from(suffixes))]
    refused = contextlib.nullcontext()
    if ends := [id_ for id_ in ids if id_.endswith(suffixes)]:
        refused = pytest.raises(
            ManifestError, match=rf"train.csv: {len(ends)} of {len(ids)} ids end in"
        )
    with refused:
        copies.refuse_suffixed(Strings.of(ids), "train.csv")


def test_ids_of_another_configs_copies_are_plain_names_which_without_speed_1_are_no_copies():
    copies = copies_of(section([0.9, 1.0]))
    assert copies.copy_of("utt-1_sp1.1") == PLAIN
    assert copies.copy_of("utt-1_snr5") == PLAIN
    copies.refuse_suffixed(Strings.of(["utt-1_sp1.1"]), "train.csv")
    without_speed_1 = copies_of(section([0.9, 1.1]))
    assert without_speed_1.numbers(Strings.of(["a", "a_sp0.9", "a_sp1.1"])).tolist() == [-1, 0, 1]


def test_a_manifest_gets_a_row_for_each_copy_beside_the_others_of_its_utterance():
    rows = [{"id": "ab"[n], "path": f"{n}.wav", "start": n, "speaker": "xy"[n]} for n in range(2)]
    expanded = expand(manifest_of(rows), copies_of(section([1.0, 1.1])))
    assert list(expanded.ids) == ["a", "a_sp1.1", "b", "b_sp1.1"]
    assert list(expanded.paths) == ["0.wav", "0.wav", "1.wav", "1.wav"]
    assert list(expanded.columns["speaker"]) == ["x", "x", "y", "y"]
    assert expanded.start.tolist() == [0, 0, 1, 1]
    assert np.isnan(expanded.duration).all()
    assert expanded.channel.tolist() == [-1] * 4
