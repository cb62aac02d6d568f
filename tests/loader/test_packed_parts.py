"""Parts of long utterances in several versions at once: frames, events and vectors, held to a
slow and obvious reference in exact fractions."""

import math
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from make_cache import made_cache
from small_shards import create, item, publish

import featcache
from featcache.extractors.labels import packed as packed_labels
from featcache.format.writing import ShardBuilder
from featcache.spec import LABELS, Clip, Events, FeatureSpec, Track
from featcache.version.version import VersionInfo

pytestmark = pytest.mark.filterwarnings("ignore:.* more than .* tokens")

TRACKS = (
    Track("features", (2,), "float64", "start and end", Events()),
    Track(LABELS, (), "uint8", "labels"),
)


def events_cache(folder, events):
    """A cache of events, (start, end, label), by id."""
    spec = FeatureSpec.of(16000, *TRACKS)
    config = {"name": "words", "extractor": "made_up"}
    info = VersionInfo(name="words", fingerprint="5" * 64, config=config, spec=spec, made_by={})
    version = create(Path(folder), info)
    builder = ShardBuilder(spec)
    for id_, of_utterance in events.items():
        times = np.array([pair for *pair, _ in of_utterance], np.float64).reshape(-1, 2)
        labels = packed_labels([label for *_, label in of_utterance])
        builder.append(item(id_, num_samples=1 << 30), times, {LABELS: labels})
    publish(version, builder, 0)
    return featcache.open(version.path)


def packed(dataset, **options):
    options = {"rows": 2, "overflow": "split", "window": 4} | options
    return featcache.PackedLoader(dataset, **options)


def documents_in(batch, name):
    """Each document of a batch as (id, part), with its tokens of one version."""
    for number, (id_, part) in enumerate(zip(batch["ids"], batch["parts"].tolist(), strict=True)):
        is_own = batch["document_ids"][name] == number
        length = batch["lengths"][name][number]
        yield (id_, part), batch["features"][name][is_own][:length].numpy()


@pytest.mark.parametrize("rates", [(12.5, 75, 100), (100, 12.5), (75, 86.1328125), (50, 100 / 3)])
@pytest.mark.parametrize(("tokens", "spare"), [(1, 0), (7, 1), (8, 3), (31, 0), (64, 5)])
def test_each_version_has_all_frames_once_at_the_times_of_the_parts(tmp_path, rates, tokens, spare):
    """Also if versions end up to three frames apart."""
    random = np.random.default_rng(tokens)
    seconds = random.uniform(0.05, 4, 12)
    names = [f"at-{number}" for number in range(len(rates))]
    caches = {}
    for name, rate in zip(names, rates, strict=True):
        lengths = np.maximum(1, np.floor(seconds * rate) + random.integers(-1, 3, 12))
        arrays = {
            f"utt-{number}": random.standard_normal((int(length), 2)).astype(np.float32)
            for number, length in enumerate(lengths)
        }
        caches[name] = made_cache(tmp_path / name, arrays, frame_rate=rate, name=name)
    exact = [Fraction(rate).limit_denominator(1 << 20) for rate in rates]
    parts = {name: {} for name in names}
    for batch in packed(featcache.FeatureDataset(caches), tokens=tokens, spare=spare):
        for name, rate in zip(names, exact, strict=True):
            assert batch["features"][name].shape[1] == math.ceil(tokens * rate / exact[0])
            for document, frames in documents_in(batch, name):
                parts[name][document] = frames
    for name, rate in zip(names, exact, strict=True):
        assert parts[name].keys() == parts[names[0]].keys()
        for id_ in caches[name]:
            numbers = sorted(part for of, part in parts[name] if of == id_)
            assert numbers == [*range(len(numbers))]
            whole, end = caches[name][id_], 0
            for part in numbers:
                frames = parts[name][id_, part]
                begin = part * (tokens - spare) * rate / exact[0]
                assert end == min(math.floor(begin), len(whole))
                np.testing.assert_array_equal(frames, whole[end : end + len(frames)])
                end += len(frames)
            assert end == len(whole)


@pytest.mark.parametrize("rate", [10, 12.5, 25, 100 / 3, 75, 86.1328125, 100])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_an_event_on_the_border_of_parts_is_in_one_of_them(tmp_path, rate, tokens):
    """Labels lie on multiples of a frame, whose sums are rounded in float64."""
    exact = Fraction(rate).limit_denominator(1 << 20)
    times = [float(number / exact) for number in range(91)]
    events = [(time, time, "point") for time in times[:90]]
    events += [(*pair, "frame") for pair in pairwise(times)]
    caches = {
        "mel": made_cache(tmp_path, {"utt": np.zeros((90, 2), np.float32)}, frame_rate=rate),
        "words": events_cache(tmp_path / "words", {"utt": sorted(events)}),
    }
    labels, starts = [], []
    for batch in packed(featcache.FeatureDataset(caches), tokens=tokens):
        words = batch["features"]["words"]
        labels += words.labels
        begins = batch["parts"][words.rows] * tokens / rate
        starts += (words.times[:, 0] + begins).tolist()
    assert (labels.count("point"), labels.count("frame")) == (90, 90)
    np.testing.assert_allclose(sorted(starts), [start for start, *_ in sorted(events)], atol=1e-9)


def test_events_of_a_part_are_of_its_time_also_behind_the_first_versions_end(tmp_path):
    """Codes of 4 frames, and a mel that lasts two frames of codes longer."""
    caches = {
        "codes": made_cache(tmp_path / "c", {"utt": np.zeros((4, 2), np.float32)}, frame_rate=10),
        "mel": made_cache(tmp_path / "m", {"utt": np.zeros((60, 2), np.float32)}, name="mel"),
        "words": events_cache(tmp_path / "w", {"utt": [(0.42, 0.45, "a"), (0.52, 0.55, "b")]}),
    }
    found = {}
    for batch in packed(featcache.FeatureDataset(caches), tokens=1, rows=1):
        words = batch["features"]["words"]
        for row, label, times in zip(words.rows, words.labels, words.times.tolist(), strict=True):
            found[label] = batch["parts"][row].item(), [round(time, 9) for time in times]
    assert found == {"a": (4, [0.02, 0.05]), "b": (5, [0.02, 0.05])}


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_rank_without_a_row_has_no_vector_and_no_event(tmp_path, world_size):
    arrays = {f"utt-{number}": np.zeros((5, 2), np.float32) for number in range(4)}
    vectors = {id_: np.ones((1, 3), np.float32) for id_ in arrays}
    caches = {
        "mel": made_cache(tmp_path / "mel", arrays),
        "speaker": made_cache(tmp_path / "speaker", vectors, axis=Clip(), name="speaker"),
        "words": events_cache(tmp_path / "words", {id_: [(0.0, 0.02, "a")] for id_ in arrays}),
    }
    dataset = featcache.FeatureDataset(caches)
    options = {"tokens": 20, "world_size": world_size}
    ranks = [[*packed(dataset, rank=rank, **options)] for rank in range(world_size)]
    assert {*map(len, ranks)} == {1}
    seen = [batch["ids"] for (batch,) in ranks]
    assert sorted(chain(*seen)) == sorted(arrays)
    assert [] in seen
    for (batch,) in ranks:
        count = len(batch["ids"])
        assert batch["features"]["speaker"].tolist() == [[1.0] * 3] * count
        assert batch["features"]["words"].lengths.tolist() == [1] * count
