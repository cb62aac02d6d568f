"""A value depends on its clip alone: no bit of it changes with what surrounds the clip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache.config import load_config
from featcache.extractors import Clip
from featcache.extractors.frames import BLOCK_ROWS, SHORT_BLOCK_ROWS
from featcache.extractors.kaldi import Fbank, FbankParams, Mfcc, MfccParams
from featcache.extractors.log_mel import LogMel, LogMelParams
from featcache.testing import assert_same, extract

CPU = torch.device("cpu")

EXTRACTORS = {
    "fbank80": Fbank(load_config("fbank80").params, 16000, CPU),
    "fbank40-44.1k": Fbank(FbankParams(num_mel_bins=40, snip_edges=False), 44100, CPU),
    "fbank-dithered": Fbank(FbankParams(dither=1.0, use_energy=True), 8000, CPU),
    "fbank23": Fbank(FbankParams(num_mel_bins=23), 16000, CPU),
    "mfcc": Mfcc(MfccParams(), 16000, CPU),
    "whisper": LogMel(load_config("whisper-mel80").params, 16000, CPU),
    "hifigan": LogMel(load_config("hifigan-mel80").params, 22050, CPU),
}

every_extractor = pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS.keys())


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def clip(seed: int, num_samples: int) -> Clip:
    generator = torch.Generator().manual_seed(seed)
    return Clip(f"utt-{seed}", torch.randn(num_samples, generator=generator) * 10.0 ** -(seed % 5))


@every_extractor
@settings(max_examples=15, deadline=None)
@given(
    clips=st.lists(
        st.builds(clip, st.integers(0, 1000), st.integers(1300, 60_000)), min_size=1, max_size=8
    ),
    order=st.randoms(use_true_random=False),
    threads=st.sampled_from([1, 2]),
)
def test_alone_as_in_any_batch(extractor, clips, order, threads):
    torch.set_num_threads(1)
    pairs = [(clip, extract(extractor, [clip])[0]) for clip in clips]
    order.shuffle(pairs)
    shuffled, alone = zip(*pairs, strict=True)
    torch.set_num_threads(threads)
    assert_same(extract(extractor, shuffled), alone, shuffled, "in a batch")


@every_extractor
def test_every_row_of_a_block(extractor):
    """One clip, moved through the block frame by frame, among others and across the
    blocks' boundaries."""
    shift = round(extractor.spec.sample_rate / extractor.spec.frame_rate)
    short = clip(1, extractor.spec.frame_length + 4 * shift)
    alone = extractor.extract([short])[0]
    others = [clip(seed, short.waveform.numel() + shift * (seed % 3)) for seed in range(20)]
    batch = [*others, short] * (2 * BLOCK_ROWS["cpu"] // (len(others) * len(alone)) + 1)
    for found, batched in zip(extractor.extract(batch), batch, strict=True):
        if batched is short:
            assert torch.equal(found, alone)
    found = extractor.extract([short] * BLOCK_ROWS["cpu"])  # each starts at another row
    assert all(torch.equal(item, alone) for item in found)


@every_extractor
def test_short_blocks_are_taken_only_where_they_give_the_same_bits(extractor, monkeypatch):
    clips = [clip(seed, extractor.spec.frame_length + 1000 * seed) for seed in range(10)]
    compute, sizes = extractor.compute, set()

    def watched(block):
        sizes.add(len(block))
        return compute(block)

    def rounding_by_shape(block):
        sizes.add(len(block))
        return compute(block) + len(block) * 1e-3

    for function, may_be_short in ((watched, True), (rounding_by_shape, False)):
        monkeypatch.setattr(extractor, "compute", function)
        monkeypatch.delitem(vars(extractor), "_short_blocks_are_exact", raising=False)
        is_short = extractor._short_blocks_are_exact  # a question of the processor too
        assert may_be_short or not is_short
        sizes.clear()
        alone = [extract(extractor, [clip])[0] for clip in clips]
        assert sizes == {SHORT_BLOCK_ROWS if is_short else BLOCK_ROWS["cpu"]}
        monkeypatch.setitem(vars(extractor), "_short_blocks_are_exact", False)
        assert_same(
            [extract(extractor, [clip])[0] for clip in clips], alone, clips, "in longer blocks"
        )


@settings(max_examples=60, deadline=None)
@given(
    num_mel_bins=st.integers(3, 60),
    num_ceps=st.integers(1, 60),
    frame_length=st.integers(20, 40),
    threads=st.sampled_from([1, 2]),
)
def test_rows_are_the_same_whatever_the_shapes(num_mel_bins, num_ceps, frame_length, threads):
    """In a block of equal frames, all rows of features are equal."""
    torch.set_num_threads(threads)
    shapes = {"num_mel_bins": num_mel_bins, "frame_length": frame_length}
    for extractor in (
        Fbank(FbankParams(**shapes), 16000, CPU),
        Mfcc(MfccParams(**shapes, num_ceps=min(num_ceps, num_mel_bins)), 16000, CPU),
        LogMel(LogMelParams(num_mel_bins=num_mel_bins, n_fft=16 * frame_length), 16000, CPU),
    ):
        frame = clip(num_ceps, extractor.spec.frame_length).waveform
        features = extractor.compute(frame.repeat(BLOCK_ROWS["cpu"], 1))
        assert torch.equal(features, features[:1].expand_as(features))


@every_extractor
def test_neighbours_that_are_not_numbers(extractor):
    nan, infinite = (Clip("", torch.full((9000,), value)) for value in (float("nan"), float("inf")))
    good = clip(2, 9000)
    assert torch.equal(
        extractor.extract([nan, good, infinite, nan])[1], extractor.extract([good])[0]
    )
