"""Share between the steps of `day.py`: their options, their results, a clock for a
device, and models at their full size.

A step is a script of its own, so that it can be killed; it can be run by hand, too:

    python scripts/gpu/codes.py --device cuda --out codes.jsonl --seconds 240
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path += [
    str(ROOT / folder) for folder in ("", "scripts/bench", "scripts/stories", "tests/helpers")
]

import small_models  # noqa: E402
import small_ssl  # noqa: E402
from harness import KEPT, median, options  # noqa: E402

from featcache.config import Config, config_from  # noqa: E402
from featcache.device import Device  # noqa: E402


@dataclass
class Step:
    """A step as it runs.

    Args:
        device: The device, with torch configured as in a run.
        out: The file of the results, a JSON object a line.
        work: A folder for models and corpora, which later steps find there.
        seconds: When the step is killed, counted from its start.
        small: Whether everything is to be small: to see that the script works, and
            nothing else.
        started: When the step began, by `perf_counter`.
    """

    device: Device
    out: Path
    work: Path
    seconds: float
    small: bool
    started: float

    def record(self, what: str, **figures: Any) -> None:
        """Keep a result. Those of one kind, with the same figures, become a table of the
        report."""
        rounded = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in figures.items()
        }
        line = json.dumps({"what": what, **rounded})
        with self.out.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def attempt(self, what: str, function: Callable[[], object], **which: Any) -> None:
        """Call a function; what it raises is a result too, and ends nothing else."""
        try:
            function()
        except Exception as error:  # noqa: BLE001 - a day has one try
            message = str(error).strip().partition("\n")[0]
            self.record(
                f"{what}: failed", **which, error=f"{type(error).__name__}: {message}"[:300]
            )

    @property
    def left(self) -> float:
        """Seconds until the step is killed."""
        return self.seconds - (perf_counter() - self.started)

    def wait(self) -> None:
        if self.device.is_cuda:
            torch.cuda.synchronize(self.device.torch_device)

    def time(self, function: Callable[[], object], at_most: float = 2.0, rounds: int = 20) -> float:
        """Seconds of a call, after one that is not counted: the median of some rounds."""
        function()
        self.wait()
        taken: list[float] = []
        begun = perf_counter()
        while len(taken) < (2 if self.small else rounds) and (
            not taken or perf_counter() - begun < at_most
        ):
            start = perf_counter()
            function()
            self.wait()
            taken.append(perf_counter() - start)
        return median(taken)

    def config(self, name: str, **params: Any) -> Config:
        """The config of one of `MODELS`, whose weights are made unless they are there; or
        a packaged one."""
        if name not in MODELS:
            return config_from({"name": name, "extractor": name})
        extractor, rate, save_small, more = MODELS[name]
        home = self.work / f"{name}-{'small' if self.small else 'full'}"
        if not (home / "config.json").exists():
            save = save_small if self.small else partial(save_full, name)
            save(home)
        params = {"weights": str(home), **more, **params}
        return config_from(
            {"name": name, "extractor": extractor, "params": params, "audio": {"sample_rate": rate}}
        )


def main(run: Callable[[Step], object], description: str) -> None:
    started = perf_counter()
    asked = options(
        description,
        device="",
        out=(Path("results.jsonl"), "the file of the results"),
        work=(KEPT, "a folder for models and corpora"),
        seconds=600.0,
        small=False,
    )
    asked.work.mkdir(parents=True, exist_ok=True)
    device = Device(asked.device or None)
    device.configure_torch()
    step = Step(device, asked.out, asked.work, asked.seconds, asked.small, started)
    with torch.inference_mode():
        run(step)


# Models, with random weights and spread codebooks


def save_full(name: str, folder: Path) -> None:
    """Save one of `MODELS` at its full size."""
    import transformers as hf

    torch.manual_seed(0)
    match name:
        case "encodec":
            small_models.save_encodec(hf.EncodecConfig(), folder)
        case "dac":
            small_models.save_dac(
                hf.DacConfig(decoder_hidden_size=32, **small_models.DAC_16KHZ), folder
            )
        case "mimi":
            small_models.save_mimi(hf.MimiConfig(layer_scale_initial_scale=1.0), folder)
        case "hubert":
            hf.HubertModel(hf.HubertConfig()).save_pretrained(folder)
            hf.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
        case "whisper":
            encoder = {
                "d_model": 768,
                "encoder_layers": 12,
                "encoder_attention_heads": 12,
                "encoder_ffn_dim": 3072,
            }
            decoder = {"decoder_layers": 1, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072}
            hf.WhisperModel(hf.WhisperConfig(**encoder, **decoder)).save_pretrained(folder)
            hf.WhisperFeatureExtractor().save_pretrained(folder)


MODELS: dict[str, tuple[str, int, Callable[[Path], Path], dict[str, Any]]] = {
    "encodec": ("encodec", 24000, small_models.encodec_24khz, {"bandwidth": 6.0}),
    "dac": ("dac", 16000, small_models.dac_16khz, {}),
    "mimi": ("mimi", 24000, small_models.mimi, {"codebooks": 8}),
    "hubert": ("ssl", 16000, partial(small_ssl.save, "hubert"), {}),
    "whisper": ("ssl", 16000, partial(small_ssl.save, "whisper"), {}),
}
"""Name -> extractor, sample rate, what saves a small one, further parameters. At their
full size, HuBERT is the base model, and Whisper has the encoder of the small one."""
