"""Datasets of a cache, used as Hugging Face's own: indexed, mapped, filtered, saved,
loaded by other processes."""

import pickle

import numpy as np
import pytest
import torch
from make_cache import made_cache, make_features, make_version
from processes import run_script
from torch.utils.data import DataLoader

import featcache
from featcache.errors import ArgumentError, MissingItemError
from featcache.export.huggingface import as_arrow
from featcache.spec import Clip, Frames, Track

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

from featcache.adapters.huggingface import CachedFeatures, to_hf  # noqa: E402

PRINT_ROWS = """
    import hashlib, sys
    import datasets
    import featcache.adapters.huggingface

    rows = datasets.load_from_disk(sys.argv[1])
    cache = featcache.open(sys.argv[2], "fbank80")
    print(featcache.adapters.huggingface.to_hf(featcache.FeatureDataset(cache, sys.argv[3]))._fingerprint)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row["fbank"].tobytes() + row["codes"].tobytes())
    print(digest.hexdigest())
    print(rows.map(lambda fbank: {"frames": len(fbank)}, input_columns="fbank")._fingerprint)
"""


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


class TestRows:
    def test_are_those_of_the_manifest(self, made):
        rows = to_hf(made.both())
        assert rows.column_names == ["id", "fbank", "codes", *list(made.rows["utt-20"])[1:]]
        assert len(rows) == 30
        for row, (id_, given) in zip(rows, made.rows.items(), strict=True):
            assert row["id"] == id_
            assert row["fbank"].dtype == np.float16
            assert np.array_equal(row["fbank"], made.fbank[id_])
            assert np.array_equal(row["codes"], made.codes[id_])
            assert all(row[name] == given[name] for name in ("text", "digit", "score"))

    def test_long_columns_may_come_in_chunks(self, made, monkeypatch):
        """As Arrow returns texts of more than 2 GiB."""
        whole = to_hf(made.both())

        def in_chunks(column, arrow):
            array = as_arrow(column, arrow)
            return pa.chunked_array([array[:7], array[7:]], array.type)

        monkeypatch.setattr("featcache.adapters.huggingface.as_arrow", in_chunks)
        rows = to_hf(made.both())
        assert [row["id"] for row in rows] == [*made.rows]
        for name in ("text", "digit"):
            assert [*rows[name]] == [*whole[name]]

    def test_columns_have_types_that_fit(self, made):
        types = to_hf(made.dataset()).features
        dtypes = {name: kind.dtype for name, kind in types.items() if name != "features"}
        assert dtypes == {
            **dict.fromkeys(["id", "path", "text", "speaker"], "string"),
            **dict.fromkeys(["channel", "digit"], "int64"),
            **dict.fromkeys(["start", "duration", "score"], "float64"),
        }
        assert types["features"] == CachedFeatures(str(made.cache().version.path))

    @pytest.mark.parametrize("copy", [False, True])
    def test_cells_keep_their_types(self, made, tmp_path, copy):
        cells = {
            "clean": [True, False, True],
            "maybe": [True, None, False],
            "tags": [["a"], [], ["b", "c"]],
            "meta": [{"k": 1}, {"k": 2}, None],
            "said": ["7", None, "x"],
        }
        given = [
            {"id": f"utt-{row}", **{name: values[row] for name, values in cells.items()}}
            for row in range(3)
        ]
        rows = to_hf(
            featcache.FeatureDataset(made.cache(), given), copy=copy, cache_dir=str(tmp_path)
        )
        for name, values in cells.items():
            assert rows[name][:] == values
        mixed = [{"id": "utt-0", "x": 1}, {"id": "utt-1", "x": "a"}]
        dataset = featcache.FeatureDataset(made.cache(), mixed)
        assert to_hf(dataset, copy=copy, cache_dir=str(tmp_path))["x"][:] == ["1", "a"]

    @pytest.mark.parametrize("copy", [False, True])
    def test_vectors_of_another_version_are_lists(self, made, tmp_path, copy):
        vectors = {f"utt-{n}": np.full((1, 2), n, np.float32) for n in range(3)}
        columns = {"vector": make_version(tmp_path, vectors, axis=Clip()).path}
        given = [{"id": id_} for id_ in vectors]
        dataset = featcache.FeatureDataset(made.cache(), given, columns=columns)
        rows = to_hf(dataset, copy=copy, cache_dir=str(tmp_path))
        assert rows["vector"][:] == [[0, 0], [1, 1], [2, 2]]

    def test_without_a_manifest_are_all_of_the_cache_and_the_callers_own(self, made):
        rows = to_hf(made.cache())
        assert rows.column_names == ["id", "features"]
        assert rows["id"][:] == list(made.fbank)
        assert rows.data.nbytes < 5000
        rows[3]["features"][:] = 0
        assert all(np.array_equal(row["features"], made.fbank[row["id"]]) for row in rows)

    def test_quantised_features_are_values(self, tmp_path):
        cache = made_cache(tmp_path, make_features(4, (5,), "float32"), quantized=True)
        for row in to_hf(cache):
            assert np.array_equal(row["features"], cache[row["id"]])
            row["features"][:] = 0

    def test_many_strings_are_strings(self, tmp_path):
        frames = np.zeros((1, 1), np.float16)
        ids = [f"{'é' * (number % 3)}{number}" for number in range(70_000)]
        assert to_hf(made_cache(tmp_path, dict.fromkeys(ids, frames)))["id"][:] == ids


class TestFormats:
    @pytest.mark.parametrize(
        ("name", "dtype"), [(None, np.float16), ("torch", torch.float32), ("numpy", np.float32)]
    )
    def test_formats_give_what_they_make_of_arrays(self, made, name, dtype):
        rows = to_hf(made.both()).with_format(name)
        for row in rows:
            assert row["fbank"].dtype == dtype
            assert np.array_equal(np.asarray(row["fbank"]), made.fbank[row["id"]])
            assert np.array_equal(np.asarray(row["codes"]), made.codes[row["id"]])
        batch = rows[4:9]
        assert [len(array) for array in batch["codes"]] == [
            len(made.codes[id_]) for id_ in batch["id"]
        ]

    def test_ids_can_be_had_instead(self, made):
        rows = to_hf(made.dataset())
        ids = rows.cast_column(
            "features", CachedFeatures(rows.features["features"].path, decode=False)
        )
        assert ids[2]["features"] == ids[2]["id"]

    def test_ids_that_pandas_gives_back_are_theirs(self, made):
        """Which are large strings."""
        rows = to_hf(made.cache())
        ids = rows.cast_column(
            "features", CachedFeatures(rows.features["features"].path, decode=False)
        )
        table = ids.data.table.cast(
            pa.schema([(name, pa.large_string()) for name in ids.column_names])
        )
        again = datasets.Dataset(table).cast(rows.features)
        assert np.array_equal(again[7]["features"], rows[7]["features"])
        frame = ids.with_format("pandas").map(
            lambda some: some.assign(length=some["id"].str.len()), batched=True
        )
        assert frame.with_format(None)[7]["features"] == ids[7]["id"]

    @pytest.mark.filterwarnings(
        "ignore:This process:DeprecationWarning"
    )  # which Python 3.12 gives of any fork
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_data_loader_reads_them(self, made, workers):
        rows = to_hf(made.dataset()).with_format("torch")
        loader = DataLoader(rows, batch_size=4, collate_fn=list, num_workers=workers)
        seen = {row["id"]: row["features"] for batch in loader for row in batch}
        assert list(seen) == list(made.rows)
        assert all(
            np.array_equal(features.numpy(), made.fbank[id_]) for id_, features in seen.items()
        )


class TestAlgebra:
    def test_select_shuffle_split_filter_concatenate_pickle(self, made):
        rows = to_hf(made.both())
        parts = rows.shuffle(seed=1).train_test_split(0.3, seed=2)
        assert sorted([*parts["train"]["id"], *parts["test"]["id"]]) == sorted(made.rows)
        for some in (
            rows.select([5, 3]),
            parts["test"],
            rows.filter(lambda row: len(row["codes"]) > 10),
            datasets.concatenate_datasets([rows, rows.remove_columns("text")]),
            rows.rename_columns({"fbank": "input_features"}).rename_columns(
                {"input_features": "fbank"}
            ),
            pickle.loads(pickle.dumps(rows)),
        ):
            assert len(some)
            assert all(np.array_equal(row["fbank"], made.fbank[row["id"]]) for row in some)

    @pytest.mark.parametrize(
        ("how", "form"),
        [
            ({"input_columns": ["features"]}, None),
            ({}, "numpy"),
            ({"input_columns": "features"}, "torch"),
        ],
    )
    def test_map_computes_from_features_and_keeps_them_uncopied(self, made, how, form):
        rows = to_hf(made.dataset()).with_format(form)

        def mean(given):
            features = given if how else given["features"]
            return {"mean": float(np.asarray(features, np.float64).mean())}

        mapped = rows.map(mean, **how)
        assert mapped.features["features"] == rows.features["features"]
        for row in mapped:
            assert row["mean"] == pytest.approx(made.fbank[row["id"]].astype(float).mean())
            assert np.array_equal(np.asarray(row["features"]), made.fbank[row["id"]])

    def test_map_writes_no_features_by_accident(self, made):
        rows = to_hf(made.dataset())
        said = r'holds ids, not list<.*: have map name .* input_columns=\["features"\]'
        for function in (
            lambda row: {"frames": len(row["features"])},
            lambda row: {"features": 2 * row["features"]},
        ):
            with pytest.raises(ArgumentError, match=said):
                rows.map(function)
        doubled = rows.map(
            lambda features: {"doubled": 2 * features}, input_columns=["features"]
        ).with_format("numpy")
        np.testing.assert_array_equal(doubled[7]["doubled"], 2 * doubled[7]["features"])


class TestFingerprint:
    def test_follows_from_what_is_there(self, made):
        columns = (["text"], {"digit": str}, ["digit"])
        others = [
            made.cache(),
            made.cache("codec"),
            made.dataset(),
            *(made.dataset(columns=some) for some in columns),
        ]
        fingerprints = [to_hf(given)._fingerprint for given in (made.both(), made.both(), *others)]
        assert fingerprints[0] == fingerprints[1]
        assert len({*fingerprints}) == 7


class TestSaved:
    def test_saves_ids_and_is_read_by_new_processes_which_find_what_was_mapped(
        self, cli, made, tmp_path
    ):
        rows = to_hf(made.both())
        rows.save_to_disk(tmp_path / "saved")
        assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) < 20_000
        assert datasets.load_from_disk(tmp_path / "saved").features == rows.features
        arguments = tmp_path / "saved", made.folder / "features", made.manifest
        first = run_script(cli, PRINT_ROWS, *arguments)
        # the same in every process
        assert first.splitlines()[0] == to_hf(made.dataset())._fingerprint
        cached = {path: path.stat().st_mtime_ns for path in (tmp_path / "saved").glob("cache-*")}
        assert cached
        assert run_script(cli, PRINT_ROWS, *arguments) == first
        assert {
            path: path.stat().st_mtime_ns for path in (tmp_path / "saved").glob("cache-*")
        } == cached

    def test_rows_of_a_tag_are_read_by_the_tag_also_in_another_process(self, cli, tagged, tmp_path):
        then, now = tagged
        rows = to_hf(then)
        rows.save_to_disk(tmp_path / "saved")
        assert np.array_equal(to_hf(now)[0]["features"], now[0])
        assert np.array_equal(rows[0]["features"], then[0])
        code = """
            import sys
            import datasets
            import featcache.adapters.huggingface
            print(datasets.load_from_disk(sys.argv[1])[0]["features"].tobytes().hex())
        """
        assert run_script(cli, code, tmp_path / "saved") == f"{then[0].tobytes().hex()}\n"

    def test_rows_of_a_track_are_read_from_it_also_in_another_process(self, cli, tmp_path):
        slow = Track("slow", (2,), "float32", "every third frame", Frames(100 / 3))
        main = made_cache(tmp_path / "cache", make_features(4), side=(slow,))
        track = main.track("slow")
        rows = to_hf(featcache.FeatureDataset({"main": main, "slow": track}))
        assert to_hf(main)._fingerprint != to_hf(track)._fingerprint
        rows.save_to_disk(tmp_path / "saved")
        for row in rows:
            assert np.array_equal(row["main"], main[row["id"]])
            assert np.array_equal(row["slow"], track[row["id"]])
        code = """
            import sys
            import datasets
            import featcache.adapters.huggingface
            print(datasets.load_from_disk(sys.argv[1])[0]["slow"].tobytes().hex())
        """
        assert run_script(cli, code, tmp_path / "saved") == f"{track[0].tobytes().hex()}\n"


class TestCopy:
    def test_holds_the_features_themselves(self, made, tmp_path):
        rows = to_hf(made.both(), copy=True, cache_dir=str(tmp_path))
        assert rows.features["fbank"] == datasets.Array2D((None, 80), "float16")
        assert rows.features["codes"] == datasets.Array2D((None, 8), "uint16")
        assert rows.features["digit"].dtype == "int64"
        for row in rows.with_format("numpy", columns=["id", "fbank", "codes"]):
            assert np.array_equal(row["fbank"], made.fbank[row["id"]])
            assert np.array_equal(row["codes"], made.codes[row["id"]])

    def test_is_made_once(self, made, tmp_path):
        files = [
            to_hf(made.dataset(), copy=True, cache_dir=str(tmp_path)).cache_files for _ in range(2)
        ]
        assert files[0] == files[1]
        assert to_hf(made.both(), copy=True, cache_dir=str(tmp_path)).cache_files != files[0]

    @pytest.mark.parametrize(("shape", "dtype"), [((), "uint16"), ((2, 3), "float32")])
    def test_has_frames_of_any_shape(self, tmp_path, shape, dtype):
        stored = make_features(5, shape, dtype)
        rows = to_hf(
            made_cache(tmp_path / "features", stored), copy=True, cache_dir=str(tmp_path / "copy")
        )
        assert all(
            np.array_equal(np.array(row["features"], dtype), stored[row["id"]]) for row in rows
        )

    def test_of_a_crop_holds_the_crop(self, made, tmp_path):
        dataset = made.dataset(crop=featcache.Crop(frames=7, seed=3))
        first = to_hf(dataset, copy=True, cache_dir=str(tmp_path)).with_format("numpy")
        assert all(
            np.array_equal(row["features"], item["features"])
            for row, item in zip(first, dataset, strict=True)
        )
        dataset.set_epoch(1)
        second = to_hf(dataset, copy=True, cache_dir=str(tmp_path)).with_format("numpy")
        assert any(
            not np.array_equal(a["features"], b["features"])
            for a, b in zip(first, second, strict=True)
        )

    @pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
    def test_of_one_value_for_each_utterance(self, tmp_path, shape):
        rng = np.random.default_rng(0)
        stored = {f"v{n}": rng.random((1, *shape), np.float32) for n in range(3)}
        cache = made_cache(tmp_path / "vectors", stored, axis=Clip())
        rows = to_hf(cache, copy=True, cache_dir=str(tmp_path / "copy")).with_format("numpy")
        assert [row["id"] for row in rows] == [*stored]
        for row in rows:
            np.testing.assert_array_equal(row["features"], stored[row["id"]][0])


class TestRefuses:
    def test_parts_that_only_a_copy_could_hold(self, made):
        with pytest.raises(ArgumentError, match=r"has a crop=.*copy=True"):
            to_hf(made.dataset(crop=10))
        with pytest.raises(ArgumentError, match=r"has codebooks=.*copy=True"):
            to_hf(made.both(codebooks={"codes": 4}))

    def test_a_column_of_a_versions_name(self, made):
        with pytest.raises(
            ArgumentError, match="the column 'text' would hide the version of that name"
        ):
            to_hf(featcache.FeatureDataset({"text": made.cache()}, made.manifest))

    def test_what_is_no_id_and_what_is_not_there(self, made):
        features = CachedFeatures(str(made.cache().version.path))
        with pytest.raises(ArgumentError, match="holds ids, not ndarray"):
            features.encode_example(np.zeros(3))
        with pytest.raises(MissingItemError, match="utt-77"):
            features.decode_example("utt-77")
