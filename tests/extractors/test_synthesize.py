"""Features as sound: codes as the real model's decoder makes it, log mel spectrograms with
the same mel energies again."""

import math
from dataclasses import replace

import numpy as np
import pytest
import small_models
import torch
import transformers
from msgspec import structs

from featcache.config import config_from, load_config
from featcache.errors import ArgumentError, ConfigError, ExtractorError
from featcache.extractors import Clip
from featcache.extractors.dac import Dac
from featcache.extractors.encodec import Encodec
from featcache.extractors.griffin_lim import griffin_lim
from featcache.extractors.mimi import Mimi, PocketTTS
from featcache.extractors.snac import Snac
from featcache.extractors.speechtokenizer import SpeechTokenizer
from featcache.extractors.vibevoice import VibeVoice
from featcache.extractors.wavtokenizer import WavTokenizer
from featcache.extractors.xcodec import Higgs2, Xcodec
from featcache.extractors.xcodec2 import NeuCodec, Xcodec2
from featcache.media.look import synthesize
from featcache.spec import MAIN
from featcache.version.version import VersionInfo

CPU = torch.device("cpu")


def tracks_of(extractor, waveform):
    with torch.inference_mode():
        (tracks,) = extractor.extract([Clip("clip", waveform)])
    return tracks if isinstance(tracks, dict) else {MAIN: tracks}


@torch.inference_mode()
def heard(extractor, tracks):
    return extractor.synthesize({name: track.clone() for name, track in tracks.items()})


CODECS = {
    "encodec_24khz": (Encodec, transformers.EncodecModel, 24000),
    "dac_16khz": (Dac, transformers.DacModel, 16000),
    "mimi": (Mimi, transformers.MimiModel, 24000),
    "xcodec": (Xcodec, transformers.XcodecModel, 16000),
    "higgs2": (Higgs2, transformers.HiggsAudioV2TokenizerModel, 24000),
    "wavtokenizer_40hz": (WavTokenizer, transformers.WavTokenizerModel, 24000),
    "xcodec2": (Xcodec2, transformers.Xcodec2Model, 16000),
}


@pytest.mark.parametrize("name", CODECS)
def test_codes_are_decoded_as_the_model_decodes_them(saved, name):
    codec, model_class, rate = CODECS[name]
    folder = saved(name)
    most = 1 if name in ("wavtokenizer_40hz", "xcodec2") else 4
    extractor = codec(codec.Params(weights=str(folder), codebooks=most), rate, CPU)
    waveform = small_models.speech_like(0.7, rate)
    tracks = tracks_of(extractor, waveform)
    model = model_class.from_pretrained(folder).eval()
    codes_1QF = tracks[MAIN].long().mT[None]
    with torch.inference_mode():
        if name.startswith("encodec"):
            expected = model.decode(codes_1QF[None], [None]).audio_values
        else:
            expected = model.decode(audio_codes=codes_1QF).audio_values
    found = heard(extractor, tracks)
    assert found.ndim == 1
    # the decoder of DAC, with a stride of 5, returns 8 samples less than whole hops
    assert -8 <= len(found) - len(waveform) <= extractor.granularity
    torch.testing.assert_close(found, expected.flatten(), rtol=1e-4, atol=1e-5)
    assert found.std() > 0


@pytest.mark.parametrize(
    ("codec", "name", "rate"), [(Mimi, "mimi", 24000), (Dac, "dac_16khz", 16000)]
)
def test_latents_sound_like_their_codes(saved, codec, name, rate):
    folder = saved(name)
    waveform = small_models.speech_like(0.7, rate)
    sounds = []
    for output in ("codes", "latents"):
        params = codec.Params(weights=str(folder), codebooks=None, output=output)
        extractor = codec(params, rate, CPU)
        sounds.append(heard(extractor, tracks_of(extractor, waveform)))
    torch.testing.assert_close(*sounds)


LATENTS = {
    "pocket_tts": (PocketTTS, transformers.PocketTTSAudioTokenizerModel, "audio_values"),
    "vibevoice": (VibeVoice, transformers.VibeVoiceAcousticTokenizerModel, "audio"),
}


@pytest.mark.parametrize("name", LATENTS)
def test_latents_are_decoded_as_the_model_decodes_them(saved, name):
    maker, model_class, field = LATENTS[name]
    folder = saved(name)
    extractor = maker(maker.Params(weights=str(folder)), 24000, CPU)
    tracks = tracks_of(extractor, small_models.speech_like(0.7, 24000))
    model = model_class.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = getattr(model.decode(tracks[MAIN][None]), field)
    torch.testing.assert_close(heard(extractor, tracks), expected.flatten(), rtol=1e-4, atol=1e-5)


def test_the_sound_of_neucodec_has_the_rate_of_its_features(saved):
    folder = saved("neucodec")
    extractor = NeuCodec(NeuCodec.Params(weights=str(folder)), 16000, CPU)
    tracks = tracks_of(extractor, small_models.speech_like(1, 16000))
    found = heard(extractor, tracks)
    assert len(found) == 16000
    model = transformers.NeuCodecModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        at_24khz = model.decode(audio_codes=tracks[MAIN].long().mT[None]).audio_values.flatten()
    below = torch.fft.rfft(at_24khz)[:8000] / 24000
    torch.testing.assert_close(torch.fft.rfft(found)[:8000] / 16000, below, rtol=1e-3, atol=1e-6)


def test_snac_needs_all_of_its_codebooks(saved):
    pytest.importorskip("snac", exc_type=ImportError)
    folder = saved("snac_24khz")
    waveform = small_models.speech_like(0.7, 24000)
    extractor = Snac(Snac.Params(weights=str(folder)), 24000, CPU)
    found = heard(extractor, tracks_of(extractor, waveform))
    assert 0 <= len(found) - len(waveform) < extractor.granularity
    first = Snac(Snac.Params(weights=str(folder), codebooks=1), 24000, CPU)
    with pytest.raises(ExtractorError, match="only codes of all codebooks"):
        heard(first, tracks_of(first, waveform))


def test_codes_of_qwen_are_left_to_its_own_package(saved):
    folder = saved("qwen3_tts")
    extractor = Mimi(Mimi.Params(weights=str(folder)), 24000, CPU)
    with pytest.raises(ExtractorError, match="only its own package can decode them"):
        heard(extractor, tracks_of(extractor, small_models.speech_like(0.7, 24000)))


def test_chunks_of_stereo_encodec_are_those_that_the_model_joins(saved):
    folder = saved("encodec_48khz")
    extractor = Encodec(Encodec.Params(weights=str(folder)), 48000, CPU)
    waveform = small_models.speech_like(2.3, 48000)
    found = heard(extractor, tracks_of(extractor, waveform))
    model = transformers.EncodecModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        stereo = waveform[None, None].expand(1, 2, -1)
        encoded = model.encode(stereo, bandwidth=24.0)
        pad = getattr(encoded, "last_frame_pad_length", 0) or 0
        decoded = model.decode(
            encoded.audio_codes, encoded.audio_scales, last_frame_pad_length=pad
        ).audio_values
    torch.testing.assert_close(found, decoded[0].mean(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "params", "most"),
    [
        ("fbank80", {}, 0.2),
        ("fbank80", {"use_energy": True, "snip_edges": False, "use_power": False}, 0.2),
        ("fbank80", {"use_log_fbank": False, "htk_compat": True, "use_energy": True}, None),
        ("fbank80-lhotse", {}, 0.2),
        ("whisper-mel80", {}, 0.2),
        ("hifigan-mel80", {}, 0.2),
    ],
)
def test_sound_of_mels_has_their_energies_at_their_times(name, params, most):
    """Where it is loud, within `most` nepers of power. The sound begins where the clip does,
    and is as loud."""
    resolved = load_config(name).resolved()
    config = config_from(resolved | {"params": {**resolved["params"], **params}})
    extractor = config.build(CPU)
    rate = config.audio.sample_rate
    waveform = small_models.speech_like(2, rate) * 0.5
    tracks = tracks_of(extractor, waveform)
    found = heard(extractor, tracks)
    hop = round(rate / extractor.spec.frame_rate)
    assert abs(len(found) - len(waveform)) <= 1100
    found = torch.nn.functional.pad(found, (0, max(0, len(waveform) - len(found))))[: len(waveform)]
    loudness = found.square().mean().sqrt() / waveform.square().mean().sqrt()
    assert 0.85 < loudness < 1.15
    envelopes = [x.square().unfold(0, 4 * hop, hop).mean(1).log1p() for x in (found, waveform)]
    assert torch.corrcoef(torch.stack(envelopes))[0, 1] > 0.95
    if most is not None:
        scale = math.log(10) * 4 if "whisper" in name else 1 + ("hifigan" in name)
        again = tracks_of(extractor, found.contiguous())[MAIN]
        values = tracks[MAIN] * scale
        is_loud = values > values.max() - 9
        assert (again * scale - values)[is_loud].abs().mean() < most


def test_a_tone_keeps_its_pitch():
    rate = 16000
    extractor = load_config("fbank80").build(CPU)
    tone = 0.3 * torch.sin(2 * math.pi * 1000 * torch.arange(rate) / rate)
    found = heard(extractor, tracks_of(extractor, tone))
    spectrum = torch.fft.rfft(found[:rate]).abs()
    assert abs(int(spectrum.argmax()) * rate / rate - 1000) < 60  # a filter's width


def test_griffin_lim_finds_consistent_spectra_again():
    """Of real spectra, the magnitudes of what it finds are theirs to some percent."""
    waveform, window = small_models.speech_like(1, 16000), torch.hann_window(400)
    spectra = torch.fft.rfft(waveform.unfold(0, 400, 100) * window, n=512).abs()
    found = griffin_lim(spectra, window, 100, 512)
    again = torch.fft.rfft(found.unfold(0, 400, 100) * window, n=512).abs()
    assert (again - spectra).norm() / spectra.norm() < 0.1


def test_what_nobody_hears_is_refused():
    extractor = load_config("mfcc13").build(CPU)
    tracks = tracks_of(extractor, small_models.speech_like(1, 16000))
    with pytest.raises(ExtractorError, match=r"cepstrum.*: cannot be turned into sound$"):
        extractor.synthesize(tracks)


def test_speechtokenizer_decodes_by_its_own_package(saved):
    folder = saved("speechtokenizer")
    extractor = SpeechTokenizer(SpeechTokenizer.Params(weights=str(folder)), 16000, CPU)
    waveform = small_models.speech_like(0.6, 16000)
    found = heard(extractor, tracks_of(extractor, waveform))
    assert len(waveform) <= len(found) <= len(waveform) + 320
    assert found.std() > 0


def test_a_version_is_heard_by_its_own_extractor_alone(saved):
    """What does not belong to the extractor is refused before anything is computed."""
    folder = saved("encodec_24khz")
    params = {"weights": str(folder), "codebooks": 2}
    config = config_from(
        {"name": "codes", "extractor": "encodec", "params": params, "audio": {"sample_rate": 24000}}
    )
    spec = config.build(CPU).spec
    info = VersionInfo(
        name="codes",
        fingerprint=config.fingerprint(),
        config=config.resolved(),
        spec=spec,
        made_by={},
    )
    codes = np.ones((9, 2), np.uint16)
    assert len(synthesize(info, {MAIN: codes})) == 9 * 320
    with pytest.raises(ArgumentError, match="codes: these are no features of its extractor"):
        synthesize(info, {MAIN: codes * 1024})
    with pytest.raises(ArgumentError, match="codes: no frames cannot be turned into sound"):
        synthesize(info, {MAIN: codes[:0]})
    other = structs.replace(info, fingerprint="0" * 64)
    with pytest.raises(ConfigError, match="weights are not the same here as where it was made"):
        synthesize(other, {MAIN: codes})
    wider = structs.replace(info, spec=replace(spec, item_shape=(3,), codebook_sizes=(1024,) * 3))
    with pytest.raises(ArgumentError, match="these are no features of its extractor"):
        synthesize(wider, {MAIN: np.ones((9, 3), np.uint16)})
