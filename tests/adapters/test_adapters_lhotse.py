"""Cuts of a cache, held against Lhotse's own validation, readers, datasets and samplers."""

import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from damage import flip
from hypothesis import given
from hypothesis import strategies as st
from make_cache import made_cache, make_features, make_version
from processes import run_script
from torch.utils.data import DataLoader

import featcache
from featcache.errors import ArgumentError, MissingItemError, StoreError
from featcache.spec import Clip, Frames, Track

lhotse = pytest.importorskip("lhotse")

from lhotse import CutSet, MonoCut, NumpyFilesWriter, validate  # noqa: E402
from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset  # noqa: E402
from lhotse.dataset.collation import collate_custom_field  # noqa: E402
from lhotse.utils import compute_num_frames  # noqa: E402

from featcache.adapters.lhotse import Reader, cuts  # noqa: E402


class TestCuts:
    def test_are_what_the_manifest_says(self, made):
        cut_set = cuts(made.dataset())
        assert cut_set.is_lazy
        assert len(cut_set) == 30
        for cut, (id_, row) in zip(cut_set, made.rows.items(), strict=True):
            assert isinstance(cut, MonoCut)
            assert (cut.id, cut.start, cut.channel) == (id_, row["start"], row["channel"])
            assert (cut.recording_id, cut.sampling_rate) == (row["path"], 16000)
            assert cut.num_frames == len(made.fbank[id_])
            assert cut.duration == pytest.approx(len(made.fbank[id_]) / 100)
            (supervision,) = cut.supervisions
            assert (supervision.text, supervision.speaker) == (row["text"], row["speaker"])
            assert supervision.custom == {"digit": row["digit"], "score": row["score"]}
            assert (supervision.start, supervision.duration) == (0, cut.duration)

    def test_vectors_of_another_version_are_lists_in_files(self, made, tmp_path):
        vectors = {id_: np.full((1, 2), n, np.float32) for n, id_ in enumerate(made.fbank)}
        columns = {"vector": make_version(tmp_path, vectors, axis=Clip()).path}
        cut_set = cuts(featcache.FeatureDataset(made.cache(), columns=columns))
        cut_set.to_file(tmp_path / "cuts.jsonl")
        for n, cut in enumerate(CutSet.from_file(tmp_path / "cuts.jsonl")):
            assert cut.supervisions[0].custom == {"vector": [n, n]}

    def test_are_valid_and_load_what_was_stored(self, made):
        for cut_set in (
            cuts(made.cache()),
            cuts(made.dataset()),
            cuts(made.dataset(columns=["text"])),
        ):
            validate(cut_set, read_data=True)
            for cut in cut_set:
                loaded = cut.load_features()
                assert loaded.dtype == np.float32
                assert np.array_equal(loaded, made.fbank[cut.id])

    def test_without_a_manifest_are_recordings_of_their_own(self, made):
        first, *others = cuts(made.cache())
        assert [first.id, *(cut.id for cut in others)] == list(made.fbank)
        assert (first.recording_id, first.start, first.channel) == (first.id, 0, 0)
        assert (first.supervisions[0].text, first.supervisions[0].custom) == (None, None)

    def test_custom_values_keep_their_types(self, made):
        rows = [
            {"id": "utt-0", "clean": False, "tags": ["a"], "text": "hi"},
            {"id": "utt-1", "clean": True, "tags": None, "text": None},
        ]
        first, second = (
            cut.supervisions[0] for cut in cuts(featcache.FeatureDataset(made.cache(), rows))
        )
        assert (first.text, first.custom) == ("hi", {"clean": False, "tags": ["a"]})
        assert (second.text, second.custom) == (None, {"clean": True})

    def test_have_the_arrays_of_further_versions(self, made):
        cut_set = cuts(made.both())
        validate(cut_set)
        for cut in cut_set:
            assert np.array_equal(cut.load_features(), made.fbank[cut.id])
            assert cut.load_codes().dtype == np.uint16
            assert np.array_equal(cut.load_codes(), made.codes[cut.id])
        some = cut_set.subset(first=5).to_eager()
        padded, lengths = collate_custom_field(some, "codes", pad_value=1024)
        expected, _ = made.cache("codec").batch([cut.id for cut in some], padding_value=1024)
        assert torch.equal(padded.long(), expected.long())
        assert lengths.tolist() == [len(made.codes[cut.id]) for cut in some]

    def test_have_the_arrays_of_other_tracks(self, tmp_path):
        slow = Track("slow", (2,), "float32", "every third frame", Frames(100 / 3))
        main = made_cache(tmp_path, make_features(9), side=(slow,))
        for cut in cuts(featcache.FeatureDataset({"main": main, "slow": main.track("slow")})):
            assert np.array_equal(cut.load_features(), main[cut.id])
            assert np.array_equal(cut.load_slow(), main.track("slow")[cut.id])

    def test_have_the_vectors_of_another_version_whole(self, tmp_path):
        written = made_cache(tmp_path / "fbank", make_features(4, max_frames=30))
        stored = {id_: np.full((1, 3), n, np.float16) for n, id_ in enumerate(written.ids)}
        vectors = made_cache(tmp_path / "vectors", stored, axis=Clip())
        cut_set = cuts(featcache.FeatureDataset({"fbank": written, "voice": vectors}))
        validate(cut_set)
        cut_set.to_file(tmp_path / "cuts.jsonl")
        for cut in CutSet.from_file(tmp_path / "cuts.jsonl"):
            for part in (cut, cut.truncate(duration=0.01)):
                assert part.load_voice().dtype == np.float32
                assert np.array_equal(part.load_voice(), vectors[cut.id])
        voices = collate_custom_field(cut_set.to_eager(), "voice")
        assert np.array_equal(voices, np.stack([*vectors.values()]))

    def test_are_made_anew_each_time_and_alike(self, made):
        cut_set = cuts(made.both())
        assert (
            list(cut_set)
            == list(cut_set)
            == list(pickle.loads(pickle.dumps(cut_set)))
            == list(cut_set.to_eager())
        )

    def test_take_part_in_lhotses_algebra(self, made):
        cut_set = cuts(made.dataset())
        short = cut_set.filter(lambda cut: cut.num_frames < 20)
        assert [cut.id for cut in short] == [id_ for id_ in made.rows if len(made.fbank[id_]) < 20]
        assert sorted(cut.id for cut in cut_set.shuffle()) == sorted(made.rows)
        both = cut_set + cuts(made.cache())
        assert len(list(both)) == 70
        eager = cut_set.to_eager()
        assert eager["utt-20"].num_frames == len(made.fbank["utt-20"])
        assert sorted(eager.sort_by_duration(), key=lambda cut: cut.id) == sorted(
            eager, key=lambda cut: cut.id
        )

    def test_nothing_grows_with_the_utterances(self, tmp_path, traced):
        frames = np.zeros((1, 2), np.float16)
        cut_set = cuts(
            made_cache(tmp_path, {f"utterance-{number}": frames for number in range(2_000)})
        )
        assert sum(cut.num_frames for cut in cut_set) == 2_000
        # a list of them has 1.3 MB
        assert traced(lambda: sum(cut.num_frames for cut in cut_set)).peak < 6e5

    @pytest.mark.parametrize("frame_rate", [50.0, 12.5, 16000 / 200, 16000 / 441, 16000 / 3])
    def test_have_as_many_frames_as_there_are_at_any_rate(self, tmp_path, frame_rate):
        stored = make_features(25, (3,), "float32", max_frames=4000, seed=1)
        cut_set = cuts(made_cache(tmp_path, stored, frame_rate=frame_rate))
        validate(cut_set, read_data=True)
        for cut in cut_set:
            assert cut.features.frame_shift == pytest.approx(1 / frame_rate)
            assert cut.num_frames == len(stored[cut.id])

    def test_at_another_speed_are_of_a_recording_at_that_speed(self, tmp_path, written):
        manifest = written("id,path,start\na,a.wav,9\nb,b.wav,\n")
        names = [f"{id_}{suffix}" for id_ in "ab" for suffix in ("", "_sp0.9", "_sp1.1")]
        rows = {
            id_: {"path": f"{id_[0]}.wav", "start": 9.0 if id_[0] == "a" else None} for id_ in names
        }
        features = dict(zip(names, make_features(6, (3,)).values(), strict=True))
        version = make_version(
            tmp_path / "features", features, augment={"speed": [1.0, 0.9, 1.1]}, rows=rows
        )
        cut_set = list(cuts(featcache.FeatureDataset(featcache.open(version.path), manifest)))
        assert [cut.id for cut in cut_set] == names
        assert [cut.recording_id for cut in cut_set[:3]] == ["a.wav", "a.wav_sp0.9", "a.wav_sp1.1"]
        assert [cut.start for cut in cut_set] == pytest.approx([9, 10, 9 / 1.1, 0, 0, 0])
        assert [cut.supervisions[0].speed for cut in cut_set] == [1, 0.9, 1.1] * 2
        validate(CutSet(cut_set), read_data=True)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Two utterances of a thousand frames; the second begins 3.21 s into its recording."""
    folder = tmp_path_factory.mktemp("long")
    stored = {
        name: np.random.default_rng(1).standard_normal((1000, 4)).astype(np.float16)
        for name in "ab"
    }
    rows = {"a": {"path": "a.wav", "start": 0.0}, "b": {"path": "b.wav", "start": 3.21}}
    make_version(folder / "features", stored, rows=rows)
    (folder / "m.csv").write_text("id,path,start\na,a.wav,0\nb,b.wav,3.21\n")
    dataset = featcache.FeatureDataset(featcache.open(folder / "features"), folder / "m.csv")
    return stored, cuts(dataset).to_eager()


class TestTruncate:
    @given(st.sampled_from("ab"), st.integers(0, 99_000), st.integers(1_000, 100_000))
    def test_loads_the_frames_of_its_time(self, long, name, offset, duration):
        stored, cut_set = long
        offset, duration = offset / 10_000, min(duration, 100_000 - offset) / 10_000
        part = cut_set[name].truncate(offset=offset, duration=duration)
        loaded = part.load_features()
        first = compute_num_frames(
            part.start - cut_set[name].start, frame_shift=0.01, sampling_rate=16000
        )
        assert part.num_frames == len(loaded) == compute_num_frames(duration, 0.01, 16000)
        there = stored[name][first : first + len(loaded)]
        assert np.array_equal(loaded[: len(there)], there)
        # Lhotse repeats the last frame where times round up
        assert len(loaded) - len(there) <= 1

    def test_windows_are_those_of_lhotses_own_reader(self, long, tmp_path):
        _, cut_set = long
        with NumpyFilesWriter(tmp_path) as writer:
            copied = cut_set.copy_feats(writer)
        for ours, theirs in zip(
            cut_set.cut_into_windows(1.37), copied.cut_into_windows(1.37), strict=True
        ):
            assert np.array_equal(ours.load_features(), theirs.load_features())

    def test_padded_and_mixed_cuts_load(self, long):
        stored, cut_set = long
        padded = cut_set["a"].truncate(duration=0.5).pad(duration=0.8)
        assert np.array_equal(padded.load_features()[:50], stored["a"][:50])
        appended = cut_set["a"].append(cut_set["b"]).pad(duration=30)
        assert appended.num_frames == 3000


class TestReader:
    @given(first=st.integers(0, 45), count=st.none() | st.integers(0, 45))
    def test_gives_what_a_slice_gives(self, made, first, count):
        reader = Reader(made.cache().version.path)
        last = None if count is None else first + count
        for id_ in ("utt-0", "utt-39"):
            assert np.array_equal(reader.read(id_, first, last), made.fbank[id_][first:last])

    def test_gives_arrays_that_are_the_callers_own(self, made):
        reader = Reader(str(made.cache().version.path))
        reader.read("utt-3")[:] = 0
        kept = reader.read("utt-3")
        others = [reader.read(f"utt-{number}") for number in range(40)]
        assert np.array_equal(kept, made.fbank["utt-3"])
        assert all(
            np.array_equal(array, made.fbank[f"utt-{number}"])
            for number, array in enumerate(others)
        )

    def test_reads_the_part_alone(self, tmp_path, traced):
        reader = Reader(
            made_cache(tmp_path, {"long": np.zeros((100_000, 40), np.float32)}).version.path
        )
        assert reader.read("long", 50_000, 50_010).shape == (10, 40)
        # all of it has 16 MB
        assert traced(lambda: reader.read("long", 50_000, 50_010)).peak < 1e6

    def test_reads_values_of_quantised_features(self, tmp_path):
        cache = made_cache(tmp_path, make_features(5, (4,), "float32"), quantized=True)
        for cut in cuts(cache):
            assert np.array_equal(cut.load_features(), cache[cut.id])

    def test_uses_the_cache_as_it_was_opened(self, tmp_path):
        version = make_version(tmp_path, make_features(4))
        cut_set = cuts(featcache.open(tmp_path, check=True))
        (chunk,) = version.path.glob("shards/*/features/c/0/0")
        flip(chunk, 7)
        with pytest.raises(featcache.FeatcacheError, match="utt-0: damaged"):
            next(iter(cut_set)).features.load()

    def test_what_is_not_there_is_said(self, made, tmp_path):
        with pytest.raises(MissingItemError, match="utt-77"):
            Reader(made.cache().version.path).read("utt-77")
        with pytest.raises(StoreError, match="nowhere"):
            Reader(tmp_path / "nowhere")


class TestTraining:
    def test_k2s_dataset_gets_the_batches_that_the_cache_gives(self, made):
        cache = made.cache()
        sampler = DynamicBucketingSampler(
            cuts(made.dataset()), max_duration=1.0, num_buckets=3, shuffle=True
        )
        seen = []
        for batch in DataLoader(
            K2SpeechRecognitionDataset(return_cuts=True), sampler=sampler, batch_size=None
        ):
            ids = [cut.id for cut in batch["supervisions"]["cut"]]
            expected, lengths = cache.batch(ids, padding_value=-20)
            for row, other, length in zip(batch["inputs"], expected, lengths.tolist(), strict=True):
                assert torch.equal(row[:length], other[:length].float())
            assert batch["supervisions"]["num_frames"].tolist() == lengths.tolist()
            assert batch["supervisions"]["text"] == [made.rows[id_]["text"] for id_ in ids]
            seen += ids
        assert sorted(seen) == sorted(made.rows)

    def test_saved_cuts_are_read_in_new_processes_and_their_workers(self, cli, made, tmp_path):
        cuts(made.both()).to_file(tmp_path / "cuts.jsonl.gz")
        assert list(CutSet.from_file(tmp_path / "cuts.jsonl.gz")) == list(cuts(made.both()))
        printed = run_script(
            cli,
            """
            import sys
            from lhotse import CutSet
            from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset
            from torch.utils.data import DataLoader
            import featcache.adapters.lhotse  # the reader

            if __name__ == "__main__":
                cuts = CutSet.from_file(sys.argv[1])
                for cut in cuts:
                    print(cut.id, float(cut.load_features().sum()), int(cut.load_codes().astype(int).sum()))
                sums = []
                for method in (None, "fork", "spawn"):
                    sampler = DynamicBucketingSampler(cuts, max_duration=1.0, num_buckets=3, shuffle=False)
                    workers = {"num_workers": 1, "multiprocessing_context": method} if method else {}
                    loader = DataLoader(K2SpeechRecognitionDataset(), sampler=sampler, batch_size=None, **workers)
                    sums.append([float(batch["inputs"].sum()) for batch in loader])
                assert sums[0] == sums[1] == sums[2]
            """,
            tmp_path / "cuts.jsonl.gz",
        )
        expected = [
            f"{id_} {float(made.fbank[id_].astype(np.float32).sum())} "
            f"{int(made.codes[id_].astype(int).sum())}"
            for id_ in made.rows
        ]
        assert printed.splitlines() == expected

    def test_cuts_of_a_tag_are_read_by_the_tag_also_in_another_process(self, cli, tagged, tmp_path):
        then, now = tagged
        cut_set = cuts(then)
        cut_set.to_file(tmp_path / "cuts.jsonl.gz")
        assert np.array_equal(next(iter(cuts(now))).load_features(), now[0])
        assert np.array_equal(next(iter(cut_set)).load_features(), then[0])
        code = """
            import sys
            from lhotse import CutSet
            import featcache.adapters.lhotse
            print(float(next(iter(CutSet.from_file(sys.argv[1]))).load_features().sum()))
        """
        assert (
            run_script(cli, code, tmp_path / "cuts.jsonl.gz")
            == f"{float(then[0].astype(np.float32).sum())}\n"
        )


class TestRefuses:
    def test_what_cuts_cannot_say(self, made):
        with pytest.raises(ArgumentError, match=r"has a crop=.*truncate cuts"):
            cuts(made.dataset(crop=10))
        with pytest.raises(ArgumentError, match=r"has codebooks=.*slice"):
            cuts(made.both(codebooks={"codes": 4}))

    def test_frames_that_are_no_rows(self, tmp_path):
        with pytest.raises(StoreError, match=r"has features \[frames\], but Lhotse's cuts need"):
            cuts(made_cache(tmp_path / "units", make_features(3, (), "uint16")))

    def test_frames_between_samples(self, made):
        hop = f"{float(Fraction(16000, 75)):g}"
        with pytest.raises(StoreError, match=f"has {hop} samples from one frame to the next"):
            cuts(made.cache("codec"))
