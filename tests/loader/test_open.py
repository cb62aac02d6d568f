"""Which version `featcache.open` opens: by name, by folder, by config; and what that needs.

What is said of names and folders that name none, or several, is in tests/version/test_versions.py."""

from dataclasses import dataclass

import pytest
from make_cache import make_features, make_version
from processes import run_script

import featcache
from featcache.errors import ConfigError, StoreError


@dataclass(frozen=True)
class FakeConfig:
    name: str
    low_freq: int

    def resolved(self):
        return {"name": self.name, "extractor": "made_up", "params": {"low_freq": self.low_freq}}

    def fingerprint(self):
        return f"{self.low_freq:02x}" * 32

    @property
    def folder_name(self):
        return f"{self.name}-{self.fingerprint()[:12]}"


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A cache of fbank80 with low_freq 0 and 20, and mfcc with 3."""
    folder = tmp_path_factory.mktemp("versions")
    for config in (FakeConfig("fbank80", 0), FakeConfig("fbank80", 20), FakeConfig("mfcc", 3)):
        options = {"name": config.name, "params": {"low_freq": config.low_freq}, "fingerprint": config.fingerprint()}
        make_version(folder, make_features(config.low_freq + 1), **options)
    return folder


class TestOpen:
    def test_by_name_by_folder_or_by_config(self, versions):
        assert len(featcache.open(versions, "mfcc")) == 4
        folder_name = FakeConfig("fbank80", 20).folder_name
        assert len(featcache.open(str(versions), folder_name)) == len(featcache.open(versions / folder_name)) == 21
        assert len(featcache.open(versions, config=FakeConfig("fbank80", 20))) == 21
        assert len(featcache.open(versions, config=FakeConfig("renamed", 20))) == 21

    @pytest.mark.parametrize("name", ["", FakeConfig("mfcc", 3).folder_name])
    def test_another_config_is_refused_by_its_keys(self, versions, name):
        with pytest.raises(StoreError, match=r"made with another config; .*params\.low_freq: 3 -> 4"):
            featcache.open(versions / name, config=FakeConfig("mfcc", 4))

    def test_a_config_that_made_nothing_here_is_refused(self, versions):
        with pytest.raises(StoreError, match=r"no version of this config, which would be other-.*; it holds fbank80-"):
            featcache.open(versions, config=FakeConfig("other", 4))
        with pytest.raises(StoreError, match="no version of this config"):
            featcache.open(versions, "unknown", config=FakeConfig("mfcc", 3))

    def test_a_config_may_be_a_file_or_a_packaged_ones_name(self, tmp_path):
        from featcache.config import load_config

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
            from featcache.errors import MissingDependencyError

            cache = featcache.open(sys.argv[1])
            assert len(cache.batch(["utt-1", "utt-2"], check=True)[0]) == 2
            dataset = featcache.FeatureDataset(cache, sys.argv[2])
            assert dataset.collate([dataset[0], dataset[1]])["ids"] == ["utt-4", "utt-2"]
            try:
                featcache.open(sys.argv[1], config="fbank80")
            except MissingDependencyError as error:
                assert "featcache[extract]" in str(error)
            else:
                raise AssertionError("a config was read")
            """,
            folder,
            tmp_path / "train.csv",
        )
