"""Repair keeps what is sound: it extracts again just the utterances whose own bytes are
damaged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cache_contents import check, chunk_files, items, only_version, provenance, values_of
from corpora import Corpus, speech
from damage import CHUNKS, delete, empty, flip, lengthen, mend, replace_by_folder, victim
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch import scratch_folder

import featcache
from featcache.care.prune import rewrite
from featcache.care.repair import Repaired
from featcache.errors import FeatcacheWarning, StoreError
from featcache.format.shard import Shard
from featcache.manifest.read import read_manifest
from featcache.version.indexing import open_index
from featcache.version.tags import make_tag

FEATURES = CHUNKS["features"]


def runs(cache: Path) -> dict[str, str]:
    """The run that extracted each utterance."""
    version = only_version(cache)
    shards = [version.shard(name) for name in version.shard_names()]
    return {id_: shard.info.made_by["run"] for shard in shards for id_ in shard.table.ids}


def sides(cache: Path) -> dict[str, list[tuple]]:
    """The entries of every side array of each utterance."""
    version, found = only_version(cache), {}
    for shard in map(version.shard, version.shard_names()):
        arrays = [shard.side(side.name, check=True) for side in version.info.spec.side]
        for number, id_ in enumerate(shard.table.ids):
            entries = [array.item(number) for array in arrays]
            found[id_] = [(entry.dtype, entry.shape, entry.tobytes()) for entry in entries]
    return found


def mended(
    plain: Corpus, sound: Path, cache: Path, again: set[str], by: Path | None = None
) -> Repaired:
    """Repair, by the manifest or another: all is as it was, bit for bit, and just these
    utterances are of a new run."""
    done = mend(cache, by or plain.manifest())
    before = runs(sound)
    assert {id_ for id_, run in runs(cache).items() if run != before[id_]} == again
    assert done.extracted == len(again)
    assert items(cache) == items(sound)
    assert provenance(cache) == provenance(sound)
    assert sides(cache) == sides(sound)
    report = check(cache, manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.repeated) == ([], 0)
    assert {path.name for path in only_version(cache).path.glob("work/*")} <= {"desk"}
    return done


def end_of(shard: Shard, number: int) -> int:
    """Where an item's bytes end in the features."""
    return int(shard.table.offsets("frame")[number + 1]) * shard.features[:1].nbytes


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0), st.integers(0, 7)), min_size=1, max_size=5
    )
)
def test_whatever_bits_flip_just_their_utterances_are_extracted_again(plain, sound, flips):
    """In any byte of any features, or in the checksum behind them, which is nobody's."""
    with scratch_folder() as folder:
        cache = Path(shutil.copytree(sound, folder / "cache"))
        version = only_version(cache)
        shards = [version.shard(name) for name in version.shard_names()]
        bits = {}  # of each byte one
        for number, at, bit in flips:
            bits[number, at % (shards[number].folder / FEATURES).stat().st_size] = bit
        hit = set()
        for (number, at), bit in bits.items():
            shard = shards[number]
            flip(shard.folder / FEATURES, at, bit)
            item = (
                int(
                    np.searchsorted(
                        shard.table.offsets("frame"), at // shard.features[:1].nbytes, "right"
                    )
                )
                - 1
            )
            if item < shard.info.items:
                hit.add(shard.table.ids[item])
        damaged = {number for number, _ in bits}
        count = sum(shards[number].info.items for number in damaged)
        done = mended(plain, sound, cache, hit)
        assert (done.removed, done.kept) == (
            [shards[number].name for number in sorted(damaged)],
            count - len(hit),
        )


@settings(max_examples=10)
@given(cut=st.integers(0))
def test_what_lies_before_the_end_of_a_file_that_broke_off_is_kept(plain, sound, cut):
    with scratch_folder() as folder:
        cache = Path(shutil.copytree(sound, folder / "cache"))
        shard = victim(cache)
        chunk = shard.folder / FEATURES
        ids, ends = (
            [*shard.table.ids],
            [end_of(shard, number) for number in range(shard.info.items)],
        )
        cut %= chunk.stat().st_size
        chunk.write_bytes(chunk.read_bytes()[:cut])
        mended(plain, sound, cache, {id_ for id_, end in zip(ids, ends, strict=True) if end > cut})


@pytest.mark.parametrize(
    "spoil", [delete, empty, replace_by_folder], ids=lambda spoil: spoil.__name__
)
def test_without_the_features_all_utterances_of_the_shard_are_extracted_again(
    plain, sound, cache, spoil
):
    shard = victim(cache)
    ids = {*shard.table.ids}
    spoil(shard.folder / FEATURES)
    assert mended(plain, sound, cache, ids).kept == 0


def test_what_lies_before_lost_bytes_is_kept(plain, sound, cache):
    """What lies behind them is not where it was."""
    shard = victim(cache)
    ids, at = [*shard.table.ids], end_of(shard, 1)
    data = (shard.folder / FEATURES).read_bytes()
    (shard.folder / FEATURES).write_bytes(data[: at + 2] + data[at + 4 :])
    assert mended(plain, sound, cache, set(ids[2:])).kept == 2


def test_what_is_damaged_in_one_shard_is_kept_where_it_is_sound(plain, sound, cache, scratch):
    """A repair was cut off once it had written sound items again. Then a bit of them
    flipped; its audio is lost."""
    shard, version = victim(cache), only_version(cache)
    flip(shard.folder / FEATURES, 0)
    copy = version.shard(rewrite(version, shard, range(1, shard.info.items)))
    flip(copy.folder / FEATURES, 0)
    corpus = plain.copy(scratch / "corpus")
    (row,) = (row for row in corpus.rows if row["id"] == copy.table.ids[0])
    (corpus.folder / row["path"]).write_bytes(b"noise" * 100)
    assert mend(cache, corpus.manifest()).kept == len(shard.table) - 1 + len(copy.table) - 1
    assert items(cache) == items(sound)
    assert check(cache).problems == []


# Nothing to extract


@pytest.fixture
def nothing_else(plain, monkeypatch) -> Path:
    """A manifest of one row that is not in the cache and has no audio; and no extractor
    can be built."""

    def build(*_):
        raise AssertionError("an extractor was built")

    monkeypatch.setattr("featcache.config.Config.build", build)
    return plain.manifest([{"id": "another", "path": "another.wav"}], "another.csv")


@pytest.mark.parametrize("spoil", [delete, lambda path: flip(path, 30)], ids=["delete", "flip"])
@pytest.mark.parametrize("file", [f"{name}/zarr.json" for name in CHUNKS])
def test_where_every_utterance_is_sound_nothing_is_extracted(
    plain, sound, cache, nothing_else, file, spoil
):
    """The metadata of an array is damaged: neither audio nor an extractor is needed."""
    shard = victim(cache)
    count = shard.info.items
    spoil(shard.folder / file)
    done = mended(plain, sound, cache, set(), nothing_else)
    assert (done.removed, done.kept, done.summary) == ([shard.name], count, None)


@pytest.mark.parametrize(
    "spoil", [lengthen, lambda path: flip(path, path.stat().st_size - 1)], ids=["long", "flip"]
)
def test_a_checksum_of_all_features_that_is_damaged_costs_nothing(
    plain, sound, cache, nothing_else, spoil
):
    for _ in range(3):
        spoil(victim(cache).folder / FEATURES)
        mended(plain, sound, cache, set(), nothing_else)
        assert chunk_files(cache) == chunk_files(sound)


# What is needed of audio and manifest


def test_only_damaged_utterances_need_audio_and_a_row(cli, plain, cache, sound, scratch):
    """The audio of all others is gone, and their rows too; the summary counts both kinds."""
    corpus = plain.copy(scratch / "corpus")
    shard = victim(cache)
    count = shard.info.items
    (row,) = (row for row in corpus.rows if row["id"] == shard.table.ids[2])
    for other in corpus.rows:
        if other is not row:
            (corpus.folder / other["path"]).unlink()
    flip(shard.folder / FEATURES, end_of(shard, 2) - 1)
    done = cli(
        "repair", cache, "--manifest", corpus.manifest([row], "one.csv"), "--json"
    ).with_code(0)
    (version,) = done.json()["versions"]
    assert (version["removed"], version["kept"], version["extracted"]) == (
        [shard.name],
        count - 1,
        1,
    )
    assert items(cache) == items(sound)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0


def test_what_was_missing_before_is_told_also_where_there_is_damage(cli, plain, cache):
    """It is not repair's to extract; and it is told, too, where nothing is damaged any
    more."""
    version = only_version(cache)
    spoilt, gone, _ = (version.shard(name) for name in open_index(version).shards)
    count, kept = gone.info.items, spoilt.info.items - 1
    shutil.rmtree(gone.folder)
    flip(spoilt.folder / FEATURES, 0)
    done = cli("repair", cache, "--manifest", plain.manifest()).with_code(0)
    assert f"1 damaged shard: {kept} utterances kept, 1 extracted again" in done.out
    assert f"{count} utterances are in no shard: featcache extract adds them" in done.out
    assert (
        f"{count} utterances are "
        "in no shard" in cli("repair", cache, "--manifest", plain.manifest()).out
    )
    assert len(items(cache)) == len(plain.rows) - count


def test_an_utterance_that_fails_now_leaves_the_others_as_they_are(
    cli, plain, cache, sound, scratch
):
    """Its audio is no audio any more: it is in the ledger, and nothing else is lost."""
    corpus = plain.copy(scratch / "corpus")
    shard = victim(cache)
    failing = shard.table.ids[1]
    (row,) = (row for row in corpus.rows if row["id"] == failing)
    (corpus.folder / row["path"]).write_bytes(b"noise" * 100)
    flip(shard.folder / FEATURES, end_of(shard, 1) - 1)
    (version,) = (
        cli("repair", cache, "--manifest", corpus.manifest(), "--json")
        .with_code(3)
        .json()["versions"]
    )
    assert (version["extracted"], version["summary"]["failed_by_reason"]) == (0, {"not_audio": 1})
    expected = items(sound)
    del expected[failing]
    assert items(cache) == expected
    report = check(cache, manifest=read_manifest(corpus.manifest()))
    assert (report.problems, report.failed) == ([], 1)


# Other versions

CONFIGS = {
    "side": {"extractor": "row_extractors:Moments"},
    "quantized": {"extractor": "fbank", "store": {"dtype": "uint8"}},
    "copies": {"extractor": "fbank", "augment": {"speed": [0.9, 1.0, 1.1]}},
}


@pytest.fixture
def made(cli, plain, scratch, trusted):
    """Extracts by one of these configs; gives the cache, and a copy of it to spoil."""

    def make(kind: str, *options: str) -> tuple[Path, Path]:
        sound, config = scratch / "sound", scratch / "some.yaml"
        config.write_text(json.dumps({"name": "some", **CONFIGS[kind]}))
        assert cli("extract", plain.manifest(), "-o", sound, "-c", config, *options).code == 0
        return sound, Path(shutil.copytree(sound, scratch / "cache"))

    return make


@pytest.mark.parametrize("kind", CONFIGS)
def test_side_arrays_quantised_features_and_copies_are_kept(plain, made, kind):
    """With all that belongs to an utterance; a copy of one is an utterance by itself."""
    sound, cache = made(kind)
    version = only_version(cache)
    shard = version.shard(version.shard_names()[0])
    hit = {shard.table.ids[number] for number in (4, 5)}
    # the first byte of one, and the last of the next
    for at in (end_of(shard, 3), end_of(shard, 5) - 1):
        flip(shard.folder / FEATURES, at)
    assert mended(plain, sound, cache, hit).kept == len(items(sound)) - 2


def test_a_damaged_side_array_is_extracted_again_with_its_shard(plain, made):
    """And found without reading features."""
    sound, cache = made("side", "--shard-size", "0.0008")
    shard = victim(cache)
    ids = {*shard.table.ids}
    flip(shard.folder / "side_counts" / "c" / "0", 9)
    (problem,) = check(cache, data=False).problems
    assert "side_counts/c/0: damaged: its checksum does not match" in problem.message
    mended(plain, sound, cache, ids)
    assert only_version(cache).shard_names() == only_version(sound).shard_names()


# Utterances that were replaced


@pytest.fixture
def replaced(cli, plain, scratch) -> tuple[Corpus, Path, list[str]]:
    """A cache whose utterances 0 and 5 were extracted anew each time their audio had
    changed, which was twice; its shards, as they came."""
    corpus, cache, names = plain.copy(scratch / "corpus"), scratch / "cache", []
    for seed in (0, 50, 60):
        for row in (0, 5):
            path = corpus.folder / corpus.rows[row]["path"]
            soundfile.write(path, speech(corpus.rows[row]["duration"], seed=seed + row), 16000)
        assert cli("extract", corpus.manifest(), "-o", cache, "--check-sources").code == 0
        names += {*only_version(cache).shard_names()}.difference(names)
    return corpus, cache, names


def test_what_others_had_replaced_is_not_kept(replaced, nothing_else):
    """Where only such items are damaged, nothing is extracted."""
    _, cache, (first, second, third) = replaced
    expected = items(cache)
    for name, numbers in ((first, (0, 5)), (second, (0, 1))):
        shard = only_version(cache).shard(name)
        for number in numbers:
            flip(shard.folder / FEATURES, end_of(shard, number) - 1)
    done = mend(cache, nothing_else)
    assert (done.kept, done.extracted) == (10, 0)
    assert items(cache) == expected
    shards = [only_version(cache).shard(name) for name in only_version(cache).shard_names()]
    assert sorted(shard.info.items for shard in shards) == [2, 10]
    assert third in [shard.name for shard in shards]


@pytest.fixture
def latest_is_damaged(replaced) -> tuple[Path, Path, dict[str, tuple], str]:
    """A manifest, and its cache, whose latest extraction of an utterance is damaged; the
    items before that; its id."""
    corpus, cache, (*_, last) = replaced
    sound = items(cache)
    shard = only_version(cache).shard(last)
    flip(shard.folder / FEATURES, end_of(shard, 1) - 1)
    return corpus.manifest(), cache, sound, shard.table.ids[1]


def test_the_latest_of_an_utterance_that_was_replaced_comes_back(latest_is_damaged):
    """Its older extractions, in sound shards, do not pass for it."""
    manifest, cache, sound, _ = latest_is_damaged
    assert mend(cache, manifest).extracted == 1
    assert items(cache) == sound
    assert check(cache, manifest=read_manifest(manifest)).problems == []


def test_of_a_repair_that_was_killed_the_latest_of_an_utterance_is_missing(
    cli, latest_is_damaged, monkeypatch
):
    """An older extraction does not pass for it: not before anything has been extracted
    either."""
    manifest, cache, sound, hit = latest_is_damaged

    def killed(*_, **__):
        raise InterruptedError

    monkeypatch.setattr("featcache.care.repair.run_extraction", killed)
    with pytest.raises(InterruptedError):
        mend(cache, manifest)
    assert {id_ for id_, one in items(cache).items() if one != sound[id_]} == {hit}
    assert [problem.kind for problem in check(cache).problems] == ["unfinished"]
    with pytest.warns(FeatcacheWarning, match="1 of the 12 utterances of .* are missing"):
        featcache.open(cache)
    assert cli("extract", manifest, "-o", cache).code == 0
    assert items(cache) == sound


# Tags


def tag(cache: Path) -> dict[str, bytes]:
    make_tag(only_version(cache), "paper", open_index(only_version(cache)))
    return by_tag(cache)


def by_tag(cache: Path) -> dict[str, bytes]:
    return values_of(featcache.open(cache, tag="paper", check=True))


def test_a_tag_stays_whole_if_only_metadata_was_damaged(plain, sound, cache):
    """Then the files of the shard are written again, under its name."""
    before, shards = tag(cache), only_version(cache).shard_names()
    flip(victim(cache).folder / "features" / "zarr.json", 20)
    assert mend(cache, plain.manifest()).broken_tags == []
    assert by_tag(cache) == before
    assert only_version(cache).shard_names() == shards
    assert items(cache) == items(sound)


def test_a_tag_is_not_whole_if_other_bits_come_back(plain, scratch, cli):
    corpus, cache = plain.copy(scratch / "corpus"), scratch / "cache"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    tag(cache)
    (name,) = only_version(cache).shard_names()
    shard = only_version(cache).shard(name)
    row = next(row for row in corpus.rows if row["id"] == shard.table.ids[0])
    path = corpus.folder / row["path"]
    waveform, rate = soundfile.read(path)
    soundfile.write(path, waveform / 2, rate)
    flip(shard.folder / FEATURES, 7)
    assert mend(cache, corpus.manifest()).broken_tags == ["paper"]
    with pytest.raises(StoreError, match="the tag paper names shards that are gone"):
        by_tag(cache)
    assert check(cache).problems[0].kind == "tag"
