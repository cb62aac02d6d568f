"""What `featcache diff` says of two versions is what was made different."""

import numpy as np
import pytest
from make_cache import codes_cache, make_features, make_version

from featcache.errors import ArgumentError, DamagedError
from featcache.loader.cache import Cache
from featcache.spec import Clip, Track
from featcache.stats.diff import diff


@pytest.fixture
def old(tmp_path):
    return Cache(make_version(tmp_path / "old", make_features(10)))


def test_a_version_does_not_differ_from_itself(old):
    found = diff(old, old, values=100)
    assert found.same_fingerprint
    assert [len(some) for some in (found.config, found.gone, found.added, found.changed)] == [
        0,
        0,
        0,
        0,
    ]
    assert found.common == found.values.utterances == found.values.identical == 10
    assert (found.values.largest, found.values.worst, found.values.other_lengths) == (0, None, 0)


def test_utterances_rows_keys_and_values(old, tmp_path):
    features = {id_: np.array(old[id_]) for id_ in old.ids}
    gone, moved, louder, longer, *_ = sorted(features)
    del features[gone]
    features[louder][-1, 7] += 3
    features[longer] = np.concatenate([features[longer], features[longer][:1]])
    features["another"] = features[moved]
    rows = {moved: {"path": "elsewhere.wav"}}
    made = make_version(tmp_path / "new", features, params={"low_freq": 40}, rows=rows)
    found = diff(old, Cache(made), values=100)
    assert not found.same_fingerprint
    assert found.config == ["params.low_freq: not given -> 40"]
    assert ([*found.gone], [*found.added], [*found.changed]) == ([gone], ["another"], [moved])
    assert found.common == 9
    values = found.values
    # what has moved is left out
    assert (values.utterances, values.identical, values.other_lengths) == (8, 6, 1)
    assert (values.largest, values.worst, values.codes) == (pytest.approx(3, abs=0.01), louder, 0)


def test_codes_are_counted(tmp_path):
    first = codes_cache(tmp_path / "first")
    codes = {id_: np.array(first[id_]) for id_ in first.ids}
    total = sum(array.size for array in codes.values())
    worst = first.ids[3]
    codes[worst][0] ^= 1
    found = diff(first, codes_cache(tmp_path / "second", codes), values=1000).values
    assert (found.codes, found.differing, found.identical, found.worst) == (total, 2, 19, worst)
    assert found.largest == 0


def test_values_of_other_kinds_are_refused_and_damage_is_told(old, tmp_path):
    with pytest.raises(ArgumentError, match=r"floats \[frames, 80\].* codes \[frames, 2\]"):
        diff(old, codes_cache(tmp_path / "codes"), values=1)
    # ids and configs can be compared
    assert diff(old, codes_cache(tmp_path / "more"), values=0).common == len(old)
    chunk = next((old.version.path / "shards").glob("*/features/c/0/0"))
    chunk.write_bytes(b"\xff" * chunk.stat().st_size)
    with pytest.raises(DamagedError):
        diff(old, old, values=10)


def test_the_command(cli, old, tmp_path):
    made = make_version(
        tmp_path / "new",
        {id_: np.array(old[id_]) for id_ in [*old.ids][:9]},
        params={"low_freq": 40},
    )
    done = cli("diff", old.version.path, made.path, "--values", 5).with_code(0)
    assert "params.low_freq: not given -> 40" in done.out
    assert "9 utterances are in both" in done.out
    assert old.ids[9] in done.out
    assert "5 of 5 utterances bit-identical" in done.out
    document = cli("diff", old.version.path, made.path, "--json").json()
    assert (document["common"], document["gone"], document["values"]) == (9, [old.ids[9]], None)
    assert cli("diff", old.version.path, tmp_path / "none").code == 1
    other = make_version(
        tmp_path / "other", make_features(1, seed=1), rows={"utt-0": {"path": "elsewhere.wav"}}
    )
    assert (
        "no utterance is in "
        "both, of the same row" in cli("diff", old.version.path, other.path, "--values", 5).out
    )


def test_other_tracks_and_vectors_are_compared(tmp_path):
    """Scores of each utterance, and a side track whose entries follow from its length."""
    vectors = {f"utt-{n}": np.array([[n, 1.0]], np.float32) for n in range(3)}
    others = {**vectors, "utt-2": vectors["utt-2"] + 0.5}
    first, second = (
        Cache(make_version(tmp_path / name, made, axis=Clip(), params={"of": name}))
        for name, made in (("a", vectors), ("b", others))
    )
    compared = diff(first, second, values=3).values
    assert (compared.identical, compared.worst, compared.largest) == (2, "utt-2", 0.5)
    assert compared.tracks == {}
    track = Track("scales", (2,), "float32", "")
    features = make_features(4)
    longer = {**features, "utt-1": np.concatenate([features["utt-1"]] * 4)}
    caches = {
        name: Cache(make_version(tmp_path / name, made, side=side, params={"of": name}))
        for name, made, side in (
            ("c", features, (track,)),
            ("d", longer, (track,)),
            ("e", features, ()),
        )
    }
    scales = diff(caches["c"], caches["d"], values=9).values.tracks["scales"]
    assert (scales.utterances, scales.identical, scales.other_lengths) == (4, 3, 1)
    assert diff(caches["c"], caches["e"], values=9).values.tracks == {"scales": None}
