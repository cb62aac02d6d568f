"""What `show` says of an utterance: lengths and rates that cannot be taken for each other."""


def test_seconds_and_rates_are_told_apart(cli, corpus, reference):
    """The samples are at the config's rate, and the file's is another: no quotient of the two means anything."""
    (document,) = cli("show", reference, "rate-8000", "--json").json()["versions"]
    assert (document["audio_seconds"], document["num_samples"], document["source_rate"]) == (0.8, 12800, 8000)
    assert "sample_rate" not in document
    told = cli("show", reference, "rate-8000").out
    size = (corpus.folder / "rate-8000.wav").stat().st_size
    assert "duration     0.800 s\nsource rate  8000 Hz\n" in told
    assert f"source file  {size:,} bytes, modified 2" in told
    assert "num_samples" not in told


def test_what_the_row_says_is_shown_where_it_says_something(cli, reference):
    assert "start        0.913 s\nduration     0.850 s\n" in cli("show", reference, "segment-1").out
    assert "channel      0\n" in cli("show", reference, "stereo-left").out
    whole = cli("show", reference, "plain-01").out
    assert "start" not in whole
    assert "channel" not in whole


def test_versions_are_shown_with_a_line_between_them(cli, plain, scratch):
    cli("extract", plain.manifest(plain.rows[:2], "two.csv"), "-o", scratch, "-c", "fbank80", "-c", "mfcc13")
    first, second = cli("show", scratch, "utt-00").out.split("\n\n")
    assert first.startswith("version ")
    assert second.startswith("version ")
