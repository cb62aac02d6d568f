"""The page of a report: one file of HTML, which loads nothing and runs one script of its
own. Texts of manifests and caches are escaped, and a policy in the page lets no other
script run."""

from __future__ import annotations

import hashlib
import json
import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from featcache import __version__
from featcache.errors import counted, hours, megabytes, without_secrets
from featcache.media.axes import number
from featcache.report.charts import Histogram, draw_band, draw_histogram, draw_scatter
from featcache.report.clips import Clip
from featcache.report.numbers import Document, Report

MOST_BYTES = 2_000_000
"""The most bytes of a page."""

_LONGEST = 160  # characters of an id or a message
_LONGEST_CONFIG = 4000
_MOST_DETAILS = 10
_FEW_ROWS = 5
_MOST_SPEAKERS = 100

_TITLES = {
    "clipped": "Clipped samples",
    "dc": "DC offset, either sign",
    "silent_start": "Digital silence at the start",
    "silent_end": "Digital silence at the end",
    "ovrl": "Quality overall",
    "sig": "Quality of the speech",
    "bak": "Quality of the background",
    "p808": "Quality by P.808",
    "pitch": "Median pitch",
    "voiced": "Voiced frames",
    "speech": "Frames with speech",
    "voice": "Own speaker's voice less the nearest other",
}

Cell = str | int | float | tuple[str, float]
"""A cell of a table: HTML, a number, or HTML and the number by which the table sorts."""


def make_page(report: Report, clips: Sequence[Clip] = ()) -> bytes:
    """Make the page, UTF-8, of at most `MOST_BYTES`: the last sounds, then the last pictures
    are left out as far as they have no room."""
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; img-src data:; media-src data:; style-src {_hash(style)}; "
    policy += f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    start = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{_text(report.path)} · '
        f"featcache</title><style>{style}</style></head>\n<body><main>\n"
    )
    start += _head(report) + _versions(report.versions)
    if report.compared:
        start += _compared(report.compared, report.versions[:2])
    start += _utterances(report)
    if report.statistics:
        start += _statistics(report)
    if report.voices:
        start += _voices(report.voices)
    end = (
        f"{_duplicates(report)}{_features(report.versions)}"
        f"</main><footer>Made by featcache {escape(__version__)}. This file is complete: it "
        f"loads nothing.</footer>\n<script>{script}</script></body></html>\n"
    )
    room = MOST_BYTES - len(_encode(start + end)) - 1000
    return _encode(start + _clips(clips, room) + end)


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
    # whose direction of writing does not turn the page's
    return f"<bdi>{_text(id_)}</bdi>"


def _section(title: str, content: str, lead: str = "") -> str:
    return f"<section><h2>{title}</h2><p class=lead>{lead}</p>{content}</section>\n"


def _figure(title: str, note: str, content: str, kind: str = "chart") -> str:
    caption = f"<figcaption><b>{title}</b><span>{note}</span></figcaption>"
    return f"<figure class={kind}>{caption}{content}</figure>"


def _grid(figures: Sequence[str]) -> str:
    return f"<div class=grid>{''.join(figures)}</div>"


def _table(name: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Make a table that sorts, and has a filter if it has many rows. Text is HTML."""
    buttons = (f"<th scope=col><button type=button>{title}</button></th>" for title in headings)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    search = ""
    if len(rows) > _FEW_ROWS:
        search = "<label class=filter>Filter <input type=search></label>"
    return (
        f'<div class=table>{search}<div class=scroll tabindex=0 role=region aria-label="{name}">'
        f"<table><thead><tr>{''.join(buttons)}</tr></thead><tbody>{lines}</tbody></table>"
        "</div></div>"
    )


def _cell(value: Cell) -> str:
    if isinstance(value, str):
        return f"<td>{value}</td>"
    if isinstance(value, int):
        value = f"{value:,}", value
    elif isinstance(value, float):
        value = (number(value, 3), value) if math.isfinite(value) else ("–", -math.inf)
    key = f"{value[1]:.9g}".replace("-inf", "-Infinity")
    return f'<td class=n data-v="{key}">{value[0]}</td>'


def _length(seconds: float) -> tuple[str, float]:
    return hours(seconds) if seconds else "–", seconds


def _head(report: Report) -> str:
    largest = next(one for one in report.versions if one["path"] == report.largest)
    facts = {
        "utterances": f"{largest['utterances']:,}",
        "of audio": _length(largest["audio_seconds"])[0],
        "versions": f"{len(report.versions):,}",
        "on disk": megabytes(sum(one["bytes_on_disk"] for one in report.versions)),
        "failed": f"{max(one['failed'] for one in report.versions):,}",
        "duplicates": f"{report.duplicates['utterances']:,}",
    }
    tiles = ""
    for name, value in facts.items():
        tiles += f"<div><dt>{name}</dt><dd>{value}</dd></div>"
    title = f"<p>featcache report</p><h1>{_text(report.path)}</h1>"
    return f"<header>{title}<dl>{tiles}</dl></header>"


def _versions(versions: Sequence[Document]) -> str:
    """Show a line for each version, what is missing, and what failed."""
    headings = ["version", "features", "utterances", "audio", "disk", "first run", "last run"]
    headings += ["tags", "failed", "complete"]
    rows: list[list[Cell]] = []
    lacks = []
    for one in versions:
        name = f"<b>{_text(one['name'])}</b>"
        days = (_text((one[run] or "–")[:10]) for run in ("first_run", "last_run"))
        tags = ", ".join(tag["name"] for tag in one["tags"])
        rows.append(
            [
                f"{name} <small>{_text(one['fingerprint'][:12])}</small>",
                _text(one["features"]),
                one["utterances"],
                _length(one["audio_seconds"]),
                (megabytes(one["bytes_on_disk"]), one["bytes_on_disk"]),
                *(f"<small>{day}</small>" for day in days),
                _text(tags or "–"),
                one["failed"],
                "no" if one["unfinished"] else "yes",
            ]
        )
        for lack in one["unfinished"][:_MOST_DETAILS]:
            lacks.append(f"<li>{name}: {_text(lack['message'], 400)}</li>")
        reasons = one["failed_by_reason"].items()
        if reasons:
            failed = ", ".join(f"{_text(reason)} {count:,}" for reason, count in reasons)
            lacks.append(f"<li>{name}: failed: {failed}</li>")
    content = _table("Versions", headings, rows)
    if lacks:
        content += f"<h3>What is missing or has failed</h3><ul>{''.join(lacks[:50])}</ul>"
    return _section("Versions", content)


def _compared(lines: Sequence[str], versions: Sequence[Document]) -> str:
    """Show how two versions differ."""
    first, second = versions
    content = f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"
    if first["mean"] and len(first["mean"]) == len(second["mean"]):
        note = f"the line without a band: the mean of {_text(second['path'])}"
        content += _grid([_band(first, note, second["mean"])])
    lead = f"{_text(first['path'])} and {_text(second['path'])}: pictures show both, in this order"
    return _section("Compared", content, lead)


def _band(version: Document, note: str, other: Sequence[float] = ()) -> str:
    """Show the mean of each dimension, and the means of another version."""
    title = f"{version['name']}: mean ± standard deviation"
    unit = version["units"].partition(" (")[0][:40]
    chart = draw_band(version["mean"], version["std"], title, unit, other)
    return _figure(escape(title), note, chart)


def _utterances(report: Report) -> str:
    """Show durations, and the columns of the manifest."""
    figures, lead = [_histogram(report.durations)], ""
    manifest = report.manifest
    if manifest:
        lead = f"{_text(manifest['source'])}: {counted(manifest['utterances'], 'utterance')}, "
        lead += f"{manifest['missing']:,} of them missing"
        if manifest["text"]:
            title, text = "Length of the text", manifest["text"]
            chart = draw_scatter(text["lengths"], title, ("s", "characters"))
            note = f"column {_text(text['column'])}; slowest and fastest are marked"
            figures.append(_figure(title, note, chart))
        for column in manifest["columns"]:
            name = _text(column["name"])
            rows: list[list[Cell]] = [
                [
                    _id(group["value"] or "(empty)"),
                    group["utterances"],
                    _length(group["audio_seconds"]),
                ]
                for group in column["groups"]
            ]
            note = counted(column["distinct"], "value")
            if column["distinct"] > len(rows):
                note += f", the {len(rows)} with most audio"
            table = _table(f"Column {name}", [name, "utterances", "audio"], rows)
            figures.append(_figure(name, note, table))
    return _section("Utterances", _grid(figures), lead)


def _histogram(histogram: Histogram) -> str:
    name, unit = histogram.name, escape(histogram.unit)
    title = _TITLES.get(name, name.capitalize())
    total = sum(histogram.counts) + histogram.zeros
    if not total:
        return _figure(escape(title), "no utterance has a value", "")
    span = f"{number(histogram.maximum, 3)} {unit}"
    note = f"median {number(histogram.median, 3)} · {number(histogram.minimum, 3)} to {span}"
    if histogram.is_log:
        note = f"{histogram.zeros:,} of {total:,} have none · at most {span}"
    if histogram.zeros == total:
        return _figure(escape(title), f"none in {counted(total, 'utterance')}", "")
    chart = draw_histogram(histogram, title)
    return _figure(escape(title), note, chart)


def _statistics(report: Report) -> str:
    """Show statistics of utterances, and the outliers by these."""
    headings = ["id", "why", "duration<br><small>s</small>"]
    content = ""
    levels = report.levels
    for of_version in report.statistics:
        figures = [*map(_histogram, of_version["histograms"])]
        if levels is not None and "level" in of_version["units"]:
            title, unit = "Level against duration", of_version["units"]["level"]
            chart = draw_scatter(levels, title, ("s", unit))
            levels = None
            figures.append(_figure(title, "outliers are marked", chart))
        for name, unit in of_version["units"].items():
            short = escape(unit.partition(" of ")[0])  # "dB of full scale"
            headings.append(f"{name.replace('_', ' ')}<br><small>{short}</small>")
        counts = counted(of_version["utterances"], "utterance")
        content += f"<h3>{_text(of_version['name'])} <small>{counts}</small></h3>"
        content += _grid(figures)
    rows = []
    for one in report.outliers:
        rules = _text(", ".join(one["rules"]))
        row: list[Cell] = [_id(one["id"]), rules, one["audio_seconds"]]
        for of_version, values in zip(report.statistics, one["statistics"], strict=True):
            row += [*(values or dict.fromkeys(of_version["units"], math.nan)).values()]
        rows.append(row)
    outliers = _table("Outliers", headings, rows)
    lead = "The extreme utterances by each statistic."
    return _section("Recordings", content) + _section("Outliers", outliers, lead)


def _voices(voices: Document) -> str:
    """Show the nearest voices of speakers and of utterances."""
    figures = []
    if "speakers" in voices:
        note = f"the nearest pairs of {counted(len(voices['speakers']), 'speaker')}"
        figures.append(_listing("Nearest speakers", note, voices["speakers"][:_MOST_SPEAKERS]))
        note = f"{voices['nearer_to_another']:,} of {counted(voices['compared'], 'utterance')}"
        figures.append(_listing("Nearer to another speaker", note, voices["confused"]))
    note = "of the utterances shown below"
    figures.append(_listing("Nearest utterances", note, voices["neighbours"]))
    return _section("Voices", _grid(figures), f"{_text(voices['path'])}: cosines of vectors")


def _listing(title: str, note: str, records: Sequence[Document]) -> str:
    """Show records as a table, whose headings are their keys."""
    content = ""
    if records:
        headings = [key.replace("_", " ") for key in records[0]]
        rows = [
            [_id(value) if isinstance(value, str) else value for value in record.values()]
            for record in records
        ]
        content = _table(title, headings, rows)
    return _figure(title, note, content)


def _duplicates(report: Report) -> str:
    compared = counted(report.duplicates["compared"], "utterance")
    lead = f"{compared} compared by the bytes of the audio: {report.duplicates['utterances']:,} "
    lead += "have the same audio as another"
    content = _same(report.duplicates)
    channels = report.identical_channels
    if channels["utterances"]:
        what = f"{counted(channels['utterances'], 'utterance')} with identical channels"
        content += f"<h3>{what}</h3>{_same(channels)}"
    return _section("Duplicates", content, lead)


def _same(duplicates: Document) -> str:
    items = (f"<li>{', '.join(map(_id, ids))}</li>" for ids in duplicates["examples"])
    return f"<ul>{''.join(items)}</ul>"


def _features(versions: Sequence[Document]) -> str:
    """Show what is in each version: dimensions or codebooks, and its config."""
    figures, details, lead = [], "", ""
    if len(versions) > _MOST_DETAILS:
        lead = f"the first {_MOST_DETAILS} of {len(versions)} versions"
    for version in versions[:_MOST_DETAILS]:
        name, things = _text(version["name"]), "frames"
        if version["frames"] == version["utterances"]:  # of vectors, too
            things = "utterances"
        note = f"{version['sampled_frames']:,} of {version['frames']:,} {things}"
        if version["codebooks"]:
            headings = ["codebook", "size", "used", "bits", "perplexity"]
            rows = [[place, *book.values()] for place, book in enumerate(version["codebooks"])]
            table = _table(f"Codebooks of {name}", headings, rows)
            figures.append(_figure(f"{name}: use of codebooks", note, table))
        if len(version["mean"]) > 1:
            figures.append(_band(version, note))
        config = _text(json.dumps(version["config"], indent=2), _LONGEST_CONFIG)
        details += f"<details><summary>{name}: config and fingerprint</summary>"
        if version["fault"]:
            details += f"<p>Not summarised: {_text(version['fault'], 400)}</p>"
        details += f"<p>{version['fingerprint']}</p><p>{_text(version['units'], 400)}</p>"
        details += f"<pre>{config}</pre></details>"
    return _section("Features", _grid(figures) + details, lead)


def _clips(clips: Sequence[Clip], room: int) -> str:
    """Show clips, within that many bytes."""
    shown = []
    for clip in clips:
        silenced = clip
        if isinstance(clip.sound, bytes):
            silenced = replace(clip, sound="no room for its sound")
        shown.append(_clip(silenced))
    room -= sum(map(len, map(_encode, shown)))
    while room < 0:
        room += len(_encode(shown.pop()))
    for place, clip in enumerate(clips[: len(shown)]):
        with_sound = _clip(clip)
        room -= len(with_sound) - len(shown[place])
        if room < 0:
            break
        shown[place] = with_sound
    lead = "Outliers, then a random sample. Time goes to the right; at most the first 6 s."
    return _section("Look and listen", _grid(shown), lead)


def _clip(clip: Clip) -> str:
    content = ""
    for what, png in clip.pictures:
        source = f"data:image/png;base64,{b64encode(png).decode()}"
        content += f'<img alt="{_text(what)}" src="{source}">'
    if isinstance(clip.sound, bytes):
        source = f"data:audio/wav;base64,{b64encode(clip.sound).decode()}"
        label = _text(f"Play {clip.shown['id']}")
        content += f'<audio controls preload=metadata aria-label="{label}" src="{source}"></audio>'
    else:
        content += f"<p>{_text(clip.sound)}</p>"
    note = f"{escape(clip.shown['why'])} · {hours(clip.shown['audio_seconds'])}"
    return _figure(_id(clip.shown["id"]), note, content, "clip")
