"""Label files, held against what was written into them by hand."""

import codecs

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_files import ctm_of, long_textgrid, short_textgrid

from featcache.errors import AudioError, ConfigError, Reason
from featcache.extractors.labels import Labels, LabelsParams, packed
from featcache.manifest.strings import Strings

pytest.importorskip("praatio")

WORDS = [(0, 0.25, ""), (0.25, 0.5, 'say "hi"'), (0.5, 1.125, "Übung — 言葉"), (1.125, 2, "")]
PHONES = [(0, 0.5, "s"), (0.5, 2, "eI")]
MARKS = [(0.125, 0.125, 'a "peak"'), (1.5, 1.5, "")]
TIERS = {"words": WORDS, "phones": PHONES, "marks": MARKS}


def read(text, suffix=".TextGrid", channel=None, encoding="utf-8", **params):
    params = LabelsParams(label_files="{id}", **params)
    data = text if isinstance(text, bytes) else text.encode(encoding)
    return Labels(params, 16000, torch.device("cpu")).read(data, f"a/rec{suffix}", channel)


def as_labels(found):
    return [
        (*times, label) for times, label in zip(found.times.tolist(), found.labels, strict=True)
    ]


def refused(reason, text, suffix=".TextGrid", **options):
    with pytest.raises(AudioError) as caught:
        read(text, suffix, **options)
    assert caught.value.reason == reason
    return str(caught.value)


@pytest.mark.parametrize("write", [long_textgrid, short_textgrid])
@pytest.mark.parametrize(
    "encode",
    [
        str.encode,
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
    ids=["utf-8", "utf-8 with a mark", "utf-16", "utf-16-be", "crlf"],
)
def test_a_textgrid_is_read_as_it_was_written(write, encode):
    data = encode(write(2, TIERS, points=["marks"]))
    found = read(data, tier="words", empty="keep")
    assert as_labels(found) == WORDS
    assert found.times.dtype == np.float64
    assert found.end == 2.0
    assert as_labels(read(data, tier="words")) == WORDS[1:3]
    assert as_labels(read(data, tier="phones")) == PHONES
    assert as_labels(read(data, tier="marks", empty="keep")) == MARKS


@pytest.mark.parametrize("write", [long_textgrid, short_textgrid])
def test_a_textgrid_without_a_line_break_at_its_end_loses_nothing(write):
    """praatio's reader of the short format would pass over the last label."""
    assert as_labels(read(write(2, {"words": PHONES}).rstrip())) == PHONES


@pytest.mark.parametrize("write", [long_textgrid, short_textgrid])
@pytest.mark.parametrize("time", [2.5e-05, 5.551115123125783e-17])
def test_times_near_zero_have_exponents_as_praat_writes_them(write, time):
    labels = [(0, time, "a"), (time, 2, "xmin = 2.5e-05")]
    text = write(2, {"words": labels})
    assert as_labels(read(text)) == labels
    assert str(time) in text


def test_a_label_of_several_lines_keeps_its_numbers():
    label = "y = 2e3\nand more"
    assert as_labels(read(long_textgrid(1.0, {"words": [(0, 1.0, label)]}))) == [(0, 1.0, label)]


@pytest.mark.parametrize("write", [long_textgrid, short_textgrid])
def test_a_textgrid_that_was_cut_off_anywhere_is_damaged(write):
    """At the end of any line, so that what is left looks whole."""
    lines = write(2, {"words": WORDS, "phones": PHONES}).splitlines(keepends=True)
    for count in range(len(lines)):
        refused(Reason.NOT_LABELS, "".join(lines[:count]), tier="words")


def test_no_tier_and_several_tiers_are_one_line_each():
    text = long_textgrid(2, TIERS, points=["marks"])
    no_tier = refused(Reason.EXTRACTOR_REFUSED, text, tier="word")
    assert no_tier == (
        "it has not one tier 'word', but 'words', 'phones', 'marks': set params.tier"
    )
    assert "but 'words', 'phones'" in refused(Reason.EXTRACTOR_REFUSED, text)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "no TextGrid"),
        (b"RIFF\x00\x01\xff", "not utf-8:"),
        (b"\xff\xfe\x00", "not utf-16:"),
        (b"anything else\n", "no TextGrid"),
        (long_textgrid(2, {"a": [(-0.5, 1, "x")]}).encode(), "below 0"),
        (short_textgrid(2, {"a": [(-0.5, 1, "x")]}).encode(), "goes from -0.5 s"),
        (long_textgrid(2, {"a": [(1.5, 0.5, "x")]}).encode(), "goes from 1.5 s to 0.5 s"),
        (long_textgrid("1e300", {"a": []}).encode(), "the tier ends at 1e+300 s"),
        (short_textgrid(-2, {"a": [(0, 1, "x")]}).encode(), "the tier ends at -2.0 s"),
        (long_textgrid(2, {"a": [(0, 1e10, "x")]}).encode(), "goes from 0.0 s to 10000000000.0 s"),
        (long_textgrid(2, {"a": [(0, 1, "x\0y")]}).encode(), "'x\\x00y'"),
        (long_textgrid(2, {"a": [("0,5", 1, "x")]}).encode(), "no TextGrid"),
        (short_textgrid(2, {"a": [("0,5", 1, "x")]}).encode(), "'x' has a damaged time"),
        (short_textgrid(20, {"a": [("1_0", 11, "x")]}).encode(), "'x' has a damaged time"),
    ],
)
def test_other_bytes_are_one_line(data, what):
    assert what in refused(Reason.NOT_LABELS, data)


def test_a_name_of_no_format_is_one_line():
    message = refused(Reason.NOT_LABELS, "a", suffix=".lab")
    assert message == "its name does not end in .textgrid, .ctm, .rttm"


CTM = """;; file channel start duration word
rec-1 A 0.50 0.25 hello 0.9
rec-1 A 0.75 0.5 world

rec-1 B 0.10 0.2 yes
"""


def test_a_ctm_is_read_by_its_fields():
    assert as_labels(read(CTM, ".ctm")) == [(0.1, 0.1 + 0.2, "yes"), *HELLO]
    assert as_labels(read(CTM, ".CTM", channel=0)) == HELLO
    assert as_labels(read(CTM, ".ctm", channel=1)) == [(0.1, 0.1 + 0.2, "yes")]
    assert as_labels(read(CTM, ".ctm", channel=2)) == []
    assert read(CTM, ".ctm").end is None


HELLO = [(0.5, 0.75, "hello"), (0.75, 1.25, "world")]


def test_the_channel_of_a_ctm_of_one_channel_is_not_asked():
    assert as_labels(read(ctm_of("x", HELLO), ".ctm", channel=1)) == HELLO


@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_lines_end_as_on_any_system(end):
    assert as_labels(read(CTM.replace("\n", end), ".ctm", channel=0)) == HELLO


@pytest.mark.parametrize("blank", ["\u00a0", "\u3000", "\u2028", "\u0085", "\x1c"])
def test_a_word_may_have_a_blank_that_is_not_ascii(blank):
    """As French has in numbers, and Japanese anywhere."""
    words = [(0.5, 0.75, f"10{blank}000"), (0.75, 1.25, f"{blank}x")]
    assert as_labels(read(ctm_of("x", words), ".ctm")) == words
    rttm = f"SPEAKER rec 1 0.5 1.5 <NA> <NA> anna{blank}b <NA> <NA>\n"
    assert as_labels(read(rttm, ".rttm")) == [(0.5, 2.0, f"anna{blank}b")]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("rec-1 1 0.5 hello", "line 2 is damaged: 'rec-1 1 0.5 hello'"),
        ("rec-1 1 * * <ALT_BEGIN>", "line 2 is damaged"),
        ("rec-1 1 0.5 -0.2 hello", "goes from 0.5 s to 0.3 s"),
        ("rec-1 1 nan 0.2 hello", "goes from nan s"),
        ("rec-1 1 inf 0.2 hello", "goes from inf s"),
        ("rec-1 1 1_0 0.2 hello", "line 2 is damaged: 'rec-1 1 1_0 0.2 hello'"),
        ("rec-1 1 0.5 １０ hello", "line 2 is damaged: 'rec-1 1 0.5 １０ hello'"),
    ],
)
def test_a_damaged_line_is_named(line, what):
    assert what in refused(Reason.NOT_LABELS, f"rec-1 1 0 0.5 a\n{line}\n", ".ctm")


def test_a_file_of_several_recordings_is_refused_with_the_remedy():
    message = refused(Reason.EXTRACTOR_REFUSED, ctm_of("a", HELLO) + ctm_of("b", HELLO), ".ctm")
    assert "recordings a, b: params.label_files names one of them" in message
    message = refused(Reason.EXTRACTOR_REFUSED, ctm_of("a", HELLO), ".ctm", tier="words")
    assert "leave out params.tier" in message


RTTM = """SPKR-INFO rec 1 <NA> <NA> <NA> unknown anna <NA> <NA>
SPEAKER rec 1 0.5 1.5 <NA> <NA> anna <NA> <NA>
SPEAKER rec 1 1.25 2.0 <NA> <NA> ben 0.7 <NA>
LEXEME rec 1 0.5 0.25 hello lex anna <NA> <NA>
NON-LEX rec 1 0.8 0.1 <NA> laugh anna <NA> <NA>
"""


def test_an_rttm_is_read_by_its_types():
    assert as_labels(read(RTTM, ".rttm")) == [(0.5, 2.0, "anna"), (1.25, 3.25, "ben")]
    assert as_labels(read(RTTM, ".rttm", tier="LEXEME")) == [(0.5, 0.75, "hello")]
    assert as_labels(read(RTTM, ".rttm", tier="NON-LEX")) == []
    kept = as_labels(read(RTTM, ".rttm", tier="NON-LEX", empty="keep"))
    assert kept == [(0.8, pytest.approx(0.9), "")]


texts = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029")
)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), texts), max_size=8), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_labels_are_read_as_they_were_written(steps, is_long):
    times = np.cumsum([0, *(step for step, _ in steps)]) / 1024
    labels = [
        (float(first), float(last), label.strip())
        for first, last, (_, label) in zip(times, times[1:], steps, strict=False)
    ]
    write = long_textgrid if is_long else short_textgrid
    end = float(times[-1])
    if any(mark in label for _, _, label in labels for mark in ("item [", "intervals", "Tier")):
        return
    found = read(write(end, {"a": labels}), empty="keep")
    assert as_labels(found) == labels


@given(st.lists(texts))
def test_packed_labels_are_strings_with_a_zero_byte_each(labels):
    stored = packed(labels)
    ends = np.flatnonzero(stored == 0) + 1
    assert len(ends) == len(labels)
    assert [*Strings(stored, np.concatenate([[0], ends]))] == [f"{label}\0" for label in labels]


def test_float64_is_exact_enough():
    """A sample at 192 kHz, in 97 days of audio."""
    last = 97 * 86400.0
    assert np.spacing(last) < 1e-9 < 1 / 192000
    assert np.spacing(np.float32(17.1 * 60)) > 1 / 16000


def test_a_config_without_label_files_or_of_another_dtype_is_one_line():
    from featcache.config import config_from
    from featcache.device import Device
    from featcache.extraction.built_config import BuiltConfig

    with pytest.raises(ConfigError, match=r"params\.label_files: field required"):
        config_from({"name": "words", "extractor": "labels"})
    plain = {"name": "words", "extractor": "labels", "params": {"label_files": "{id}.ctm"}}
    assert config_from(plain).resolved()["store"] == {"dtype": "float64"}
    for document in (
        plain | {"store": {"dtype": "float32"}},
        plain | {"store": {"dtype": "uint8"}},
        {"name": "a", "extractor": "fbank", "store": {"dtype": "float64"}},
    ):
        with pytest.raises(ConfigError, match=r"store\.dtype"):
            _ = BuiltConfig(config_from(document), Device("cpu", 1)).extractor
