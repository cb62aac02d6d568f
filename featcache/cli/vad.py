"""`featcache vad`: a manifest of the segments of speech."""

from __future__ import annotations

import os
from pathlib import Path

import click

from featcache.cli import options
from featcache.cli.common import note, note_unfinished, say, say_json
from featcache.errors import FeatcacheError, counted, hours, percent
from featcache.storage.location import Location


def _seconds(name: str, default: float | None, meaning: str) -> options.Decorator:
    return click.option(
        name,
        type=options.Number(min=0),
        default=default,
        show_default=default is not None,
        metavar="SECONDS",
        help=meaning,
    )


@options.command()
@options.version_location
@options.output_file(help="The manifest to write: .csv, .jsonl or .parquet.", required=True)
@click.option(
    "--threshold",
    type=options.Number(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    metavar="P",
    help="Speech begins at this probability. It ends if the probability is 0.15 lower.",
)
@_seconds("--min-speech", 0.25, "Leave out shorter segments of speech.")
@_seconds("--min-silence", 0.1, "Shorter pauses do not end a segment.")
@_seconds("--pad", 0.03, "Make each segment longer by this time at both ends.")
@_seconds(
    "--max-speech",
    None,
    "Cut longer segments, at the longest pause if they have one.  [default: no limit]",
)
@options.force
@options.as_json
def vad(
    path: Location,
    output: Path,
    threshold: float,
    min_speech: float,
    min_silence: float,
    pad: float,
    max_speech: float | None,
    force: bool,
) -> None:
    """Write a manifest of speech segments. They come from the probabilities of speech in a
    version such as vad-silero, by the rule and defaults of Silero VAD. A row has the path,
    start, duration and channel of a segment, the id UTTERANCE-NUMBER, and the column
    `utterance`.

    \b
    Examples:
      featcache vad features/vad-silero -o segments.csv
      featcache vad features/vad-silero -o segments.csv --threshold 0.7 --max-speech 20
    """
    import math

    from featcache.loader.cache import Cache
    from featcache.manifest.read import manifest_of
    from featcache.manifest.write import WRITTEN, format_to_write, packed
    from featcache.stats.speech import SpeechRule, find_speech
    from featcache.storage.files import write_file
    from featcache.version.selection import select_version

    options.refuse_output(output, force)
    kind = format_to_write(output, None, "end it in .csv, .jsonl or .parquet")
    longest = math.inf if max_speech is None else max_speech
    rule = SpeechRule(threshold, min_speech, min_silence, pad, longest)
    version = select_version(path)
    note_unfinished(version)
    cache = Cache(version)
    rows, root = version.reading(lambda: find_speech(cache, rule))
    if not rows:
        what = f"no segment of speech in {counted(len(cache), 'utterance')}"
        raise FeatcacheError(f"{version.path}: {what}: nothing is written")
    write_file(output, packed(WRITTEN[kind](manifest_of(rows, root=root)), output))
    seconds = cache.spec.axis.seconds(int(cache.lengths.sum()))
    speech_seconds = sum(row["duration"] for row in rows)
    with_speech = len({row["utterance"] for row in rows})
    say_json(
        {
            "path": str(version.path),
            "output": str(output),
            "utterances": len(cache),
            "with_speech": with_speech,
            "segments": len(rows),
            "audio_seconds": seconds,
            "speech_seconds": speech_seconds,
        }
    )
    counts = f"{counted(len(rows), 'segment')} of {counted(with_speech, 'utterance')}"
    share = percent(speech_seconds / seconds)
    say(f"{output}: {counts}, {hours(speech_seconds)}: {share} of the audio")
    if with_speech < len(cache):
        say(f"  {counted(len(cache) - with_speech, 'utterance')} without speech")
    if root and not all(os.path.isabs(row["path"]) for row in rows):
        note(f"{output}: relative paths are relative to {root}: give --root {root}")
