"""The page of a report: one file of HTML, which loads nothing and runs one script of its
own. Texts of manifests and caches are escaped, and a policy in the page lets no other
script run."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import starmap
from pathlib import Path

from featcache import __version__
from featcache.errors import counted, hours, megabytes, without_secrets
from featcache.report import charts
from featcache.report.charts import number
from featcache.report.media import Clip
from featcache.report.numbers import Audio, Column, Duplicates, Report, VersionNumbers
from featcache.report.values import Histogram

MOST_BYTES = 2_000_000
"""The most bytes of a page."""

_LONGEST = 160
"""The most characters of an id or a message that are shown."""

_LONGEST_CONFIG = 4000
_MOST_VERSIONS = 10
_MOST_FAILURES = 20

_TITLES = {
    "level": "Level",
    "peak": "Peak",
    "clipped": "Clipped samples",
    "dc": "DC offset, either sign",
    "silence": "Silence",
    "silent_start": "Digital silence at the start",
    "silent_end": "Digital silence at the end",
    "bandwidth": "Bandwidth",
}

_SHORT_UNITS = {
    "dB of full scale": "dB",
    "share of samples": "share",
    "share of time": "share",
    "mean of samples": "mean",
}
"""The units in the heads of narrow columns."""

Cell = str | tuple[str, float]
"""A cell of a table: HTML, and the number by which the table sorts, if it is one."""


def make_page(report: Report, clips: Sequence[Clip] = ()) -> bytes:
    """Make the page, UTF-8, of at most `MOST_BYTES`: sounds, then pictures, are left out
    from the last one on as far as they have no room."""
    style, script = (_file(name) for name in ("page.css", "page.js"))
    body = [_head(report), _versions(report.versions), _utterances(report)]
    if report.audio:
        body.append(_audio(report.audio))
    before = "\n".join(body)
    after = _duplicates(report.duplicates) + _features(report.versions[:_MOST_VERSIONS])
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src {_hash(style)}; "
    policy += f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    title = f"{_text(report.path)} · featcache"
    start = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head>\n<body><main>\n"
    )
    end = (
        f"</main><footer>Made by featcache {escape(__version__)}. This file is complete: it "
        f"loads nothing.</footer>\n<script>{script}</script></body></html>\n"
    )
    room = MOST_BYTES - len(_encode(start + before + after + end)) - 1000
    return _encode(start + before + _clips(clips, room) + after + end)


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


def _encode(page: str) -> bytes:
    # an id may have half of a character
    return page.encode("utf-8", "replace")


def _text(text: object, most: int = _LONGEST) -> str:
    """Escape a text for the page, without passwords of URLs, and shorten it."""
    shown = without_secrets(str(text), allow_query=True)
    if len(shown) > most:
        shown = f"{shown[: most - 1]}…"
    return escape(shown)


def _id(id_: str) -> str:
    return f"<bdi>{_text(id_)}</bdi>"


def _section(title: str, content: str, lead: str = "") -> str:
    intro = f"<p class=lead>{lead}</p>" if lead else ""
    return f"<section><h2>{title}</h2>{intro}{content}</section>"


def _figure(title: str, note: str, chart: str) -> str:
    return f"<figure><figcaption><b>{title}</b><span>{note}</span></figcaption>{chart}</figure>"


def _grid(figures: Sequence[str]) -> str:
    return f"<div class=grid>{''.join(figures)}</div>"


def _table(
    name: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], *, has_filter: bool = False
) -> str:
    """Make a table that sorts; text of cells is HTML already."""
    head = "".join(f"<th scope=col><button type=button>{title}</button></th>" for title in headings)
    lines = []
    for row in rows:
        cells = "".join(map(_cell, row))
        lines.append(f"<tr>{cells}</tr>")
    search = ""
    if has_filter:
        search = (
            f'<label class=filter>Filter <input type=search aria-label="Filter: {name}"></label>'
        )
    return (
        f'<div class=table>{search}<div class=scroll tabindex=0 role=region aria-label="{name}">'
        f"<table class=sort><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</div></div>"
    )


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{value}</td>"
    text, key = value
    return f'<td class=n data-v="{key:.9g}">{text}</td>'


def _count(value: int) -> Cell:
    return f"{value:,}", value


def _number(value: float) -> Cell:
    return number(value, 3), value


def _head(report: Report) -> str:
    largest = next(one for one in report.versions if one.path == report.largest)
    facts = {
        "utterances": f"{largest.utterances:,}",
        "of audio": hours(largest.audio_seconds),
        "versions": f"{len(report.versions):,}",
        "on disk": megabytes(sum(one.bytes_on_disk for one in report.versions)),
        "failed": f"{max(one.failed for one in report.versions):,}",
        "duplicates": f"{report.duplicates.utterances:,}",
    }
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return f"<header><p>featcache report</p><h1>{_text(report.path)}</h1><dl>{tiles}</dl></header>"


def _versions(versions: Sequence[VersionNumbers]) -> str:
    headings = ["version", "features", "utterances", "audio", "on disk", "first run", "last run"]
    headings += ["tags", "failed", "complete"]
    rows: list[list[Cell]] = []
    for one in versions:
        tags = _text(", ".join(one.tags) or "–")
        complete = "no" if one.unfinished else "yes"
        runs = [
            f"<small>{_text((time or '–')[:10])}</small>" for time in (one.first_run, one.last_run)
        ]
        name = f"<b>{_text(one.name)}</b> <small>{_text(one.fingerprint[:12])}</small>"
        rows.append(
            [
                name,
                _text(one.features),
                _count(one.utterances),
                (hours(one.audio_seconds), one.audio_seconds),
                (megabytes(one.bytes_on_disk), one.bytes_on_disk),
                *runs,
                tags,
                _count(one.failed),
                complete,
            ]
        )
    lacks = [
        f"<li><b>{_text(one.name)}</b>: {_text(message, 400)}</li>"
        for one in versions
        for message in one.unfinished[:_MOST_FAILURES]
    ]
    content = _table("Versions", headings, rows)
    if lacks:
        content += f"<h3>What is missing</h3><ul>{''.join(lacks[:50])}</ul>"
    failing = [one for one in versions if one.failed]
    for one in failing[:_MOST_VERSIONS]:
        reasons = ", ".join(f"{_text(name)} {n:,}" for name, n in one.failed_by_reason.items())
        few: list[list[Cell]] = [
            [_id(failure["id"]), _text(failure["reason"]), _text(failure["message"])]
            for failure in one.failures[:_MOST_FAILURES]
        ]
        of_all = f", the first {len(few)} of them" if one.failed > len(few) else ""
        content += f"<h3>Failures of {_text(one.name)}</h3><p class=lead>{reasons}{of_all}</p>"
        content += _table(f"Failures of {_text(one.name)}", ["id", "reason", "message"], few)
    return _section("Versions", content)


def _utterances(report: Report) -> str:
    """Show durations, and the columns of the manifest."""
    figures = [_histogram(report.durations, "Duration")]
    manifest, lead = report.manifest, ""
    if manifest:
        lead = f"{_text(manifest.source)}: {counted(manifest.utterances, 'utterance')}, "
        lead += f"{manifest.missing:,} of them missing"
        if manifest.text:
            title, lengths = "Length of the text", manifest.text.lengths
            chart = charts.draw_scatter(lengths, title, ("s", "characters"))
            note = f"column {_text(manifest.text.column)}; slowest and fastest are marked"
            figures.append(_figure(title, note, chart))
        figures += map(_column, manifest.columns)
    return _section("Utterances", _grid(figures), lead)


def _histogram(histogram: Histogram, title: str) -> str:
    total = sum(histogram.counts) + histogram.beyond + histogram.zeros
    unit = escape(histogram.unit)
    notes = [f"median {number(histogram.median, 3)}"]
    notes.append(f"{number(histogram.minimum, 3)} to {number(histogram.maximum, 3)} {unit}")
    if histogram.is_log:
        notes = [f"{histogram.zeros:,} of {total:,} have none"]
        notes.append(f"at most {number(histogram.maximum, 3)} {unit}")
    if histogram.beyond:
        notes.append(f"{counted(histogram.beyond, 'value')} beyond the axis")
    chart = charts.draw_histogram(histogram, title)
    if not sum(histogram.counts):
        notes, chart = [unit], f"<p class=none>none in {counted(total, 'utterance')}</p>"
    return _figure(title, " · ".join(notes), chart)


def _column(column: Column) -> str:
    rows: list[list[Cell]] = [
        [
            _id(group.value or "(empty)"),
            _count(group.utterances),
            (hours(group.audio_seconds), group.audio_seconds),
        ]
        for group in column.groups
    ]
    name = _text(column.name)
    lead = counted(column.distinct, "value")
    if column.distinct > len(rows):
        lead += f", the {len(rows)} with most audio"
    table = _table(f"Column {name}", [name, "utterances", "audio"], rows)
    return _figure(name, lead, table)


def _audio(audio: Audio) -> str:
    figures = [_histogram(one, _TITLES.get(one.name, escape(one.name))) for one in audio.histograms]
    title = "Level against duration"
    chart = charts.draw_scatter(audio.levels, title, ("s", "dB of full scale"))
    figures.append(_figure(title, "outliers are marked", chart))
    headings = ["id", "why", "duration<br><small>s</small>"]
    for name, unit in audio.units.items():
        short = escape(_SHORT_UNITS.get(unit, unit))
        headings.append(f"{name.replace('_', ' ')}<br><small>{short}</small>")
    rows: list[list[Cell]] = [
        [
            _id(one.id),
            ", ".join(one.rules),
            *map(_number, (one.audio_seconds, *one.statistics.values())),
        ]
        for one in audio.outliers
    ]
    table = _table("Outliers", headings, rows, has_filter=True)
    lead = f"{_text(audio.path)}: {counted(audio.utterances, 'utterance')}"
    outliers = _section("Outliers", table, "The extreme utterances by each statistic.")
    return _section("Recordings", _grid(figures), lead) + outliers


def _duplicates(duplicates: Duplicates) -> str:
    if not duplicates.compared:
        return _section("Duplicates", "<p>No hashes of the audio files are recorded.</p>")
    compared = f"{counted(duplicates.compared, 'utterance')} compared by the bytes of the audio"
    if not duplicates.groups:
        return _section("Duplicates", f"<p>None: {compared}.</p>")
    items = []
    for ids in duplicates.examples:
        items.append(f"<li>{', '.join(map(_id, ids))}</li>")
    lead = f"{counted(duplicates.utterances, 'utterance')} in "
    lead += f"{counted(duplicates.groups, 'group')} with the same audio; {compared}."
    return _section("Duplicates", f"<ul class=ids>{''.join(items)}</ul>", lead)


def _features(versions: Sequence[VersionNumbers]) -> str:
    """Show what is in each version: dimensions or codebooks, and its config."""
    figures, details = [], []
    for version in versions:
        name = _text(version.name)
        if version.codebooks:
            figures += _codebooks(version)
        if version.mean:
            title = f"{version.name}: mean and standard deviation"
            unit = version.units.partition(" (")[0][:40]
            chart = charts.draw_band(version.mean, version.std, title, unit)
            figures.append(_figure(f"{name}: mean, ± 1 std", _frames(version), chart))
        config = _text(json.dumps(version.config, indent=2, ensure_ascii=False), _LONGEST_CONFIG)
        fault = f"<p>Not summarised: {_text(version.fault, 400)}</p>" if version.fault else ""
        details.append(
            f"<details><summary>{name}: config and fingerprint</summary>{fault}"
            f"<p>{_text(version.fingerprint)}</p><p>{_text(version.units, 400)}</p>"
            f"<pre>{config}</pre></details>"
        )
    return _section("Features", _grid(figures) + "".join(details))


def _frames(version: VersionNumbers) -> str:
    if version.sampled_frames == version.frames:
        return f"all {version.frames:,} frames"
    return f"a sample of {version.sampled_frames:,} of {version.frames:,} frames"


def _codebooks(version: VersionNumbers) -> list[str]:
    books, name, figures = version.codebooks, _text(version.name), []
    shares = {
        "codes in use": [book.used / book.size for book in books],
        "perplexity": [book.perplexity / book.size for book in books],
    }
    for title, values in shares.items():
        chart = charts.draw_bars(values, f"{version.name}: {title}", "share of the codebook")
        figures.append(_figure(f"{name}: {title}", _frames(version), chart))
    rows: list[list[Cell]] = [
        [
            _count(place),
            _count(book.size),
            _count(book.used),
            _number(book.entropy),
            _number(book.perplexity),
        ]
        for place, book in enumerate(books)
    ]
    headings = ["codebook", "size", "used", "bits", "perplexity"]
    table = _table(f"Codebooks of {name}", headings, rows)
    return [*figures, _figure(f"{name}: codebooks", _frames(version), table)]


def _clips(clips: Sequence[Clip], room: int) -> str:
    """Show clips, within that many bytes."""
    silenced = [
        replace(clip, wav=None, note=clip.note or "no room for its sound") for clip in clips
    ]
    shown = [*starmap(_clip, enumerate(silenced))]
    left = room - sum(map(len, map(_encode, shown)))
    while shown and left < 0:
        left += len(_encode(shown.pop()))
    for place, clip in enumerate(clips[: len(shown)]):
        with_sound = _clip(place, clip)
        left -= len(with_sound) - len(shown[place])
        if left < 0:
            break
        shown[place] = with_sound
    if not shown:
        return ""
    lead = "Outliers, then a random sample. Time goes to the right; at most the first 6 s."
    return _section("Look and listen", f"<div class=grid>{''.join(shown)}</div>", lead)


def _clip(place: int, clip: Clip) -> str:
    shown = clip.shown
    images = []
    for picture in clip.pictures:
        data = b64encode(picture.png).decode()
        what = _text(f"{picture.version} of {shown.id}: {picture.what}", 240)
        images.append(f'<img alt="{what}" src="data:image/png;base64,{data}">')
    sound = f"<p class=none>{_text(clip.note)}</p>"
    if clip.wav is not None:
        data = b64encode(clip.wav).decode()
        label = _text(f"Play {shown.id}")
        source = f"data:audio/wav;base64,{data}"
        sound = f'<audio controls preload=metadata aria-label="{label}" src="{source}"></audio>'
    note = f"{escape(shown.why)} · {hours(shown.audio_seconds)}"
    caption = f"<figcaption><b>{_id(shown.id)}</b><span>{note}</span></figcaption>"
    return f"<figure class=clip>{caption}{''.join(images)}{sound}</figure>"
