"""An id or a path that is there, but written in another way, is named with what differs."""

from unicodedata import normalize

import pytest
from audio_files import write_tone
from decoded_audio import fault_of
from make_cache import made_cache, make_features

from featcache.errors import MissingItemError, Reason

COMPOSED, SPLIT = (normalize(form, "été") for form in ("NFC", "NFD"))
OTHERS = [
    (COMPOSED, SPLIT, r"it has 'e\u0301te\u0301', which is another Unicode form"),
    (SPLIT, COMPOSED, r"it has '\xe9t\xe9', which is another Unicode form"),
    ("a 1 ", "a 1", "it has 'a 1', which has other blanks"),
    ("a", " a", "it has ' a', which has other blanks"),
    ("dir\\a", "dir/a", "it has 'dir/a', which has other slashes"),
    ("7", "0007", "it has '0007', which has other leading zeros"),
    ("0007", "007", "it has '007', which has other leading zeros"),
    ("7.0", "7", "it has '7', which has other leading zeros"),
    ("UTT-A", "utt-a", "it has 'utt-a', which has other capitals"),
]


@pytest.mark.parametrize(("asked", "there", "told"), OTHERS)
def test_an_id_in_another_spelling_is_named(tmp_path, asked, there, told):
    (features,) = make_features(1).values()
    cache = made_cache(tmp_path, {"other": features, there: features})
    with pytest.raises(MissingItemError) as caught:
        cache[asked]
    assert str(caught.value).endswith(f"; {told}")
    with pytest.raises(MissingItemError) as caught:
        cache.batch(["nobody", asked])
    assert str(caught.value).endswith(f"; {told}")


def test_another_id_is_no_spelling(tmp_path):
    cache = made_cache(tmp_path, make_features(3))
    for asked in ("utt-7", "0", "", "utt"):
        with pytest.raises(MissingItemError, match=r"like 'utt-0'$"):
            cache[asked]


@pytest.mark.parametrize(
    ("asked", "there", "how"),
    [
        (COMPOSED, SPLIT, "is another Unicode form"),
        (SPLIT, COMPOSED, "is another Unicode form"),
        ("sub\\a", "sub/a", "has other slashes"),
        (" a", "a", ""),
        ("b", "a", ""),
    ],
)
def test_a_file_in_another_spelling_is_named(tmp_path, asked, there, how):
    path = tmp_path / f"{there}.wav"
    path.parent.mkdir(exist_ok=True)
    write_tone(path)
    fault = fault_of(tmp_path / f"{asked}.wav")
    assert fault.reason == Reason.FILE_MISSING
    named = f"; there is {str(path)!a}, which {how}" if how else ""
    assert str(fault) == f"there is no such file{named}"
