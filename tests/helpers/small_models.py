"""Small models of the real classes, at the real strides, rates and numbers of codebooks,
with few channels.

Each function builds one, deterministically, saves it into a folder as its makers publish
theirs, and returns the folder.

Codebooks are filled with what their own inputs look like on `speech_like` audio: as
transformers initialises most of them, they are zero, so every code would be 0 and every
comparison of codes would pass. The encoder's biases are zeroed for the same reason: they
would outweigh the signal."""

import json
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn


def speech_like(seconds: float, rate: int, seed: int = 0) -> torch.Tensor:
    """Something like speech, float32 `[num_samples]`: voiced and unvoiced syllables with
    formants, and pauses."""
    rng = np.random.default_rng(seed)
    num_samples = round(seconds * rate)
    pieces, total = [], 0
    while total < num_samples:
        at = np.arange(int(rng.uniform(0.06, 0.3) * rate)) / rate
        glide = at * at / at[-1] / 2
        pitch = rng.uniform(80, 250) * at + rng.uniform(-60, 60) * glide
        formants = [
            rng.uniform(250, 900) + rng.uniform(-200, 200) * at,
            rng.uniform(900, 3000) + 0 * at,
        ]
        voiced = sum(
            np.sin(2 * np.pi * k * pitch)
            * sum(np.exp(-(((k * 150 - f) / 300) ** 2)) for f in formants)
            for k in range(1, 20)
        )
        noise = rng.standard_normal(len(at)) * rng.uniform(0.02, 1)
        syllable = rng.choice([0.02, 1.0], p=[0.2, 0.8]) * voiced + rng.choice([0.05, 0.5]) * noise
        pieces.append(syllable * np.sin(np.pi * at / at[-1]) * 10 ** rng.uniform(-1.5, -0.5))
        if rng.random() < 0.2:
            pieces.append(1e-4 * rng.standard_normal(int(rng.uniform(0.02, 0.2) * rate)))
        total += sum(map(len, pieces[-2:]))
    waveform = np.concatenate(pieces)
    return torch.from_numpy(np.resize(waveform, num_samples).astype(np.float32)).clamp_(-1, 1)


def encodec_24khz(folder: Path) -> Path:
    """As facebook/encodec_24khz: causal, weight norm; 32 codebooks at 75 Hz."""
    return save_encodec(transformers.EncodecConfig(num_filters=4, hidden_size=24), folder)


def encodec_48khz(folder: Path) -> Path:
    """As facebook/encodec_48khz: stereo, not causal, group norm over time; each second by
    itself, normalised."""
    stereo = {
        "audio_channels": 2,
        "sampling_rate": 48000,
        "target_bandwidths": [3.0, 6.0, 12.0, 24.0],
    }
    layers = {"use_causal_conv": False, "norm_type": "time_group_norm"}
    chunks = {"chunk_length_s": 1.0, "overlap": 0.01, "normalize": True}
    return save_encodec(
        transformers.EncodecConfig(num_filters=4, hidden_size=24, **stereo, **layers, **chunks),
        folder,
    )


@torch.no_grad()
def save_encodec(config, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.EncodecModel(config).eval()
    _zero_biases(model.encoder)
    waveform = (
        speech_like(6, config.sampling_rate).view(6, 1, -1).expand(-1, config.audio_channels, -1)
    )
    latents = model.encoder(waveform / (waveform.std() if config.normalize else 1))
    _fill(latents, model.quantizer.layers, lambda layer: layer.codebook.embed)
    model.save_pretrained(folder)
    return folder


def _dac(folder: Path, **options) -> Path:
    return save_dac(
        transformers.DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, **options), folder
    )


DAC_16KHZ = {"sampling_rate": 16000, "downsampling_ratios": [2, 4, 5, 8], "n_codebooks": 12}
dac_16khz = partial(_dac, **DAC_16KHZ)
"""As descript/dac_16khz: 12 codebooks at 50 Hz."""
dac_24khz = partial(_dac, sampling_rate=24000, downsampling_ratios=[2, 4, 5, 8], n_codebooks=32)
"""As descript/dac_24khz: 32 codebooks at 75 Hz."""
dac_44khz = partial(_dac, sampling_rate=44100, downsampling_ratios=[2, 4, 8, 8], n_codebooks=9)
"""As descript/dac_44khz: 9 codebooks at 86 Hz."""


@torch.no_grad()
def save_dac(config, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.DacModel(config).eval()
    _spread(model.encoder)
    _spread(model.quantizer)
    seconds = config.hop_length * 450 // config.sampling_rate
    latents = model.encoder(speech_like(seconds, config.sampling_rate)[None, None])
    _fill_dac(latents, model.quantizer.quantizers)
    model.save_pretrained(folder)
    extractor = transformers.DacFeatureExtractor(
        sampling_rate=config.sampling_rate, hop_length=config.hop_length
    )
    extractor.save_pretrained(folder)
    return folder


def mimi(folder: Path) -> Path:
    """As kyutai/mimi: causal, a transformer with a sliding window behind the encoder; 32
    codebooks at 12.5 Hz."""
    encoder = {"num_filters": 4, "hidden_size": 32, "upsample_groups": 32}
    quantizer = {"codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
    attention = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "layer_scale_initial_scale": 1.0,
    }
    transformer = {"num_hidden_layers": 2, "intermediate_size": 64, **attention}
    return save_mimi(transformers.MimiConfig(**encoder, **quantizer, **transformer), folder)


@torch.no_grad()
def save_mimi(config, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.MimiModel(config).eval()
    _zero_biases(model.encoder)
    latents = _latents(model, speech_like(30, config.sampling_rate))
    split = model.quantizer
    for part in (
        split.semantic_residual_vector_quantizer,
        split.acoustic_residual_vector_quantizer,
    ):
        nn.init.kaiming_normal_(part.input_proj.weight, nonlinearity="linear")
        _fill(part.input_proj(latents), part.layers, lambda layer: layer.codebook.embed_sum)
    model.save_pretrained(folder)
    return folder


def _wavtokenizer(folder: Path, **options) -> Path:
    decoder = {"decoder_hidden_size": 32, "decoder_intermediate_size": 32, "decoder_num_layers": 1}
    encoder = {"num_filters": 4, "hidden_size": 24, "codebook_dim": 24}
    config = transformers.WavTokenizerConfig(**encoder, **decoder, **options)
    torch.manual_seed(0)
    model = transformers.WavTokenizerModel(config).eval()
    part = model.encoder_model
    _zero_biases(part.encoder)
    latents = part.encoder(speech_like(9, config.sampling_rate)[None, None])
    _fill(latents, [part.quantizer], lambda layer: layer.codebook.embed)
    model.save_pretrained(folder)
    transformers.WavTokenizerFeatureExtractor().save_pretrained(folder)
    return folder


wavtokenizer_40hz = torch.no_grad()(_wavtokenizer)
"""As swiss-ai/wavtokenizer-large-unify-40token: 40 Hz, 4,096 codes."""
wavtokenizer_75hz = torch.no_grad()(partial(_wavtokenizer, upsampling_ratios=[8, 5, 4, 2]))
"""As swiss-ai/wavtokenizer-large-speech-75token-v2: 75 Hz."""


@torch.no_grad()
def qwen3_tts(folder: Path) -> Path:
    """As Qwen/Qwen3-TTS-Tokenizer-12Hz: a Mimi's encoder and another decoder, without
    Mimi's; 16 codebooks of 32 have a use."""
    mimi(folder)
    tensors = {
        f"encoder.{name}": tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith(("decoder", "upsample"))
    }
    tensors["decoder.pre_conv.conv.weight"] = torch.randn(8, 4, 3)
    save_file(tensors, folder / "model.safetensors")
    settings = {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "encoder_config": json.loads((folder / "config.json").read_text()),
        "decoder_config": {"codebook_size": 2048},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@torch.no_grad()
def pocket_tts(folder: Path) -> Path:
    """As eustlb/pocket-tts-audio-tokenizer: Mimi's encoder without a quantiser; 12.5 Hz."""
    encoder = {"num_filters": 4, "hidden_size": 32, "upsample_groups": 32}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 20}
    config = transformers.PocketTTSAudioTokenizerConfig(
        **encoder, **attention, intermediate_size=64, layer_scale_initial_scale=1.0
    )
    torch.manual_seed(0)
    model = transformers.PocketTTSAudioTokenizerModel(config).eval()
    for name, parameter in model.encoder.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def vibevoice(folder: Path) -> Path:
    """As microsoft/VibeVoice-AcousticTokenizer, with fewer layers: 7.5 Hz. As transformers
    initialises its layer scales, 1e-6, most convolutions would do nothing."""
    config = transformers.VibeVoiceAcousticTokenizerConfig(
        num_filters=2, hidden_size=16, depths=(1, 1, 1, 1, 1, 1, 2)
    )
    torch.manual_seed(0)
    model = transformers.VibeVoiceAcousticTokenizerModel(config).eval()
    for name, parameter in model.encoder.named_parameters():
        if name.endswith("gamma"):
            nn.init.normal_(parameter, 0.5, 0.2)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        elif parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="linear")
    model.save_pretrained(folder)
    transformers.VibeVoiceAcousticTokenizerFeatureExtractor().save_pretrained(folder)
    return folder


@torch.no_grad()
def xcodec(folder: Path) -> Path:
    """As hf-audio/xcodec-hubert-librispeech: DAC's encoder beside a HuBERT with group
    norm; 8 codebooks at 50 Hz."""
    sizes = {
        "encoder_hidden_size": 4,
        "decoder_hidden_size": 32,
        "hidden_size": 16,
        "codebook_dim": 4,
    }
    ratios = {"downsampling_ratios": [8, 5, 4, 2], "upsampling_ratios": [8, 5, 4, 2]}
    convolutions = {
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    transformer = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.XcodecConfig(
        acoustic_model_config={"model_type": "dac", **sizes, **ratios},
        semantic_model_config={"model_type": "hubert", **convolutions, **transformer},
    )
    torch.manual_seed(0)
    model = transformers.XcodecModel(config).eval()
    for part in (model.acoustic_encoder, model.semantic_model, model.encoder_semantic, model.fc):
        _spread(part)
    latents = _latents(model, speech_like(9, config.sample_rate))
    _fill(latents, model.quantizer.quantizers, lambda layer: layer.codebook.embed)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def speechtokenizer(folder: Path) -> Path:
    """As fnlp/SpeechTokenizer's speechtokenizer_hubert_avg: its two files; 8 codebooks at
    50 Hz."""
    # of its dependencies, as they are imported
    with warnings.catch_warnings(action="ignore"):
        from speechtokenizer.model import SpeechTokenizer

    config = {
        "sample_rate": 16000,
        "n_q": 8,
        "codebook_size": 1024,
        "dimension": 32,
        "semantic_dimension": 24,
    }
    config |= {
        "n_filters": 4,
        "strides": [8, 5, 4, 2],
        "activation": "ELU",
        "lstm_layers": 2,
        "bidirectional": True,
    }
    config |= {"n_residual_layers": 1, "residual_kernel_size": 3, "dilation_base": 2}
    torch.manual_seed(0)
    # torch's old weight norm
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = SpeechTokenizer(config).eval()
    _zero_biases(model.encoder)
    latents = model.encoder(speech_like(9, 16000)[None, None])
    _fill(latents, model.quantizer.vq.layers, lambda layer: layer._codebook.embed)
    for layer in model.quantizer.vq.layers:
        layer._codebook.inited.fill_(1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), folder / "SpeechTokenizer.pt")
    return folder


@torch.no_grad()
def higgs2(folder: Path) -> Path:
    """As bosonai/higgs-audio-v2-tokenizer: X-Codec's encoders at 24 kHz, 8 codebooks at
    25 Hz, each with projections."""
    acoustic = {
        "encoder_hidden_size": 2,
        "decoder_hidden_size": 64,
        "hidden_size": 16,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "upsampling_ratios": [8, 5, 4, 2, 3],
    }
    semantic = {
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = transformers.HiggsAudioV2TokenizerConfig(
        acoustic_model_config={"model_type": "dac", **acoustic},
        semantic_model_config={"model_type": "hubert", **semantic},
        target_bandwidths=[0.5, 1, 1.5, 2],
        codebook_dim=16,
    )
    torch.manual_seed(0)
    model = transformers.HiggsAudioV2TokenizerModel(config).eval()
    for part in (model.acoustic_encoder, model.semantic_model, model.encoder_semantic, model.fc):
        _spread(part)
    residual = _latents(model, speech_like(19.2, 24000))
    for layer in model.quantizer.quantizers:
        projected = layer.project_in(residual.mT).flatten(0, 1)
        # inverse as far as it goes, so that each codebook leaves less
        layer.project_out.weight.copy_(torch.linalg.pinv(layer.project_in.weight))
        layer.project_out.bias.zero_()
        layer.codebook.embed.copy_(_like(projected, config.codebook_size))
        codes = layer.encode(residual)
        _assert_spread(codes)
        residual = residual - layer.decode(codes)
    model.save_pretrained(folder)
    transformers.DacFeatureExtractor(sampling_rate=24000, hop_length=960).save_pretrained(folder)
    return folder


def _fsq(name: str, folder: Path) -> Path:
    transformer = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = getattr(transformers, f"{name}Config")(
        encoder_hidden_size=2,
        **transformer,
        num_key_value_heads=2,
        head_dim=16,
        quantization_dim=64,
        semantic_model_config={
            "model_type": "wav2vec2-bert",
            "output_hidden_size": 32,
            **transformer,
        },
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    for part in (model.acoustic_encoder, model.semantic_adapter, model.fc_encoder):
        _spread(part)
    for activation in model.acoustic_encoder.modules():
        if type(activation).__name__ == "Xcodec2SnakeBeta" or hasattr(activation, "beta"):
            nn.init.uniform_(activation.alpha, -0.5, 1)
            nn.init.uniform_(activation.beta, -0.5, 1)
    prepare = getattr(transformers, f"{name}FeatureExtractor")()
    inputs = prepare(speech_like(9, 16000).numpy(), sampling_rate=16000, return_tensors="pt")
    semantic = model.semantic_encoder(inputs["input_features"]).last_hidden_state.mT
    semantic = model.semantic_adapter(semantic)
    # both must matter
    model.semantic_adapter.conv4.weight /= semantic.std()
    acoustic = model.acoustic_encoder(inputs["input_values"])
    model.acoustic_encoder.conv2.weight /= acoustic.std()
    project = model.quantizer.project_in
    found: list[torch.Tensor] = []
    handle = project.register_forward_hook(lambda _, __, output: found.append(output[0]))
    model.encode(**inputs)
    handle.remove()
    project.weight *= 1.2 / found[0].std(0)[:, None]
    project.bias.copy_((project.bias - found[0].mean(0)) * 1.2 / found[0].std(0))
    _assert_spread(model.encode(**inputs).audio_codes)
    model.save_pretrained(folder)
    prepare.save_pretrained(folder)
    return folder


xcodec2 = torch.no_grad()(partial(_fsq, "Xcodec2"))
"""As HKUSTAudio/xcodec2-hf: w2v-BERT beside DAC's encoder with anti-aliased activations; one
codebook of 65,536 at 50 Hz."""
neucodec = torch.no_grad()(partial(_fsq, "NeuCodec"))
"""As neuphonic/neucodec: the same, with other padding."""


def _snac(folder: Path, **options) -> Path:
    from snac import SNAC

    config = {
        "encoder_dim": 4,
        "decoder_dim": 32,
        "codebook_size": 4096,
        "codebook_dim": 8,
        **options,
    }
    torch.manual_seed(0)
    model = SNAC(**config).eval()
    _zero_biases(model.encoder)
    seconds = 200 * model.hop_length * model.vq_strides[0] / model.sampling_rate
    waveform = model.preprocess(speech_like(seconds, model.sampling_rate)[None, None])
    last = model.encoder.block[-1].parametrizations.weight.original0
    last /= model.encoder(waveform).std()  # or codewords, which are normalised, are all alike
    _zero_biases(model.quantizer)
    residual = model.encoder(waveform)
    for layer in model.quantizer.quantizers:
        stride = layer.stride
        projected = layer.in_proj(nn.functional.avg_pool1d(residual, stride, stride))
        layer.codebook.weight.copy_(_like(projected.mT.flatten(0, 1), 4096))
        decoded, codes = layer(residual)
        _assert_spread(codes)
        residual = residual - decoded
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


SNAC_24KHZ = {
    "sampling_rate": 24000,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "vq_strides": [4, 2, 1],
}
snac_24khz = torch.no_grad()(partial(_snac, **SNAC_24KHZ))
"""As hubertsiuzdak/snac_24khz: 3 codebooks, at 12, 23 and 47 Hz."""
SNAC_44KHZ = {
    "sampling_rate": 44100,
    "decoder_dim": 64,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": 32,
    "vq_strides": [8, 4, 2, 1],
}
snac_44khz = torch.no_grad()(partial(_snac, **SNAC_44KHZ))
"""As hubertsiuzdak/snac_44khz: 4 codebooks, and attention within windows of 32 frames."""


def _latents(model: nn.Module, waveform: torch.Tensor) -> torch.Tensor:
    """What a model's quantizer gets, `[1, D, F]`, for a waveform `[num_samples]`."""
    found: list[torch.Tensor] = []
    model.quantizer.encode = lambda latents, *_: found.append(latents) or latents[None]
    model.encode(waveform[None, None])
    del model.quantizer.encode
    return found[0]


def _zero_biases(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if "bias" in name.rpartition(".")[2]:
            parameter.zero_()


def _spread(model: nn.Module) -> None:
    """Weights that keep a signal's size, where the real class begins with some that
    shrink it to nothing."""
    _zero_biases(model)
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Linear) and not nn.utils.parametrize.is_parametrized(
            module
        ):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")


def _fill(latents: torch.Tensor, layers: Iterable[nn.Module], codebook) -> None:
    """Fill the codebooks of a residual quantizer of latents `[R, D, F]`, one after the
    other."""
    for layer in layers:
        codebook(layer).copy_(_like(latents.mT.flatten(0, 1), len(codebook(layer))))
        codes = layer.encode(latents)
        _assert_spread(codes)
        latents = latents - layer.decode(codes)


def _fill_dac(latents: torch.Tensor, layers: Iterable[nn.Module]) -> None:
    """The same for DAC's, which look up projections of the latents."""
    for layer in layers:
        projected = layer.in_proj(latents)
        layer.codebook.weight.copy_(_like(projected.mT.flatten(0, 1), len(layer.codebook.weight)))
        quantized, _, _, codes, _ = layer(latents)
        _assert_spread(codes)
        latents = latents - quantized


def _like(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Random vectors `[count, D]` with the mean and covariance of those given, `[N, D]`."""
    mean = vectors.mean(0)
    return mean + torch.randn(count, len(vectors)) @ (vectors - mean) / len(vectors) ** 0.5


def _assert_spread(codes: torch.Tensor) -> None:
    distinct = len(codes.unique())
    assert distinct >= 100, f"only {distinct} codes occur in {codes.numel()} frames"
