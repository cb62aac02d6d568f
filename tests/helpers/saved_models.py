"""Small models of the real classes, saved as `save_pretrained` does, and what is done
with their folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EncodecConfig, EncodecModel, HubertConfig, HubertForCTC, HubertModel

from featcache import weights
from featcache.errors import ConfigError

CPU = torch.device("cpu")
COMMIT = "c1dbe2ae3f1de713481a3b3e7c47f357092ee040"
PREPROCESSOR = {
    "feature_extractor_type": "Wav2Vec2FeatureExtractor",
    "do_normalize": True,
    "sampling_rate": 16000,
}


def encodec_model():
    sizes = {"num_filters": 4, "hidden_size": 8, "codebook_size": 16, "num_lstm_layers": 1}
    return EncodecModel(EncodecConfig(**sizes, target_bandwidths=[1.5, 3.0])).eval()


def hubert_model(model_class=HubertModel):
    convolutions = {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    layers = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return model_class(HubertConfig(vocab_size=8, **convolutions, **positions, **layers)).eval()


def save_models(folder):
    """Folders as `save_pretrained` makes them: encodec, hubert, ctc."""
    torch.manual_seed(0)
    models = {
        "encodec": encodec_model(),
        "hubert": hubert_model(),
        "ctc": hubert_model(HubertForCTC),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def located(folder):
    return weights.locate(str(folder), None)


def digest(folder):
    return weights.digest(located(folder))


def fault(call, *arguments):
    """What is said of weights that are refused: one line, which begins with the parameter."""
    with pytest.raises(ConfigError) as raised:
        call(*arguments)
    message = str(raised.value)
    assert message.startswith("params.")
    assert "\n" not in message
    return message


def load_fault(model_class, folder):
    return fault(weights.load, model_class, located(folder), CPU)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
