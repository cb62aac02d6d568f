"""Extractors that take rows: the shape of a clip's batch does not depend on other clips,
and results are in order."""

import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from cache_contents import check, items, only_version
from corpora import Corpus, speech
from extractions import run_to_its_end, write_config
from processes import MOST_SECONDS
from row_extractors import HOP, Moments, MomentsParams, Shapes, Small

import featcache
from featcache import device
from featcache.config import load_config
from featcache.engines import local
from featcache.engines.delivery import Delivery
from featcache.errors import ExtractorError
from featcache.extraction import from_audio
from featcache.extraction.features import is_out_of_memory, until_it_fits
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.extractors import Clip
from featcache.extractors.base import main_track
from featcache.manifest.read import read_manifest
from featcache.version.indexing import open_index
from featcache.version.ledger import read_failures

CPU = torch.device("cpu")


def clips(count: int) -> list[Clip]:
    generator = random.Random(0)
    seconds = [
        generator.choice((0.01, 0.02, 0.3, 1.0, 3.0)) * generator.uniform(1, 1.5)
        for _ in range(count)
    ]
    waveforms = [
        torch.from_numpy(speech(length, seed=i)[:, 0].astype("f4"))
        for i, length in enumerate(seconds)
    ]
    return [Clip(str(i), waveform) for i, waveform in enumerate(waveforms)]


def extract(manifest, config, cache, threads=2, **options):
    return featcache.extract(manifest, config, cache, Options(threads=threads, **options))


def planned(manifest, config, cache, threads=2, row_workers=0):
    job = plan_extraction(
        read_manifest(manifest), [load_config(config)], cache, Options(threads=threads)
    )
    job.device.row_workers += row_workers
    job.device.workers += row_workers
    return job


# Shapes


@pytest.mark.parametrize("granularity", [1, 160, 320, 1920])
def test_padded_lengths_are_few_and_never_an_eighth_too_long(granularity):
    extractor = Moments(MomentsParams(), 16000, CPU)
    extractor.granularity = granularity
    numbers = range(1, 300 * granularity, max(1, granularity // 3))
    lengths = [extractor.padded_length(n) for n in numbers]
    assert lengths == sorted(lengths)
    assert all(length % granularity == 0 for length in lengths)
    assert len(set(lengths)) <= 16 + 8 * 5
    for n, length in zip(numbers, lengths, strict=True):
        hops = -(-n // granularity)
        assert hops <= length // granularity <= max(hops * 9 / 8, hops)
        assert extractor.padded_length(length) == length


@pytest.mark.parametrize("policy", ["padded", "equal_length", "single"])
def test_the_shape_of_a_clips_batch_depends_on_its_length_alone(policy):
    extractor = Shapes(MomentsParams(), 16000, CPU)
    extractor.chosen_batching = policy
    some = clips(40)
    alone = [main_track(extractor.extract([clip])[0]) for clip in some]
    shuffled = random.Random(1).sample(range(len(some)), len(some))
    together = [*map(main_track, extractor.extract([some[i] for i in shuffled]))]
    for position, i in enumerate(shuffled):
        assert torch.equal(together[position], alone[i])
        count, length = alone[i][0].tolist()
        expected = extractor.padded_length(len(some[i].waveform))
        assert (count, length) == (extractor.rows(expected, CPU), expected)
        assert policy == "padded" or length == len(some[i].waveform)
        assert policy != "single" or count == 1


def test_clips_come_back_in_order_and_cut_to_their_own_frames():
    extractor = Moments(MomentsParams(), 16000, CPU)
    some = clips(30)
    for clip, found in zip(some, extractor.extract_rows(some), strict=True):
        count = len(clip.waveform) // HOP
        frames = clip.waveform[: count * HOP].numpy().reshape(-1, HOP)
        expected = np.stack([frames.mean(1), np.square(frames).mean(1)], axis=1)
        np.testing.assert_allclose(found.features, expected, rtol=1e-5, atol=1e-8)
        assert found.side["counts"].tolist() == [count]
    assert extractor.extract([]) == []


def test_pieces_are_put_together_again():
    whole, cut = (Moments(MomentsParams(piece=piece), 16000, CPU) for piece in (0, 10))
    some = clips(20)
    features_of_whole = map(main_track, whole.extract(some))
    for features, other in zip(features_of_whole, cut.extract_rows(some), strict=True):
        assert torch.equal(features, other.features)
        assert len(other.side["counts"]) == (2 if len(features) >= 20 else 1)


# The main job


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"), "Shapes", module="row_extractors")


@pytest.fixture(scope="module")
def truth(corpus, config, tmp_path_factory):
    """One thread takes them in the manifest's order."""
    cache = tmp_path_factory.mktemp("truth")
    assert not extract(corpus.manifest(), config, cache, threads=1).failed
    return items(cache)


@pytest.mark.parametrize("batch_seconds", [1.0, 4.0, 120.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_batches_and_order_change_no_bit(
    corpus, config, truth, scratch, monkeypatch, batch_seconds, threads
):
    """If a worker's batch has few seconds of audio, rows of many are gathered, and queues
    fill up."""
    monkeypatch.setitem(device.BATCH_SECONDS, "cpu", batch_seconds)
    shuffled = corpus.rows[:]
    random.Random(threads).shuffle(shuffled)
    extract(
        corpus.manifest(shuffled, "shuffled.csv"),
        config,
        scratch,
        threads=threads,
        shard_megabytes=0.004,
    )
    assert items(scratch) == truth


@pytest.mark.parametrize("threads", [1, 3])
def test_row_workers_compute_all_rows_and_decode_nothing(
    corpus, config, truth, scratch, monkeypatch, threads
):
    """As on a GPU."""
    computed_by, decoded_by = set(), set()
    compute, decode = local.compute_rows, from_audio.decode_all

    def seen(by, function):
        return lambda *args: by.add(threading.current_thread().name) or function(*args)

    job = planned(corpus.manifest(), config, scratch, threads, row_workers=2)
    monkeypatch.setattr(local, "compute_rows", seen(computed_by, compute))
    monkeypatch.setattr(from_audio, "decode_all", seen(decoded_by, decode))
    run_to_its_end(job)
    assert items(scratch) == truth
    assert computed_by <= {"featcache_0", "featcache_1"}
    assert decoded_by <= {f"featcache_{2 + n}" for n in range(threads)}
    assert computed_by
    assert decoded_by


def test_row_workers_wait_for_rows_that_fill_their_batches(config, scratch, monkeypatch, tmp_path):
    """As on a GPU, where nearly all that is computed is to be wanted: the last batch of
    each length is filled up. What is computed is told, though nothing is appended for
    long."""
    soundfile.write(tmp_path / "a.wav", speech(20.0), 16000)
    lengths = np.random.default_rng(0).gamma(9, 0.03, 3000)
    rows = [
        f"{number},a.wav,{number % 60 / 4},{seconds:.3f}" for number, seconds in enumerate(lengths)
    ]
    (tmp_path / "many.csv").write_text("\n".join(["id,path,start,duration", *rows]))
    monkeypatch.setitem(device.BATCH_SECONDS, "cpu", 4.0)
    filled, computed, told, compute, append = [], [], [], local.compute_rows, Delivery.append

    def counted(rows):
        on = rows[0].pending.built.device
        filled.append(len(rows))
        computed.append(rows[0].pending.extractor.rows(rows[0].padded_length, on.torch_device))
        return compute(rows)

    def appended(delivery, batch):
        told.append((delivery.progress.computed_seconds, delivery._control))
        return append(delivery, batch)

    monkeypatch.setattr(local, "compute_rows", counted)
    monkeypatch.setattr(Delivery, "append", appended)
    summary = run_to_its_end(planned(tmp_path / "many.csv", config, scratch, row_workers=2))
    assert summary.audio_seconds == pytest.approx(np.round(lengths, 3).sum(), rel=1e-3)
    assert told[0][0] > 20
    assert told[0][1].progress.computed_seconds == summary.audio_seconds
    assert sum(filled) == 3000
    assert sum(filled) > 0.9 * sum(computed)


def test_a_queue_that_is_full_lets_nothing_wait_for_ever(
    corpus, config, truth, scratch, monkeypatch
):
    """Only one batch, of one utterance, may wait ahead, while rows wait for others of
    their length."""
    monkeypatch.setitem(device.BATCH_SECONDS, "cpu", 0.01)
    monkeypatch.setattr(local, "_AHEAD_PER_WORKER", 1)
    run_to_its_end(planned(corpus.manifest(), config, scratch))
    assert items(scratch) == truth


def test_side_arrays_follow_their_items(corpus, scratch, tmp_path):
    config = write_config(tmp_path, "Moments", module="row_extractors", piece=10)
    extract(corpus.manifest(), config, scratch, shard_megabytes=0.004)
    version = only_version(scratch)
    index = open_index(version)
    assert len(index.shards) > 3
    for name in index.shards:
        shard = version.shard(name)
        for number, frames in enumerate(np.diff(shard.table.offsets("frame"))):
            entries = shard.side("counts").item(number).tolist()
            assert entries == ([frames] if frames < 20 else [11, frames - 9])


# What goes wrong


def test_batches_that_do_not_fit_are_halved(corpus, scratch, tmp_path):
    job = planned(
        corpus.manifest(), write_config(tmp_path, "Small", module="row_extractors"), scratch
    )
    assert not run_to_its_end(job).failed
    sizes = [count for count, _ in job.versions[0].built.extractor.calls]
    too_large = [count for count in sizes if count > Small.limit]
    assert 1 <= len(too_large) <= 2 * 3  # of each thread, until 16 have become 2
    assert len(too_large) < len(sizes) / 2
    plain = write_config(tmp_path, "Moments", module="row_extractors")
    extract(corpus.manifest(), plain, tmp_path / "plain")
    assert items(scratch) == items(tmp_path / "plain")


def test_if_another_version_runs_out_of_memory_rows_are_still_computed_together(
    corpus, scratch, tmp_path, monkeypatch
):
    def one_by_one(built, waveforms):
        if len(waveforms) > 1:
            raise MemoryError
        return compute(built, waveforms)

    configs = [
        load_config(write_config(tmp_path, "Moments", module="row_extractors")),
        load_config("fbank80"),
    ]
    compute, calls = from_audio.compute_clips, []
    for cache in (scratch / "enough", scratch / "little"):
        job = plan_extraction(read_manifest(corpus.manifest()), configs, cache, Options(threads=1))
        assert not run_to_its_end(job).failed
        calls.append(job.versions[0].built.extractor.calls)
        monkeypatch.setattr(from_audio, "compute_clips", one_by_one)
    assert calls[0] == calls[1]


def test_each_library_has_its_own_words_for_memory_that_runs_out():
    for words in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
    ):
        assert is_out_of_memory(RuntimeError(words)), words
    assert not is_out_of_memory(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    assert not is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))


@pytest.mark.parametrize(
    "words", ["GET was unable to find an engine to execute", "CUDNN_STATUS_NOT_INITIALIZED"]
)
def test_what_may_be_too_little_memory_is_tried_with_less(words):
    """If that does not help, the error is what it says, and no clip is blamed."""
    extractor = Moments(MomentsParams(), 16000, CPU)

    def compute(count, alone):
        if count > least:
            raise RuntimeError(words)
        return count

    least = 2
    assert until_it_fits(compute, extractor, [16000], device.Device("cpu", 2)) == 2
    least = 0
    with pytest.raises(RuntimeError, match=words):
        until_it_fits(compute, extractor, [16000], device.Device("cpu", 2))


def test_a_clip_that_does_not_fit_at_all_is_a_failure(cli, corpus, scratch, tmp_path):
    config = write_config(tmp_path, "Tiny", module="row_extractors")
    cli("extract", corpus.manifest(), "-c", config, "-o", scratch).with_code(3)
    failed = {failure.id: failure.reason for failure in read_failures(only_version(scratch))}
    assert failed["plain-06"] == failed["mp3"] == "too_long"
    assert "plain-02" not in failed
    assert set(items(scratch)) | set(failed) == set(corpus.ids)


def test_clips_that_do_not_fit_leave_the_batches_of_others_as_large_as_they_are():
    extractor = Moments(MomentsParams(), 16000, CPU)
    before = extractor.rows(HOP, CPU)
    assert not extractor.shrink(1, 100 * 16000, CPU)
    assert extractor.rows(HOP, CPU) == before > 1


def test_a_clip_that_fits_only_alone_is_computed_alone(corpus, scratch, tmp_path):
    """If memory runs out because of another thread's batch, the clip does not fail."""
    config = write_config(tmp_path, "Crowded", module="row_extractors")
    summary = extract(corpus.manifest(), config, scratch, threads=4)
    plain = write_config(tmp_path, "Moments", module="row_extractors")
    assert summary.failed == extract(corpus.manifest(), plain, tmp_path / "plain").failed
    assert items(scratch) == items(tmp_path / "plain")


def test_who_is_alone_on_the_device_waits_for_the_others_and_they_for_it():
    shared = device.Device("cpu", 3)
    inside, alone, together = [], set(), set()

    def hold(number):
        is_alone = number % 4 == 0
        with shared.slot(is_alone):
            inside.append(number)
            (alone if is_alone else together).add(len(inside))
            time.sleep(0.002)
            (alone if is_alone else together).add(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(60)))
    assert alone == {1}
    assert max(together) <= shared.slots


def test_as_many_as_there_are_slots_are_on_the_device_together():
    shared = device.Device("cpu", 3)
    together = threading.Barrier(shared.slots)

    def hold(_):
        with shared.slot(False):
            # for the others, who are let in meanwhile: each gets another number
            return together.wait(MOST_SECONDS)

    with ThreadPoolExecutor(shared.slots) as pool:
        numbers = list(pool.map(hold, range(3 * shared.slots)))
    assert sorted(numbers) == sorted(3 * [*range(shared.slots)])


def test_too_few_frames_are_the_extractors_fault(corpus, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Moments, "num_frames", lambda extractor, num_samples: num_samples // HOP + 1
    )
    config = write_config(tmp_path, "Moments", module="row_extractors")
    with pytest.raises(
        ExtractorError, match=r"Moments \(.*\): encode returned a tensor .* its num_frames"
    ):
        extract(corpus.manifest(), config, scratch)


def test_what_was_whole_when_an_extractor_broke_stays(plain, scratch, tmp_path, monkeypatch):
    """It gives up in its third batch."""
    encode = Moments.encode

    def gives_up(extractor, *rows):
        if len(extractor.calls) == 2:
            raise ExtractorError("out of cheese")
        return encode(extractor, *rows)

    monkeypatch.setattr(Moments, "encode", gives_up)
    config = write_config(tmp_path, "Moments", module="row_extractors")
    with pytest.raises(ExtractorError, match="out of cheese"):
        extract(plain.manifest(), config, scratch, threads=1, shard_megabytes=0.0001)
    assert {problem.kind for problem in check(scratch).problems} == {"unfinished"}


def corpus_of(folder: Path, lengths: Iterable[float]) -> Corpus:
    corpus = Corpus(folder)
    for i, seconds in enumerate(lengths):
        corpus.record(str(i), f"{i}.wav", speech(seconds, seed=i))
    return corpus


def test_long_recordings_are_computed_piece_by_piece(scratch, tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path, (3, 4, 5))
    config = write_config(tmp_path, "Shapes", module="row_extractors", piece=20)
    extract(corpus.manifest(), config, scratch / "a")
    monkeypatch.setattr(from_audio, "SMALL_BYTES", 100_000)
    extract(corpus.manifest(), config, scratch / "b")
    assert items(scratch / "a") == items(scratch / "b")


def test_short_recordings_of_many_samples_wait_for_others(scratch, tmp_path, monkeypatch):
    """This holds however large a batch of them is, for example of stereo at 48 kHz."""
    corpus = corpus_of(tmp_path, [0.1] * 32)
    monkeypatch.setattr(from_audio, "SMALL_BYTES", 20_000)  # of three
    job = planned(
        corpus.manifest(), write_config(tmp_path, "Moments", module="row_extractors"), scratch
    )
    assert not run_to_its_end(job).failed
    assert len(job.versions[0].built.extractor.calls) == 2
