"""The loader as a whole: what it needs of the machine and of other packages, and that its page is true."""

from make_cache import make_features, make_version
from processes import run_python, run_script


class TestNeeds:
    def test_no_descriptor_for_an_open_shard(self, cli, tmp_path):
        make_version(tmp_path, *(make_features(2, prefix=f"shard{n}") for n in range(80)))
        run_script(
            cli,
            """
            import resource, sys
            import featcache

            resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            cache = featcache.open(sys.argv[1], check=True)  # builds the index
            arrays = list(cache.values())
            assert len(arrays) == 160
            features, lengths = cache.batch(range(160))
            assert all((row[:len(array)].numpy() == array).all() for row, array in zip(features, arrays))
            """,
            tmp_path,
        )

    def test_nothing_of_extraction(self, folder, tmp_path):
        (tmp_path / "train.csv").write_text("id,text\nutt-4,hello\nutt-2,world\n")
        run_python(
            """
            import sys

            for name in ("pydantic", "yaml", "soundfile", "soxr", "torchaudio", "zarr", "click", "tqdm"):
                sys.modules[name] = None  # importing it is an ImportError
            import featcache

            assert "torch" not in sys.modules
            cache = featcache.open(sys.argv[1])
            assert len(cache.batch(["utt-1", "utt-2"], check=True)[0]) == 2
            dataset = featcache.FeatureDataset(cache, sys.argv[2])
            assert dataset.collate([dataset[0], dataset[1]])["ids"] == ["utt-4", "utt-2"]
            try:
                featcache.open(sys.argv[1], config="fbank80")
            except featcache.FeatcacheError as error:
                assert "featcache[extract]" in str(error)
            else:
                raise AssertionError("a config was read")
            """,
            folder,
            tmp_path / "train.csv",
        )
