"""Which version `featcache.open` opens: by name, by folder, by config; and what that needs.

What is said of names and folders that name none, or several, is in
tests/version/test_versions.py."""

import pytest
from make_cache import make_features, make_version
from processes import run_script

import featcache
from featcache.config import load_config
from featcache.errors import ConfigError, StoreError


def made_with(name, low_freq):
    return load_config("fbank80", {"name": name, "params.low_freq": low_freq})


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A cache of fbank80 with low_freq 0 and 20, and mfcc with 3."""
    folder = tmp_path_factory.mktemp("versions")
    for name, low_freq in (("fbank80", 0), ("fbank80", 20), ("mfcc", 3)):
        config = made_with(name, low_freq)
        make_version(
            folder,
            make_features(low_freq + 1),
            fingerprint=config.fingerprint(),
            **config.resolved(),
        )
    return folder


class TestOpen:
    def test_by_name_by_folder_or_by_config(self, versions):
        assert len(featcache.open(versions, "mfcc")) == 4
        folder_name = f"fbank80-{made_with('fbank80', 20).fingerprint()[:12]}"
        assert (
            len(featcache.open(str(versions), folder_name))
            == len(featcache.open(versions / folder_name))
            == 21
        )
        for name in ("fbank80", "renamed"):
            assert len(featcache.open(versions, config=made_with(name, 20))) == 21

    def test_another_config_is_refused_by_its_keys(self, versions):
        for path in (versions, featcache.open(versions, "mfcc").version.path):
            with pytest.raises(
                StoreError, match=r"made with another config; .*params\.low_freq: 3.0 -> 4.0"
            ):
                featcache.open(path, config=made_with("mfcc", 4))

    def test_a_config_that_made_nothing_here_is_refused(self, versions):
        with pytest.raises(
            StoreError,
            match=r"no version of this config, which would be other-.*; it holds fbank80-",
        ):
            featcache.open(versions, config=made_with("other", 4))
        with pytest.raises(StoreError, match="no version of this config"):
            featcache.open(versions, "unknown", config=made_with("mfcc", 3))

    def test_a_config_may_be_a_file_or_a_packaged_ones_name(self, tmp_path):
        config = load_config("fbank80")
        make_version(tmp_path / "features", make_features(3), fingerprint=config.fingerprint())
        text = "name: mine\nextractor: fbank\nparams: {num_mel_bins: 23}\n"
        (tmp_path / "mine.yaml").write_text(text)
        assert len(featcache.open(tmp_path / "features", config="fbank80")) == 3
        with pytest.raises(StoreError, match="made with another config"):
            featcache.open(tmp_path / "features", config=tmp_path / "mine.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            featcache.open(tmp_path / "features", config="nothing.yaml")


class TestNeeds:
    def test_no_descriptor_for_an_open_shard(self, cli, tmp_path):
        make_version(tmp_path, *(make_features(2, prefix=f"shard{n}") for n in range(40)))
        run_script(
            cli,
            """
            import resource, sys
            import featcache

            resource.setrlimit(resource.RLIMIT_NOFILE, (32, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            cache = featcache.open(sys.argv[1], check=True)  # builds the index
            arrays = list(cache.values())
            assert len(arrays) == 80
            features, lengths = cache.batch(range(80))
            assert all((row[:len(array)].numpy() == array).all() for row, array in zip(features, arrays))
            """,
            tmp_path,
        )

    def test_nothing_of_extraction(self, cli, folder, tmp_path):
        (tmp_path / "train.csv").write_text("id,text\nutt-4,hello\nutt-2,world\n")
        run_script(
            cli,
            """
            import sys

            absent = {"pydantic", "yaml", "soundfile", "soxr", "torchaudio", "zarr", "click", "tqdm"}
            for name in [*sys.modules]:  # a fork has them all
                if name.partition(".")[0] in {"featcache", *absent}:
                    del sys.modules[name]
            sys.modules |= dict.fromkeys(absent)  # importing one is an ImportError
            import featcache
            from featcache.errors import MissingDependencyError, install_hint

            cache = featcache.open(sys.argv[1])
            assert len(cache.batch(["utt-1", "utt-2"], check=True)[0]) == 2
            dataset = featcache.FeatureDataset(cache, sys.argv[2])
            assert dataset.collate([dataset[0], dataset[1]])["ids"] == ["utt-4", "utt-2"]
            try:
                featcache.open(sys.argv[1], config="fbank80")
            except MissingDependencyError as error:
                assert install_hint("extract") in str(error)
            else:
                raise AssertionError("a config was read")
            """,
            folder,
            tmp_path / "train.csv",
        )
