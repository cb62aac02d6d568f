"""Datasets that other processes map instead of copying."""

import errno
import os
from multiprocessing import get_context

import numpy as np
import pytest
from forking import run_forked
from make_cache import assert_same, made_cache, make_features

import featcache
from featcache.errors import ArgumentError, FeatcacheWarning, ManifestError
from featcache.loader import dataset as dataset_module
from featcache.loader.shared import SharedArrays
from featcache.manifest.strings import Strings
from featcache.spec import Frames, Track


def read(value, connection) -> None:
    """Send what a process sees of a dataset, or of a dictionary of arrays."""
    if isinstance(value, dict):
        connection.send(
            {name: (array.tolist(), array.flags.owndata) for name, array in value.items()}
        )
        return
    batch = value.batch([2, 0])
    features, numbers = batch["features"].numpy(), batch["number"].tolist()
    connection.send((batch["ids"], features, batch["text"], numbers))


def in_process(method: str, value: object) -> object:
    """Return what a new process sees of a value."""
    context = get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=read, args=(value, there))
    process.start()
    seen = here.recv()
    process.join()
    assert process.exitcode == 0
    return seen


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_are_mapped_and_equal(method):
    arrays = {"numbers": np.arange(1000), "none": np.zeros(0), "odd": np.arange(7, dtype=np.uint8)}
    shared = SharedArrays.in_memory(arrays)
    for _ in range(2):  # several processes map one file
        seen = in_process(method, shared)
        assert {name: values for name, (values, _) in seen.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }
        assert not any(owns for _, owns in seen.values())


def test_a_spawned_process_sees_the_dataset_as_it_is_now(plain, scratch):
    featcache.extract(plain.manifest(), "fbank80", scratch, featcache.Options("cpu", 1))
    rows = [
        {"id": f"utt-{number:02}", "number": number, "text": f"text {number}"}
        for number in range(12)
    ]
    dataset = featcache.FeatureDataset(featcache.open(scratch), rows)
    for changed in (dataset, dataset.subset([5, 4, 3]), dataset):
        expected = changed.batch([2, 0])
        ids, features, text, number = in_process("spawn", changed)
        assert ids == expected["ids"]
        assert np.array_equal(features, expected["features"].numpy())
        assert (text, number) == (expected["text"], expected["number"].tolist())
    dataset.columns["text"] = Strings.of(["changed"] * 12)
    assert in_process("spawn", dataset)[2] == ["changed", "changed"]


class TestSharedIn:
    """`FeatureDataset(shared_in=)`: one copy for processes that know nothing of each other."""

    @pytest.fixture
    def cache(self, tmp_path):
        return made_cache(tmp_path / "features", make_features(12, (3,)))

    @pytest.fixture
    def manifest(self, tmp_path):
        return self.written(tmp_path, "text")

    def written(self, folder, word):
        rows = [f"utt-{number},{number},{word} {number}" for number in range(12)]
        path = folder / "train.csv"
        path.write_text("\n".join(["id,number,text", *rows]))
        return path

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path / "shared"

    def files(self, folder):
        return [*folder.glob("featcache/rows/*")]

    @pytest.mark.parametrize(
        "options", [{}, {"crop": 5}, {"where": "number > 3", "classes": "text"}]
    )
    def test_the_second_process_maps_what_the_first_has_read(
        self, cache, manifest, folder, monkeypatch, options
    ):
        expected = featcache.FeatureDataset(cache, manifest, **options)
        first = featcache.FeatureDataset(cache, manifest, shared_in=folder, **options)
        monkeypatch.setattr(dataset_module, "find_utterances", None)
        second = featcache.FeatureDataset(cache, manifest, shared_in=folder, **options)
        for shared in (first, second):
            assert_same(shared.batch([2, 0, 1]), expected.batch([2, 0, 1]))
            assert shared.classes == expected.classes
            assert shared.digest == expected.digest
            assert shared.versions[0].cache is cache
            assert not shared.columns["number"].flags.owndata
            assert not shared.versions[0].positions.flags.writeable
        assert len(self.files(folder)) == 1

    def test_processes_that_start_together_read_once(self, cache, manifest, folder, monkeypatch):
        read, find = folder.parent / "read", dataset_module.find_utterances

        def counted(*arguments):
            with read.open("a") as file:
                file.write("x")
            return find(*arguments)

        monkeypatch.setattr(dataset_module, "find_utterances", counted)
        context = get_context("fork")
        arguments = cache, manifest
        options = {"shared_in": folder}
        processes = [
            context.Process(target=featcache.FeatureDataset, args=arguments, kwargs=options)
            for _ in range(4)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        assert read.read_text() == "x"

    def test_spawned_workers_map_the_same_file(self, cache, manifest, folder, monkeypatch):
        dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        monkeypatch.delattr(os, "memfd_create")
        ids, features, text, number = in_process("spawn", dataset)
        assert (ids, text, number) == (["utt-2", "utt-0"], ["text 2", "text 0"], [2, 0])
        assert np.array_equal(features, dataset.batch([2, 0])["features"].numpy())

    def test_what_is_not_in_the_file_is_each_process_s_own(self, cache, manifest, folder):
        options = {"shared_in": folder}
        moved = made_cache(folder.parent / "moved", make_features(12, (3,)))
        first = featcache.FeatureDataset(moved, manifest, padding_value=-1, **options)
        (name,) = self.files(folder)
        moved.version.path.rename(folder.parent / "away")
        second = featcache.FeatureDataset(cache, manifest, padding_value=-2, **options)
        assert self.files(folder) == [name]
        assert [one.versions[0].padding_value for one in (first, second)] == [-1, -2]
        expected = second.batch([2, 0])["features"].numpy()
        assert (expected == -2).any()
        assert np.array_equal(in_process("spawn", second)[1], expected)

    def test_selections_are_compared_value_by_value(self, cache, manifest, folder):
        others = [f"other-{number}" for number in range(2000)]
        for wanted in ["utt-3", "utt-5"]:
            ids = np.array([*others[:1000], wanted, *others[1000:]])
            dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder, where={"id": ids})
            assert list(dataset.ids) == [wanted]
        assert len(self.files(folder)) == 2
        for numbers in ([3, 5], {5, 3}, np.array([3, 5]), iter(["3", "5", "3.0", "5.0"])):
            dataset = featcache.FeatureDataset(
                cache, manifest, shared_in=folder, where={"number": numbers}
            )
            assert list(dataset.ids) == ["utt-3", "utt-5"]
        assert len(self.files(folder)) == 3
        labels = [f"text {number}" for number in range(3000)]
        for several in (labels, [*labels[:100], "more", *labels[100:]]):
            classes = {"text": np.array(several)}
            dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder, classes=classes)
            assert dataset.classes["text"] == several

    def test_a_changed_manifest_replaces_the_file(self, cache, manifest, folder):
        before = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        old = self.files(folder)
        self.written(manifest.parent, "other text")
        after = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        assert before.columns["text"][3] == "text 3"  # still mapped
        assert after.columns["text"][3] == "other text 3"
        assert len(self.files(folder)) == 1
        assert self.files(folder) != old
        featcache.FeatureDataset(cache, manifest, shared_in=folder, columns=["text"])
        assert len(self.files(folder)) == 2  # other arguments

    def test_a_changed_table_in_a_folder_of_a_folder_replaces_the_file(
        self, cache, tmp_path, folder
    ):
        options = {"shared_in": folder, "on_changed": "use"}
        table = tmp_path / "corpus" / "train" / "metadata.csv"
        table.parent.mkdir(parents=True)
        for text in ("as it was", "as it is"):
            table.write_text(f"id,file_name,text\nutt-3,3.wav,{text}\n")
            dataset = featcache.FeatureDataset(cache, tmp_path / "corpus", **options)
            assert [*dataset.columns["text"]] == [text]

    def test_a_new_file_in_a_folder_of_a_folder_replaces_the_file(self, tmp_path, folder):
        options = {"shared_in": folder, "on_changed": "use"}
        inside = tmp_path / "corpus" / "a" / "b"
        inside.mkdir(parents=True)
        cache = made_cache(tmp_path / "other", {f"a/b/{n}": np.zeros((2, 3), "f4") for n in "12"})
        for count, name in enumerate(("1.wav", "2.wav"), 1):
            (inside / name).touch()
            dataset = featcache.FeatureDataset(cache, tmp_path / "corpus", **options)
            assert len(dataset) == count

    @pytest.mark.parametrize("content", [b"", b"cut", bytes(100), b"\xff" * 5000])
    def test_a_damaged_file_is_made_anew(self, cache, manifest, folder, content):
        featcache.FeatureDataset(cache, manifest, shared_in=folder)
        (path,) = self.files(folder)
        whole = path.read_bytes()
        path.write_bytes(content)
        dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        assert dataset.batch([3])["text"] == ["text 3"]
        assert self.files(folder) == [path]
        assert path.stat().st_size == len(whole)

    @pytest.mark.parametrize("fault", ["no folder", "another user"])
    def test_without_a_file_each_process_has_its_own_copy(
        self, cache, manifest, folder, monkeypatch, fault
    ):
        if fault == "no folder":
            folder.write_text("")
        else:
            featcache.FeatureDataset(cache, manifest, shared_in=folder)
            uid = os.getuid() + 1
            monkeypatch.setattr(os, "getuid", lambda: uid)
        with pytest.warns(FeatcacheWarning, match="this process has its own copy of") as warned:
            dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        assert warned[0].filename == __file__
        assert dataset.batch([3])["text"] == ["text 3"]

    def test_a_full_disk_is_given_back_what_was_written(self, cache, manifest, folder, monkeypatch):
        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.warns(FeatcacheWarning, match="No space left on device: this process has"):
            dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        assert dataset.batch([3])["text"] == ["text 3"]
        assert self.files(folder) == []

    def test_tracks_of_one_version_have_files_of_their_own(self, tmp_path, manifest, folder):
        """Their crops have other lengths."""
        slow = Track("slow", (2,), "int64", "every third frame", Frames(25.0))
        features = make_features(12, (3,), "float32", max_frames=90)
        cache = made_cache(tmp_path / "tracks", features, side=(slow,), frame_rate=75.0)
        crop = featcache.Crop(seconds=0.4, short="drop")
        for version in (cache, cache.track("slow")):
            expected = featcache.FeatureDataset(version, manifest, crop=crop)
            dataset = featcache.FeatureDataset(version, manifest, crop=crop, shared_in=folder)
            assert dataset.lengths.tolist() == expected.lengths.tolist()
            assert [*dataset.ids] == [*expected.ids]
            assert_same(dataset.batch([0, 1]), expected.batch([0, 1]))

    def test_an_empty_path_is_no_folder(self, cache, manifest):
        with pytest.raises(ArgumentError, match="shared_in is empty: give a folder"):
            featcache.FeatureDataset(cache, manifest, shared_in="")

    def test_what_processes_cannot_compare_is_refused(self, cache, manifest, folder):
        refused = [([{"id": "utt-1"}], {}), ("-", {}), (manifest, {"where": lambda row: True})]
        for source, options in refused:
            with pytest.raises(ArgumentError, match="shared_in= needs the path of a manifest"):
                featcache.FeatureDataset(cache, source, shared_in=folder, **options)
        with pytest.raises(ManifestError, match="missing"):
            featcache.FeatureDataset(cache, "missing.csv", shared_in=folder)
        assert self.files(folder) == []

    def test_a_process_that_was_killed_leaves_nothing_that_others_wait_for(
        self, cache, manifest, folder, monkeypatch
    ):
        with monkeypatch.context() as patched:
            patched.setattr(SharedArrays, "_write", lambda *_: os._exit(0))
            run_forked(lambda: featcache.FeatureDataset(cache, manifest, shared_in=folder))
        dataset = featcache.FeatureDataset(cache, manifest, shared_in=folder)
        assert dataset.batch([3])["text"] == ["text 3"]
        assert len(self.files(folder)) == 1
