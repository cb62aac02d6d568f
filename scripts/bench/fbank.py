"""Measure how fast fbank is, next to torchaudio, Lhotse and kaldi-native-fbank: one
thread, one process, in turns.

    python scripts/bench/fbank.py [--rounds 20] [--json]

The audio is noise: what it holds does not change the time. Each line is the best of the
rounds, in which all take turns, so that a noisy neighbour meets them all. The others take
one clip at a time; featcache is shown both so, and with all clips in one call, as a run
makes it. A call costs whole blocks, of 640 frames, or of 128 if it has few. The
difference is that of the largest value, to featcache's."""

import torch
import torchaudio
from harness import Table, available, options, present, quick_turns

from featcache.config import load_config
from featcache.extractors import Clip

RATE = 16000
SETS = {"12 s": (16, 12.0), "1 s": (192, 1.0)}


@torch.inference_mode()
def main() -> None:
    asked = options(__doc__, rounds=20)
    torch.set_num_threads(1)
    extractor = load_config("fbank80").build(torch.device("cpu"))
    others = available(PEERS)
    tables = []
    for length, (count, seconds) in SETS.items():
        clips = [Clip(str(i), torch.randn(int(seconds * RATE)) * 0.1) for i in range(count)]
        runs = {
            "featcache, one call": lambda clips=clips: extractor.extract(clips),
            "featcache, clip by clip": lambda clips=clips: [
                extractor.extract([clip])[0] for clip in clips
            ],
        }
        for name, function in others.items():
            runs[name] = lambda clips=clips, function=function: [
                function(clip.waveform) for clip in clips
            ]
        turns = quick_turns(runs, asked.rounds, 1)
        ours, reference = torch.cat(extractor.extract(clips)), turns.best("torchaudio")
        table = Table(
            f"{count} × {length}",
            {"× real time": "{:.0f}", "torchaudio =": "{:.2f}", "max difference": "{:.1e}"},
        )
        for name, run in runs.items():
            apart = (torch.cat(run()) - ours).abs().max()
            table.add(name, count * seconds / turns.best(name), reference / turns.best(name), apart)
        tables.append(table)
    present(
        asked, f"torch {torch.__version__}, torchaudio {torchaudio.__version__}, 1 thread", *tables
    )


def by_torchaudio():
    from torchaudio.compliance import kaldi

    return lambda waveform: kaldi.fbank(waveform[None] * 32768, num_mel_bins=80)


def by_lhotse():
    from lhotse.features.kaldi.extractors import Fbank, FbankConfig

    fbank = Fbank(FbankConfig(high_freq=0.0, snip_edges=True, energy_floor=1e-10)).extractor
    return lambda waveform: fbank(waveform[None] * 32768)[0]


def by_native():
    import kaldi_native_fbank as knf
    import numpy as np

    options = knf.FbankOptions()
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = 80

    def fbank(waveform):
        online = knf.OnlineFbank(options)
        online.accept_waveform(RATE, (waveform * 32768).numpy())
        online.input_finished()
        return torch.from_numpy(
            np.array([online.get_frame(t) for t in range(online.num_frames_ready)])
        )

    return fbank


PEERS = {"torchaudio": by_torchaudio, "lhotse": by_lhotse, "kaldi-native-fbank": by_native}


if __name__ == "__main__":
    main()
