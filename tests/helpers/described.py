"""Caches that describe utterances: by pitch, speech, scores and voices."""

import numpy as np
from make_cache import add_shard, in_three_shards, make_version

from featcache.spec import Clip


def make_described(folder, speaker="spk"):
    """A cache with pitch, speech, scores and voices of 30 utterances of three speakers, the
    last of whom has one utterance in the voice of the first. Some have newer features. Returns
    the folder, which has the manifest too, and the features of each by id."""
    random = np.random.default_rng(0)
    ids = [f"utt-{number}" for number in range(30)]
    frames = {id_: random.random((random.integers(9, 50), 2)) for id_ in ids}
    pitch = {id_: (part * [400, 1]).astype(np.float32) for id_, part in frames.items()}
    pitch["utt-3"][:, 1] = 0.2  # nothing is voiced
    probability = {id_: part[:, 1:].astype(np.float32) for id_, part in frames.items()}
    centres = random.standard_normal((3, 16))
    voice = {
        id_: np.float32([centres[number % 3] + 0.3 * random.standard_normal(16)])
        for number, id_ in enumerate(ids)
    }
    voice["utt-29"] = voice["utt-0"] + np.float32(0.01)
    scores = {id_: random.uniform(1, 5, (1, 2)).astype(np.float32) for id_ in ids}
    made = {
        "pitch": (pitch, {"units": "pitch (Hz), periodicity (0 to 1)"}),
        "vad": (probability, {}),
        "voice": (voice, {"axis": Clip(), "units": "speaker vector"}),
        "scores": (scores, {"axis": Clip(), "units": "ovrl (of 5), sig (of 5)"}),
    }
    for name, (features, options) in made.items():
        older = {id_: np.zeros_like(features[id_]) for id_ in ("utt-9", "utt-1")}
        version = make_version(folder / "c", older, name=name, **options)
        for number, shard in enumerate(in_three_shards(features)):
            add_shard(version, shard, row=10 * number, generation=2)
    table = [f"{id_},audio/{id_}.wav,{speaker}-{number % 3}" for number, id_ in enumerate(ids)]
    (folder / "m.csv").write_text("\n".join(["id,path,speaker", *table, "gone,g.wav,spk-9"]))
    return folder, pitch, probability, voice, scores
