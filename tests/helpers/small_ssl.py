"""Small SSL models of the real classes, with weights drawn at random, saved as their
authors save them.

They have the convolutions' strides and kernels of the real ones, so frames are counted as
there, and as there channels are multiples of 32 (see `wav2vec2._VECTOR`). Biases and
norms, which start as 0 and 1, are drawn too: otherwise much of what could be wrong would
not show."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

LAYERS = 3
SIZE = 32
LAYER = {"hidden_size": SIZE, "num_attention_heads": 4, "intermediate_size": 64}

WAVEFORM_MODELS = {
    "hubert": ("Hubert", {}),  # group norm, as the base models
    "hubert-large": (
        "Hubert",
        {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True},
    ),
    "hubert-batch-norm": ("Hubert", {"conv_pos_batch_norm": True}),
    "wav2vec2": ("Wav2Vec2", {}),
    "wav2vec2-large": (
        "Wav2Vec2",
        {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True},
    ),
    "data2vec": ("Data2VecAudio", {"num_conv_pos_embeddings": 3, "conv_pos_kernel_size": 8}),
    "unispeech-sat": ("UniSpeechSat", {}),
    "unispeech-sat-large": (
        "UniSpeechSat",
        {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True},
    ),
    "conformer-rotary": (
        "Wav2Vec2Conformer",
        {"position_embeddings_type": "rotary", "conv_depthwise_kernel_size": 7},
    ),
    "conformer-relative": (
        "Wav2Vec2Conformer",
        {"position_embeddings_type": "relative", "conv_depthwise_kernel_size": 7},
    ),
    "wavlm": ("WavLM", {"num_buckets": 32, "max_bucket_distance": 80}),
    "wavlm-large": ("WavLM", {"feat_extract_norm": "layer", "do_stable_layer_norm": True}),
}
"""Name -> prefix of transformers' classes, and what differs from a base model."""

OTHER_MODELS = ("w2v-bert", "w2v-bert-rotary", "w2v-bert-relative", "whisper", "parakeet")


def save(name: str, folder: Path, do_normalize: bool = True, layers: int = LAYERS) -> Path:
    """Save one of the models, and its feature extractor, into a folder; the folder again."""
    torch.manual_seed(0)
    if name == "whisper":
        return _save_whisper(folder)
    if name.startswith("parakeet"):
        return _save_parakeet(folder, name.removeprefix("parakeet"))
    if name.startswith("w2v-bert"):
        return _save_w2v_bert(
            folder, name.removeprefix("w2v-bert").removeprefix("-") or "relative_key"
        )
    prefix, options = WAVEFORM_MODELS[name]
    convolutions = {
        "conv_dim": [32] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    make_config = getattr(transformers, f"{prefix}Config")
    config = make_config(num_hidden_layers=layers, **(LAYER | convolutions | options))
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=do_normalize)
    return _save(getattr(transformers, f"{prefix}Model")(config), extractor, folder)


def _save_w2v_bert(folder: Path, positions: str) -> Path:
    layers = {
        "num_hidden_layers": LAYERS,
        "conv_depthwise_kernel_size": 7,
        "position_embeddings_type": positions,
    }
    config = transformers.Wav2Vec2BertConfig(**LAYER, **layers)
    # as facebook/w2v-bert-2.0
    extractor = transformers.SeamlessM4TFeatureExtractor(padding_value=1)
    return _save(transformers.Wav2Vec2BertModel(config), extractor, folder)


def _save_parakeet(folder: Path, head: str) -> Path:
    """The encoder alone, or with the head for CTC (`-ctc`)."""
    layers = {"num_hidden_layers": LAYERS, "subsampling_conv_channels": 8, **LAYER}
    model = transformers.ParakeetEncoder(transformers.ParakeetEncoderConfig(**layers))
    if head:
        config = transformers.ParakeetCTCConfig(
            encoder_config=model.config.to_dict(), vocab_size=20, pad_token_id=19
        )
        model = transformers.ParakeetForCTC(config)
    return _save(model, transformers.ParakeetFeatureExtractor(), folder)


def _save_whisper(folder: Path) -> Path:
    """It takes 2 s, not 30."""
    encoder = {"encoder_layers": LAYERS, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    tokens = {
        "pad_token_id": 50,
        "bos_token_id": 51,
        "eos_token_id": 52,
        "decoder_start_token_id": 53,
    }
    tokens |= {"vocab_size": 60, "suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(
        d_model=SIZE, max_source_positions=100, **encoder, **decoder, **tokens
    )
    return _save(
        transformers.WhisperModel(config),
        transformers.WhisperFeatureExtractor(chunk_length=2),
        folder,
    )


def torchaudio_bundle(name: str) -> Any:
    """A bundle of `torchaudio.pipelines`, with few channels."""
    from torchaudio import pipelines

    real = getattr(pipelines, name)
    small = {
        "extractor_conv_layer_config": [(32, 10, 5), *[(32, 3, 2)] * 4, *[(32, 2, 2)] * 2],
        "encoder_embed_dim": SIZE,
        "encoder_pos_conv_kernel": 16,
        "encoder_pos_conv_groups": 4,
        "encoder_num_layers": LAYERS,
        "encoder_num_heads": 4,
        "encoder_ff_interm_features": 64,
    }
    return replace(real, _path=f"{name}.pth", _params=real._params | small)


def save_torchaudio(model: nn.Module, file: Path) -> Path:
    """Save a torchaudio model's state dict, with weights drawn anew; the file again."""
    draw(model)
    torch.save(model.state_dict(), file)
    return file


def draw(model: nn.Module) -> None:
    """Move all parameters away from where they start."""
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 * float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale or 0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_(generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)


def _save(
    model: transformers.PreTrainedModel,
    extractor: transformers.FeatureExtractionMixin,
    folder: Path,
) -> Path:
    draw(model)
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
    return folder
