"""Messages: the command that installs an extra, and URLs without what gives access."""

import importlib.metadata
import json

import pytest

from featcache import errors
from featcache.errors import (
    FeatcacheWarning,
    MissingDependencyError,
    did_you_mean,
    install_hint,
    real_time,
    without_secrets,
)

# The command that installs an extra


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Has featcache installed with this record of where it came from."""

    def install(record: dict | None):
        monkeypatch.setattr(errors, "__file__", str(tmp_path / "site" / "featcache" / "errors.py"))

        class Distribution:
            def read_text(self, name):
                return None if record is None or name != "direct_url.json" else json.dumps(record)

        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())

    return install


@pytest.mark.parametrize(
    ("record", "command"),
    [
        ({"url": "file:///src/featcache", "dir_info": {}}, "pip install '/src/featcache[models]'"),
        (
            {"url": "file:///my%20code/featcache", "dir_info": {}},
            "pip install '/my code/featcache[models]'",
        ),
        (
            {"url": "file:///w/featcache-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/w/featcache-0.1.0-py3-none-any.whl[models]'",
        ),
        (
            {"url": "https://h/featcache.zip", "archive_info": {}},
            "pip install 'featcache[models] @ https://h/featcache.zip'",
        ),
        (
            {"url": "https://h/featcache", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'featcache[models] @ git+https://h/featcache@ab12'",
        ),
        (
            {"url": "file:///src/featcache", "vcs_info": {"vcs": "git", "commit_id": "ab12"}},
            "pip install 'featcache[models] @ git+file:///src/featcache@ab12'",
        ),
        (None, "install featcache's extra 'models' from where this copy came"),
    ],
)
def test_an_extra_is_installed_from_where_this_copy_came(installed, record, command):
    """featcache is on no index: the bare name would bring what somebody else has put there."""
    installed(record)
    assert install_hint("models") == command
    message = str(MissingDependencyError("transformers", "extractor: ssl", "models"))
    assert message.endswith(f"cannot be imported: {command}")


def test_an_extra_is_installed_into_the_checkout_that_runs(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "featcache" / "errors.py"))
    assert install_hint("cloud") == f"pip install -e '{tmp_path.resolve()}[cloud]'"
    monkeypatch.setattr(errors, "__file__", "/gone/featcache/errors.py")

    def nothing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", nothing)
    assert "'cloud' from where this copy came" in install_hint("cloud")


def test_a_package_of_no_extra_is_named_itself():
    assert str(MissingDependencyError("lhotse", "lhotse's adapter", None)).endswith(
        "pip install lhotse"
    )


# What gives access


@pytest.mark.parametrize(
    "url",
    [
        "https:/u:HUSH@h/a.wav",  # as pathlib and os.path.normpath have URLs
        "https:///u:HUSH@h/a.wav",
        "https:/./u:HUSH@h/a.wav",
        "HTTPS:/u:HUSH@h",
        "/mnt/ftp:/u:HUSH@h/a.wav",
        "hdfs:/u:HUSH@h/a.wav",
        "git+ssh:/HUSH@h/x",
        "redis:/:HUSH@h",
        "https:/u:HUSH@[::1]/a.wav",
        "https%3A%2Fu%3AHUSH%40h%2Fa.wav",
        "https%253A%252F%252Fu%253AHUSH%2540h%252Fa.wav",
        "//u:HUSH@h/a.wav",
        "https:\\u:HUSH@h\\a.wav",
        "https:\\/\\/u:HUSH@h\\/a.wav",
        "https://u:a HUSH@h/a.wav",
        "https://u:a'HUSH@h/a.wav",
        "file://u:HUSH@h/a.wav",
        "https:/h/a.wav?sig=HUSH",
        "https:/h/a.wav#HUSH",
    ],
)
def test_no_form_of_a_url_with_a_secret_is_shown(url):
    for text in (url, f"cannot read {url}: gone", f"({url})", f"{url!r}; no", f'["{url}", 1]'):
        assert "HUSH" not in without_secrets(text)
        assert "HUSH" not in str(FeatcacheWarning(text))
    message = without_secrets(f"before {url}: after")
    assert message.startswith("before ")
    assert message.endswith("…: after")


def test_long_texts_are_looked_at_once():
    """Each is refused or left in far less than a second; none of them in hours."""
    for text in ("https://" * 50_000, "http:" * 50_000, "ab:/" * 50_000, "?" * 1_000_000):
        assert without_secrets(f"{text}@").count("…") <= 1


def test_a_typo_suggests_the_nearest_name():
    known = ["fbank80", "mfcc13", "Speaker"]
    assert did_you_mean("fbnak80", known) == " (did you mean fbank80?)"
    assert did_you_mean("speaker", known) == " (did you mean Speaker?)"
    assert did_you_mean("hubert", known) == ""
    assert did_you_mean("x", []) == ""


def test_a_speed_below_ten_has_a_decimal():
    """A slow model, such as DNSMOS of short clips, is not `0 × real time`."""
    assert real_time(0.4) == "0.4 × real time"
    assert real_time(7846.6) == "7,847 × real time"
