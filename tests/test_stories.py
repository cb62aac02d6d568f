"""The training stories, run as commands on a little audio: their tables, and what the
tables say."""

import csv
import json
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

STORIES = Path(__file__).parents[1] / "scripts" / "stories"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """Here, as there, the scripts' modules can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STORIES.parent / "bench"))
        patch.syspath_prepend(str(STORIES))
        yield


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A manifest of 30 clips at 8 kHz, of three speakers: tones, of which the last three
    are for tests."""
    from corpus import make_digits

    return make_digits(tmp_path_factory.mktemp("digits"), 30)


def run(cli, script, *options):
    """How a story's script ends."""
    return cli(STORIES / script, json.dumps([""]), *options, entry="cli_server:run_script")


def rows_of(table):
    """The cells of a table's rows, by what is in the first, with numbers for what begins
    with one."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {
        name.strip(): [
            float(re.match(r"[\d.]+", cell.strip())[0]) for cell in cells if cell.strip() != "–"
        ]
        for name, *cells in lines[2:]
    }


@pytest.mark.slow
def test_keywords_trains_on_the_same_codes_whenever_they_are_made(cli, digits, tmp_path):
    pytest.importorskip("transformers")
    from small_models import encodec_24khz

    options = ["--data", digits, "--weights", encodec_24khz(tmp_path / "weights")]
    sizes = ["--epochs", 1, "--more-epochs", 1, "--channels", 8, "--batch-size", 9, "--threads", 1]
    done = run(cli, "train_keywords.py", *options, *sizes).with_code(0)
    assert "27 digits to train on, 3 to test with" in done.out
    ways = rows_of(done.out)
    assert list(ways) == ["one by one", "padded", "featcache"]
    assert all(seconds > 0 and 0 <= accuracy <= 100 for seconds, *_, accuracy in ways.values())
    held = re.search(r"([\d,]+) codes .* (\d+) differ .* (\d+) of them ties", done.out)
    codes, different, ties = (int(number.replace(",", "")) for number in held.groups())
    assert codes > 27 * 8 * 10
    assert different == ties
    if not different:
        assert ways["one by one"][-1] == ways["featcache"][-1]
    assert re.search(r"loader\.waited of featcache's: \d", done.out)


@pytest.mark.slow
def test_xvector_trains_with_noise_drawn_in_two_places(cli, digits):
    options = ["--data", digits, "--epochs", 3, "--channels", 8, "--batch-size", 9, "--threads", 1]
    done = run(cli, "train_xvector.py", *options).with_code(0)
    assert "27 utterances of 3 speakers to train on, 3 to test with" in done.out
    ways = rows_of(done.out)
    assert list(ways) == ["on the CPU", "on the device"]
    for step, p90, noise, share, *_, accuracy in ways.values():
        assert 0 < noise < step <= p90
        assert 0 < share < 100
        assert 0 <= accuracy <= 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_language_model_goes_on_as_if_it_had_not_been_killed(cli, digits, tmp_path):
    pytest.importorskip("transformers")
    from small_models import encodec_24khz

    options = ["--data", digits, "--weights", encodec_24khz(tmp_path / "weights")]
    done = run(cli, "train_speech_lm.py", *options, "--steps", 6, "--threads", 1).with_code(0)
    losses = rows_of(done.out)
    assert losses["last step"][0] < losses["first step"][0]
    for whole, resumed in losses.values():
        assert abs(whole - resumed) < 1e-3
    assert re.search(r"killed after [2-6] of 6 steps", done.out)


@pytest.mark.slow
def test_a_recipe_of_speech_has_all_it_needs_from_one_extraction(cli, digits, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    from small_models import encodec_24khz

    options = ["--data", digits, "--weights", encodec_24khz(tmp_path / "weights")]
    sizes = ["--epochs", 2, "--batch-size", 9, "--threads", 1, "--level", -90]
    done = run(cli, "train_tts.py", *options, *sizes).with_code(0)
    assert list(rows_of(done.out)) == ["text and codes", "and the speaker", "and the pitch"]
    assert "five versions from one pass over the audio" in done.out
    assert "27 in train and 3 in test are louder than -90 dB" in done.out


@pytest.mark.parametrize("script", ["train_keywords.py", "train_xvector.py", "train_tts.py"])
def test_a_manifest_that_is_not_there_is_one_line(monkeypatch, script, tmp_path):
    missing = tmp_path / "none.csv"
    monkeypatch.setattr("sys.argv", [script, "--data", str(missing)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(STORIES / script), run_name="__main__")
    assert re.fullmatch(f"{missing}: there is none; --data takes a manifest .*", str(ended.value))


def test_without_a_manifest_tones_stand_for_the_digits(monkeypatch, tmp_path, capsys):
    """In a clone, which has no data."""
    import training

    monkeypatch.setattr(training, "DATA", tmp_path / "none.csv")
    monkeypatch.setattr(training, "make_digits", partial(training.make_digits, count=600))
    paths = training.split(None, tmp_path, None)
    assert "tones stand for spoken digits" in capsys.readouterr().err
    rows = {
        name: list(csv.DictReader(path.read_text().splitlines())) for name, path in paths.items()
    }
    assert [len(rows[name]) for name in ("all", "train", "test")] == [600, 540, 60]
    for name in ("train", "test"):
        assert {row["digit"] for row in rows[name]} == {str(digit) for digit in range(10)}
        assert len({row["speaker"] for row in rows[name]}) == 6
    assert all(Path(row["path"]).is_file() for row in rows["all"])


def test_the_network_sees_a_row_as_if_alone():
    from xvector import XVector

    torch.manual_seed(0)
    network = XVector(5, 3, channels=8).eval()
    features, lengths = torch.randn(4, 30, 5), torch.tensor([30, 1, 17, 9])
    together = network(features, lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = network(features[row : row + 1, :length], lengths[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone)
