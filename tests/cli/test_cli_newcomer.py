"""What a newcomer gets wrong in the first hour: each is one line that says what, where, and mostly what to do.

All that may be wrong with configs and manifests is in tests/config/test_config.py and tests/manifest/test_bad_*.py.
"""

import numpy as np
import pytest
import soundfile

from featcache.errors import Reason

MANIFESTS = {"train": "a,tone.wav", "none": "", "twice": "a,tone.wav\na,stereo.wav"}
CONFIGS = {
    "key": "name: a\nextractor: fbank\nparams: {num_mel_bin: 40}",
    "low": "name: fbank80\nextractor: fbank\nparams: {num_mel_bins: 80, low_freq: 40}\nstore: {dtype: float16}",
}


@pytest.fixture(scope="module")
def home(cli, tmp_path_factory):
    """A folder with manifests and configs, most of them wrong, and the cache `features` with two versions `fbank80`."""
    folder = tmp_path_factory.mktemp("home")
    tone = 0.1 * np.sin(np.arange(8000))
    soundfile.write(folder / "tone.wav", tone, 8000)  # at another rate than the config's: resampled, and no error
    soundfile.write(folder / "stereo.wav", np.stack([tone, tone], 1), 16000)
    soundfile.write(folder / "short.wav", tone[:100], 16000)
    (folder / "notes.txt").write_text("what was said")
    (folder / "empty.wav").touch()
    for name, rows in MANIFESTS.items():
        (folder / f"{name}.csv").write_text(f"id,path\n{rows}\n")
    for name, text in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(text)
    for config in ("fbank80", "low.yaml"):
        assert cli("extract", "train.csv", "-c", config, "--device", "cpu", cwd=folder).code == 0
    return folder


REFUSED = [
    ("extract trian.csv", 2, "trian.csv: cannot be read: No such file or directory"),
    ("extract none.csv", 2, "none.csv: 1 error\n  there are no rows"),
    ("extract twice.csv", 2, "twice.csv: 1 error\n  line 3: id 'a' is already on line 2"),
    ("extract train.csv -c key.yaml", 2, "params.num_mel_bin: there is no such key (did you mean num_mel_bins?)"),
    ("extract train.csv -c fbank-80", 2, "; did you mean the packaged config fbank80?"),
    ("extract train.csv --device gpu", 2, "device 'gpu': not a torch device; use cpu, cuda, or cuda:0 and so on"),
    ("extract train.csv --device cuda:99", 2, "device 'cuda:99': there is no such device; torch sees "),
    ("extract train.csv --max-failures many", 2, "--max-failures is 'many': give a number of utterances, or"),
    ("extract train.csv -o notes.txt", 2, "-o: notes.txt is not a folder"),
    ("verify feature", 1, "feature: there is no such cache folder: did you mean features?"),
    ("show notes.txt a", 1, "notes.txt: is a file, not a cache folder"),
    ("repair feature --manifest train.csv", 1, "feature: there is no such cache folder"),
    ("info .", 1, ".: holds no version: `featcache extract` creates one"),
    ("stats features/mfcc13", 1, "; features holds fbank80-"),
    ("stats features/fbank80", 1, "holds 2 versions: fbank80-2a8b3903b266, "),
    ("show features/fbank80-2a8b3903b266 b", 1, "'b': no such utterance in features/fbank80-2a8b3903b266, which holds"),
]


@pytest.mark.parametrize(("command", "code", "line"), REFUSED, ids=[command for command, _, _ in REFUSED])
def test_what_is_refused_is_one_line(cli, home, command, code, line):
    before = sorted(home.rglob("*"))
    said = cli.refused(*command.split(), cwd=home, code=code)
    assert sorted(home.rglob("*")) == before
    assert said.startswith("featcache: ")
    assert line in said
    assert said.count("\n") == line.count("\n") + 1


FAILED = {
    "elsewhere": ("wav/tone.wav,,,", Reason.FILE_MISSING, "there is no such file: {home}/wav/tone.wav"),
    "text": ("notes.txt,,,", Reason.NOT_AUDIO, "cannot be read as audio: format not recognised"),
    "empty": ("empty.wav,,,", Reason.EMPTY, "the file holds 0 bytes"),
    "short": ("short.wav,,,", Reason.TOO_SHORT, "100 samples at 16000 Hz are too few for one frame"),
    "channel": ("stereo.wav,,,2", Reason.NO_SUCH_CHANNEL, "there is no channel 2: the file has 2, counted from 0"),
    "late": (
        "tone.wav,5,1,",
        Reason.SEGMENT_OUTSIDE,
        "the segment goes from 5.000 s to 6.000 s, but the file holds 1.000 s",
    ),
}
"""By id: the rest of its row, and what is said of it."""


def test_what_fails_is_counted_and_the_first_is_shown_and_all_are_in_the_ledger(cli, home, tmp_path):
    rows = "".join(f"{id_},{row}\n" for id_, (row, *_) in FAILED.items())
    (home / "failing.csv").write_text(f"id,path,start,duration,channel\n{rows}")
    done = cli("extract", "failing.csv", "-o", tmp_path / "features", "--device", "cpu", cwd=home)
    assert done.code == 3
    counts = ", ".join(sorted(f"{reason} 1" for _, reason, _ in FAILED.values()))
    first = f"elsewhere: wav/tone.wav: there is no such file: {home}/wav/tone.wav"
    assert f"\nfailures: {counts}\nthe first is {first}\nwhy " in done.out
    listed = cli("info", tmp_path / "features", "--failures").out
    for id_, (row, reason, message) in FAILED.items():
        assert "\t".join([id_, reason, row.partition(",")[0], message.format(home=home)]) in listed
