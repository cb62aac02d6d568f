"""What notebooks show: never an error, never anything but text of what a stranger's cache says."""

import inspect
import io
import re
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from make_cache import made_cache, make_features, make_version

import featcache
from featcache import DataLoader, FeatureDataset
from featcache.loader.display import Batch, card, png

EVIL = "<script>alert(1)</script>\"'&"


class Tags(HTMLParser):
    """The names of all elements, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.names, self.texts = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@given(st.integers(1, 70), st.integers(1, 9), st.data())
def test_a_png_is_what_others_read(width, height, data):
    levels = np.frombuffer(data.draw(st.binary(min_size=width * height, max_size=width * height)), np.uint8)
    levels = levels.reshape(height, width)
    image = pytest.importorskip("PIL.Image")
    with image.open(io.BytesIO(png(levels))) as read:
        assert np.array_equal(np.asarray(read), levels)


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((0, 80)),
        np.zeros((3, 0)),
        np.zeros(5),
        np.full((4, 3), np.nan),
        np.array([[np.inf, -np.inf, 1]]),
        np.zeros((5000, 3, 700), np.uint32),
    ],
)
def test_any_features_can_be_shown(features):
    html = card("x", lambda: {"a": 1}, lambda: features)
    assert ("<img" in html) == (features.ndim > 1 and features.size > 0)
    assert len(html) < 200_000
    assert "not shown" not in html


@pytest.fixture
def cache(tmp_path):
    features = {EVIL if name == "utt-0" else name: array for name, array in make_features(20).items()}
    return made_cache(tmp_path / "features", features)


def test_a_cache_a_dataset_and_a_batch(cache):
    rows = [{"id": id_, "speaker": EVIL, EVIL: n} for n, id_ in enumerate(cache.ids)]
    dataset = FeatureDataset(cache, rows, classes="speaker")
    several = FeatureDataset({EVIL: cache, "b": cache}, rows)
    batches = [*DataLoader(several, [[0, 1]]), several.batch([0]), dataset.collate([dataset[0]])]
    assert all(type(batch) is Batch for batch in batches)
    for shown in (cache, dataset, several, dataset.subset([3]), *batches):
        html = shown._repr_html_()
        found = Tags(html)
        assert set(found.names) == {"div", "strong", "table", "tr", "th", "td", "img"}
        assert len(html) < 200_000
    assert {"utterances", "20", "float16 [frames, 80] at 100 Hz"} <= set(Tags(cache._repr_html_()).texts)
    assert f"1: {EVIL}" in Tags(dataset._repr_html_()).texts
    assert "float16 [1, 3, 80] on cpu" in " ".join(
        Tags(Batch(features=torch.zeros(1, 3, 80).half())._repr_html_()).texts
    )


def test_what_is_empty_has_no_picture(cache, tmp_path):
    make_version(tmp_path / "none")
    dataset = FeatureDataset(cache)
    for shown in (featcache.open(tmp_path / "none"), dataset.subset([]), dataset.batch([])):
        assert re.findall("not shown|<img", shown._repr_html_()) == []


def test_what_is_damaged_is_shown_as_such(cache, tmp_path):
    for path in tmp_path.glob("features/*/shards/*/features/c/0/0"):
        path.write_bytes(path.read_bytes()[::-1])
    again = featcache.open(tmp_path / "features")
    assert "DamagedError" in again._repr_html_()
    assert "DamagedError" in FeatureDataset(again)._repr_html_()


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (featcache.open, "path name config tag check strict ram copy_to copy_limit"),
        (featcache.Cmvn, "mean std norm_means norm_vars unknown dtype groups group_mean group_std"),
        (featcache.Cache.batch, "self keys start duration codebooks padding_value out raw check"),
        (
            FeatureDataset,
            "cache manifest padding_value crop codebooks where skip_missing on_changed copies columns classes",
        ),
        (
            featcache.BucketBatchSampler,
            "lengths shards max_frames batch_size shuffle seed rank world_size drop_last shards_in_memory",
        ),
    ],
)
def test_help_and_completion_name_every_argument(function, named):
    signature = inspect.signature(function)
    assert list(signature.parameters) == named.split()
    assert not [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]


def test_an_unknown_argument_is_named(cache):
    calls = (partial(featcache.open, "x"), partial(cache.batch, [0]), partial(FeatureDataset, cache))
    for call in (*calls, partial(featcache.BucketBatchSampler, [1], batch_size=1)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
            call(typo=1)
