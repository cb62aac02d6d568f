"""Events: which of them a span of seconds takes, and what items and batches of them are."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cache import make_version
from small_shards import create, item, publish

import featcache
from featcache.adapters.caches import dataset_of
from featcache.errors import ArgumentError, DamagedError, StoreError
from featcache.extractors.labels import packed
from featcache.format.writing import ShardBuilder
from featcache.loader.events import Event
from featcache.spec import LABELS, Events, FeatureSpec, Frames, Track
from featcache.version.version import VersionInfo

AXIS = Events()
TIMES = Track("features", (2,), "float64", "start and end", AXIS)
TEXT = Track(LABELS, (), "uint8", "labels")

# seconds that float64 adds and subtracts without rounding
steps = st.integers(0, 1 << 12).map(lambda step: step / 64)


@st.composite
def event_times(draw):
    pairs = draw(st.lists(st.tuples(steps, steps), max_size=12))
    both = sorted((start, start + duration) for start, duration in pairs)
    return np.array(both, np.float64).reshape(-1, 2)


def slow_cut(times, start, duration):
    """The same in the slow and obvious way."""
    stop, taken = start + duration, []
    for number, (first, last) in enumerate(times.tolist()):
        is_inside = max(first, start) < min(last, stop)
        if first == last:
            is_inside = start <= first < stop
        if is_inside:
            taken.append((number, max(first, start) - start, min(last, stop) - start))
    return taken


@given(event_times(), steps, steps)
def test_a_span_takes_what_overlaps_it(times, start, duration):
    cut, taken = AXIS.cut(times, start, duration)
    expected = slow_cut(times, start, duration)
    assert taken.tolist() == [number for number, _, _ in expected]
    assert cut.tolist() == [[first, last] for _, first, last in expected]


@given(event_times(), steps, steps, steps, steps)
def test_a_span_of_a_span_is_a_span(times, start, duration, inner_start, inner_duration):
    inner_start = min(inner_start, duration)
    inner_duration = min(inner_duration, duration - inner_start)
    outer, of_outer = AXIS.cut(times, start, duration)
    inner, of_inner = AXIS.cut(outer, inner_start, inner_duration)
    whole, taken = AXIS.cut(times, start + inner_start, inner_duration)
    assert inner.tolist() == whole.tolist()
    assert of_outer[of_inner].tolist() == taken.tolist()


@given(event_times(), st.lists(steps, min_size=1, max_size=6))
def test_spans_that_follow_each_other_lose_no_time_and_no_point(times, durations):
    start, seconds, points = 0.0, np.zeros(len(times)), np.zeros(len(times), int)
    for duration in [*durations, np.inf]:
        cut, taken = AXIS.cut(times, start, duration)
        assert (cut >= 0).all()
        seconds[taken] += cut[:, 1] - cut[:, 0]
        points[taken] += 1
        start += duration
    np.testing.assert_array_equal(seconds, times[:, 1] - times[:, 0])
    assert (points[times[:, 0] == times[:, 1]] == 1).all()


@given(event_times(), st.data())
def test_each_event_may_have_a_span_of_its_own(times, data):
    starts = np.array(data.draw(st.lists(steps, min_size=len(times), max_size=len(times))))
    cut, taken = AXIS.cut(times, starts, starts + 1)
    expected = [
        (number, *values)
        for number, (row, start) in enumerate(zip(times, starts.tolist(), strict=True))
        for _, *values in slow_cut(row[None], start, start + 1)
    ]
    assert [
        (number, *pair) for number, pair in zip(taken.tolist(), cut.tolist(), strict=True)
    ] == expected


@pytest.mark.parametrize("speech", [[(0.0, 3.3), (3.3, 4.0)], [(3.3, 3.3)]])
def test_rounding_of_decimal_seconds_brings_no_event_of_the_next_span(speech):
    """1.1 + 2.2 is 3.3000000000000003, and 0.1 + 0.2 is 0.30000000000000004."""
    times = np.array([(0.1, 0.1 + 0.2), *speech])
    _, of_until = AXIS.cut(times, 1.1, 2.2)
    behind, of_behind = AXIS.cut(times, 3.3, 1.0)
    assert of_until.tolist() == [1][: len(speech) - 1]
    assert of_behind.tolist() == [len(times) - 1]
    np.testing.assert_allclose(behind, [np.array(speech[-1]) - 3.3])
    assert AXIS.cut(times[:1], 0.3, 1.0)[1].tolist() == []
    assert AXIS.cut(np.array([(3.3, 3.3)]), 1.1 + 2.2, 1.0)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "track",
    [
        Track("features", (2,), "float32", "events", AXIS),
        Track("features", (3,), "float64", "events", AXIS),
        Track("features", (), "float64", "events", AXIS),
    ],
)
def test_events_that_are_no_start_and_end_are_no_spec(track):
    with pytest.raises(ValueError, match=r"not a start and an end: float64 \[2\]"):
        FeatureSpec.of(16000, track).require_sound()


WORDS = {
    "utt-0": [Event(0.0, 0.25, "the"), Event(0.25, 1.0, "end")],
    "utt-1": [],
    "utt-2": [Event(0.5, 1.5, "Größe"), Event(1.0, 1.25, "over"), Event(1.75, 1.75, "!")],
    "utt-3": [],
}


def make_spec_version(folder, name, spec):
    """An empty version of this spec."""
    config = {"name": name, "extractor": "made_up"}
    fingerprint = f"{len(name):02x}" * 32
    info = VersionInfo(name=name, fingerprint=fingerprint, config=config, spec=spec, made_by={})
    return create(folder, info)


def words_cache(folder, *shards, has_labels=True):
    """A version of events, in a shard for each list of ids."""
    side = [TEXT] if has_labels else []
    version = make_spec_version(folder, "words", FeatureSpec.of(16000, TIMES, *side))
    row = 0
    for ids in shards or ([*WORDS],):
        builder = ShardBuilder(version.info.spec)
        for id_ in ids:
            times = np.array([event[:2] for event in WORDS[id_]], np.float64).reshape(-1, 2)
            entries = {LABELS: packed([event.label for event in WORDS[id_]])}
            one = item(id_, path=f"audio/{id_}.wav", num_samples=32000)
            builder.append(one, times, entries if has_labels else {})
        publish(version, builder, row)
        row += len(ids)
    return featcache.open(version.path)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Four utterances in three shards, one of which holds no event."""
    folder = tmp_path_factory.mktemp("words")
    return words_cache(folder, ["utt-0"], ["utt-1", "utt-3"], ["utt-2"])


def test_an_utterance_of_events_is_a_list_of_them(words):
    assert dict(words.items()) == WORDS
    assert words.get("utt-9") is None
    assert words.lengths.tolist() == [2, 0, 0, 3]
    assert words.item("utt-2", check=True) == WORDS["utt-2"]
    assert words.item("utt-2", start=0.75, duration=0.5) == [
        Event(0.0, 0.5, "Größe"),
        Event(0.25, 0.5, "over"),
    ]
    assert words.item("utt-2", start=1.5) == [Event(0.25, 0.25, "!")]
    assert words.item("utt-1", duration=1.0) == []
    assert "float64 [events, 2], any number of events for each utterance" in repr(words)
    with pytest.raises(ArgumentError, match="start is -1"):
        words.item("utt-0", start=-1)
    with pytest.raises(ArgumentError, match="not codes of codebooks"):
        words.batch(["utt-0"], codebooks=1)


@pytest.mark.parametrize("check", [False, True])
def test_a_batch_of_events_is_flat(words, check):
    batch, lengths = words.batch(["utt-2", "utt-1", "utt-0"], check=check)
    assert lengths.tolist() == batch.lengths.tolist() == [3, 0, 2]
    assert batch.rows.tolist() == [0, 0, 0, 2, 2]
    assert batch.labels == ["Größe", "over", "!", "the", "end"]
    assert batch.times.dtype == torch.float64
    assert batch.times.tolist() == [[0.5, 1.5], [1.0, 1.25], [1.75, 1.75], [0.0, 0.25], [0.25, 1.0]]
    part, lengths = words.batch(["utt-2", "utt-0"], start=[1.0, 0.5], duration=0.5, check=check)
    assert part.times.tolist() == [[0.0, 0.5], [0.0, 0.25], [0.0, 0.5]]
    assert (part.labels, part.rows.tolist(), lengths.tolist()) == (
        ["Größe", "over", "end"],
        [0, 0, 1],
        [2, 1],
    )
    empty, lengths = words.batch([])
    assert (empty.times.shape, lengths.shape, empty.labels) == ((0, 2), (0,), [])
    nothing, lengths = words.batch(["utt-1", "utt-3"], check=check)
    assert (nothing.times.shape, lengths.tolist()) == ((0, 2), [0, 0])


def test_events_without_labels_have_none(tmp_path):
    cache = words_cache(tmp_path, has_labels=False)
    assert cache["utt-0"] == [Event(0.0, 0.25, None), Event(0.25, 1.0, None)]
    assert cache.batch(["utt-0"])[0].labels is None
    dataset = featcache.FeatureDataset(cache)
    assert dataset.collate([dataset[0], dataset[1]])["features"].labels is None


def test_events_are_the_same_in_another_process_and_from_copies(words, tmp_path):
    assert dict(pickle.loads(pickle.dumps(words)).items()) == WORDS
    copied = featcache.open(words.version.path, copy_to=tmp_path, check=True)
    assert dict(copied.items()) == WORDS


def frames_of(rate, seconds=2.0):
    count = int(rate * seconds)
    return {id_: np.arange(count, dtype=np.float32)[:, None].repeat(2, 1) for id_ in WORDS}


@pytest.fixture(scope="module")
def both(tmp_path_factory, words):
    """Words, and frames that are their own numbers, 100 in a second."""
    folder = tmp_path_factory.mktemp("frames")
    frames = make_version(folder, frames_of(100.0), name="fbank")
    return {"fbank": featcache.open(frames.path), "words": words}


def test_a_crop_takes_the_events_of_its_frames(both):
    crop = featcache.Crop(seconds=0.5)
    dataset = featcache.FeatureDataset(both, crop=crop)
    loader = featcache.DataLoader(dataset, batch_size=3)
    for _ in range(10):
        for batch in loader:
            events = batch["features"]["words"]
            assert batch["lengths"]["words"].tolist() == events.lengths.tolist()
            for row, id_ in enumerate(batch["ids"]):
                start = float(batch["features"]["fbank"][row, 0, 0]) / 100
                expected = both["words"].item(id_, start=start, duration=0.5)
                found = [
                    Event(*times, label)
                    for times, label, at in zip(
                        events.times.tolist(), events.labels, events.rows.tolist(), strict=True
                    )
                    if at == row
                ]
                assert found == expected


def test_items_collate_to_the_batch(both):
    dataset = featcache.FeatureDataset(both, crop=featcache.Crop(seconds=1.0, where="center"))
    batch, rows = dataset.batch([2, 0, 1]), [2, 0, 1]
    collated = dataset.collate([dataset[row] for row in rows])
    for name in ("times", "rows", "lengths"):
        of_batch, of_items = (
            getattr(made["features"]["words"], name) for made in (batch, collated)
        )
        assert of_batch.tolist() == of_items.tolist()
    assert collated["features"]["words"].labels == batch["features"]["words"].labels
    assert collated["lengths"]["words"].tolist() == batch["lengths"]["words"].tolist()
    in_torch = torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=dataset.collate)
    assert (
        next(iter(in_torch))["features"]["words"].lengths.tolist()
        == dataset.batch(range(4))["features"]["words"].lengths.tolist()
    )


def test_items_collate_where_they_are_and_not_on_the_default_device(both):
    dataset = featcache.FeatureDataset(both)
    items = [dataset[row] for row in (2, 0)]
    expected = dataset.batch([2, 0])["features"]["words"]
    with torch.device("meta"):
        events = dataset.collate(items)["features"]["words"]
    assert events.rows.tolist() == expected.rows.tolist()


def test_labels_are_numbers_of_given_classes(both):
    dataset = featcache.FeatureDataset(both, classes="words")
    assert dataset.classes == {"words": ["!", "Größe", "end", "over", "the"]}
    events = dataset.batch([0, 1])["features"]["words"]
    assert events.labels.tolist() == [4, 2]
    events = dataset.batch([2])["features"]["words"]
    assert events.labels.tolist() == [1, 3, 0]
    items = dataset.collate([dataset[0], dataset[2]])["features"]["words"]
    assert items.labels.tolist() == [4, 2, 1, 3, 0]
    few = featcache.FeatureDataset(both, classes={"words": ["the", "end"]})
    assert few[0]["features"]["words"].labels.tolist() == [0, 1]
    with pytest.raises(ArgumentError, match=r"the label 'Größe' of .* is not in classes="):
        few.batch(range(4))
    with pytest.raises(ArgumentError, match="the same label twice"):
        featcache.FeatureDataset(both, classes={"words": ["the", "the"]})


def test_a_dtype_is_for_frames_alone(both):
    dataset = featcache.FeatureDataset(both)
    (batch,) = featcache.DataLoader(dataset, batch_size=4, dtype=torch.float16)
    assert batch["features"]["fbank"].dtype == torch.float16
    assert batch["features"]["words"].times.dtype == torch.float64
    with pytest.raises(ArgumentError, match="the times of words stay float64"):
        featcache.DataLoader(dataset, batch_size=4, dtype={"words": torch.float32})


def test_events_alone_cannot_be_cropped_or_adapted(words):
    with pytest.raises(ArgumentError, match="events only beside frames"):
        featcache.FeatureDataset(words, crop=featcache.Crop(seconds=1.0))
    with pytest.raises(ArgumentError, match="holds events, and adapters give frames"):
        dataset_of(words)
    batches = [*featcache.DataLoader(featcache.FeatureDataset(words), batch_size=2)]
    assert sum(batch["lengths"].sum().item() for batch in batches) == 5


def test_labels_of_another_number_than_events_are_damage(tmp_path):
    folder = tmp_path
    version = words_cache(folder).version
    builder = ShardBuilder(version.info.spec)
    builder.append(item("odd", num_samples=32000), np.zeros((2, 2)), {LABELS: packed(["one"])})
    publish(version, builder, 4)
    with pytest.raises(DamagedError, match="2 events have 1 labels"):
        featcache.open(version.path)["odd"]


def test_an_older_featcache_would_refuse_another_kind_in_one_line(tmp_path, monkeypatch):
    version = words_cache(tmp_path).version
    monkeypatch.setattr("featcache.version.version.STORED_KINDS", ("frames", "clip"))
    with pytest.raises(StoreError, match="holds features of the kind 'events', which this"):
        featcache.open(version.path)


RATES = {"features": 24000 / 2048, "codes_1": 24000 / 1024, "codes_2": 24000 / 512}
"""Those of SNAC at 24 kHz: 11.7, 23.4 and 46.9 in a second."""


@pytest.fixture(scope="module")
def three_rates(tmp_path_factory):
    """Codes at three rates, each the number of its frame."""
    tracks = [
        Track(name, (1,), "uint16", "codes", Frames(rate), (4096,)) for name, rate in RATES.items()
    ]
    spec = FeatureSpec.of(24000, *tracks)
    version = make_spec_version(tmp_path_factory.mktemp("snac"), "snac", spec)
    builder = ShardBuilder(spec)
    for number in range(6):
        slow = 20 + 7 * number
        codes = [np.arange(slow << level, dtype=np.uint16)[:, None] for level in range(3)]
        one = item(f"utt-{number}", num_samples=slow * 2048)
        builder.append(one, codes[0], {"codes_1": codes[1], "codes_2": codes[2]})
    publish(version, builder)
    return featcache.open(version.path)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 18), st.integers(0, 1000), st.sampled_from(["random", "center", "start"]))
def test_crops_of_three_rates_are_of_the_same_time(three_rates, frames, seed, where):
    caches = {name: three_rates.track(name) for name in RATES}
    crop = featcache.Crop(frames=frames, where=where, seed=seed)
    dataset = featcache.FeatureDataset(caches, crop=crop)
    for batch in featcache.DataLoader(dataset, batch_size=4, seed=seed):
        slow, middle, fast = (batch["features"][name].long() for name in RATES)
        assert (slow.shape[1], middle.shape[1], fast.shape[1]) == (frames, 2 * frames, 4 * frames)
        torch.testing.assert_close(middle[:, ::2] // 2, slow)
        torch.testing.assert_close(fast[:, ::4] // 4, slow)
        torch.testing.assert_close(fast[:, ::2] // 2, middle)


def test_the_first_track_may_be_the_fastest(three_rates):
    """A window of fine codes that the coarse ones have no whole frames for begins at one of
    theirs."""
    caches = {name: three_rates.track(name) for name in reversed(RATES)}
    dataset = featcache.FeatureDataset(caches, crop=featcache.Crop(seconds=0.6))
    for batch in featcache.DataLoader(dataset, batch_size=4):
        starts = [batch["features"][name][:, 0, 0].long() for name in RATES]
        torch.testing.assert_close(starts[2], 4 * starts[0])
        torch.testing.assert_close(starts[1], 2 * starts[0])


def test_a_span_of_seconds_is_the_same_at_three_rates(three_rates):
    for level, name in enumerate(RATES):
        codes = three_rates.track(name).item("utt-3", start=5 * 2048 / 24000, duration=0.5)
        assert int(codes[0, 0]) == 5 << level
        assert len(codes) == round(0.5 * RATES[name])


@pytest.mark.parametrize("overflow", ["error", "split"])
@pytest.mark.filterwarnings("ignore:4 utterances:featcache.FeatcacheWarning")
def test_packed_rows_have_the_events_of_their_documents_and_parts_those_of_their_time(
    both, overflow
):
    tokens = {"error": 500, "split": 75}[overflow]
    dataset = featcache.FeatureDataset(both, classes="words")
    loader = featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow=overflow)
    seen = 0
    for batch in loader:
        events, first = batch["features"]["words"], 0
        assert batch["lengths"]["words"].tolist() == events.lengths.tolist()
        for document, id_ in enumerate(batch["ids"]):
            is_own = batch["document_ids"]["fbank"] == document
            frames = batch["features"]["fbank"][is_own]
            start, duration = float(frames[0, 0]) / 100, len(frames) / 100
            expected = both["words"].item(id_, start=start, duration=duration)
            last = first + int(events.lengths[document])
            assert events.rows[first:last].tolist() == [document] * len(expected)
            assert events.times[first:last].tolist() == [[*event[:2]] for event in expected]
            labels = [dataset.classes["words"][number] for number in events.labels[first:last]]
            assert labels == [event.label for event in expected]
            first, seen = last, seen + len(frames)
    assert seen == 4 * 200


@pytest.mark.filterwarnings("ignore:4 utterances:featcache.FeatcacheWarning")
def test_parts_have_the_events_of_their_time_where_the_first_version_ends_before_another(
    both, tmp_path
):
    """As an fbank ends before codes, whose clips are padded to whole hops."""
    short = make_version(tmp_path, frames_of(100.0, 1.2), name="short")
    versions = {"short": featcache.open(short.path), **both}
    dataset = featcache.FeatureDataset(versions)
    seen = []
    for batch in featcache.PackedLoader(dataset, tokens=50, rows=2, overflow="split"):
        events = batch["features"]["words"]
        for document, id_ in enumerate(batch["ids"]):
            part = int(batch["parts"][document])
            frames = batch["features"]["fbank"][batch["document_ids"]["fbank"] == document]
            assert frames[0, 0] == part * 50
            duration = 0.5 if part < 3 else None
            is_own = (events.rows == document).tolist()
            found = [
                Event(*times, label)
                for times, label, own in zip(
                    events.times.tolist(), events.labels, is_own, strict=True
                )
                if own
            ]
            assert found == both["words"].item(id_, start=part / 2, duration=duration)
            seen.append((id_, part))
    assert sorted(seen) == [(id_, part) for id_ in WORDS for part in range(4)]
