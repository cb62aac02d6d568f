"""One corpus, described as other tools do: each function writes a manifest beside a
folder of clips."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RATE = 8000


class Clip(NamedTuple):
    """A file below the corpus's folder, said by a speaker."""

    path: str
    samples: int
    text: str
    speaker: str

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    @property
    def seconds(self) -> float:
        return self.samples / RATE


CLIPS = [
    Clip(f"wavs/{number}_{speaker}.wav", 3000 + 100 * number, f"say {number}, please", speaker)
    for number in range(4)
    for speaker in ("ann", "bob")
]
"""A small corpus."""


class Written(NamedTuple):
    """A manifest, and how it is read."""

    manifest: Path
    format: str
    """What it is recognised as."""
    ids: list[str]
    paths: list[str]
    columns: tuple[str, ...] = ("text", "speaker")
    """The columns that have the clips' texts and speakers, where the format has any."""
    values: dict[str, str] | None = None
    has_seconds: bool = False
    """Whether rows have durations."""


Writer = Callable[[Path, Sequence[Clip]], Written]


def _by_stem(
    manifest: Path, format_name: str, clips: Sequence[Clip], top: Path, **how: Any
) -> Written:
    """A manifest whose rows are called after the files, and have absolute paths."""
    paths = [str(top / clip.path) for clip in clips]
    return Written(manifest, format_name, [clip.stem for clip in clips], paths, **how)


def _by_path(manifest: Path, format_name: str, clips: Sequence[Clip], **how: Any) -> Written:
    """A manifest whose rows are relative paths, which stand for ids."""
    paths = [clip.path for clip in clips]
    return Written(manifest, format_name, paths, paths, **how)


def _lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _json_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return _lines(path, [json.dumps(row) for row in rows])


def folder(top: Path, clips: Sequence[Clip]) -> Written:
    paths = sorted(clip.path for clip in clips)
    return Written(top, "folder", [path.removesuffix(".wav") for path in paths], paths, ())


def kaldi(top: Path, clips: Sequence[Clip]) -> Written:
    data = top / "data"
    data.mkdir()
    _lines(data / "wav.scp", [f"{clip.stem} {top / clip.path}" for clip in clips])
    _lines(data / "text", [f"{clip.stem} {clip.text}" for clip in clips])
    _lines(data / "utt2spk", [f"{clip.stem} {clip.speaker}" for clip in clips])
    return _by_stem(data, "kaldi", clips, top)


def kaldi_segments(top: Path, clips: Sequence[Clip]) -> Written:
    written = kaldi(top, clips)
    _lines(
        top / "data" / "segments", [f"{clip.stem} {clip.stem} 0 {clip.seconds}" for clip in clips]
    )
    return written._replace(has_seconds=True)


def objects(name: str, file: str, of_clip: Callable[[Clip], dict[str, Any]], **how: Any) -> Writer:
    """Writes an object of JSON for each clip, which has its relative path."""

    def write(top: Path, clips: Sequence[Clip]) -> Written:
        return _by_path(
            _json_lines(top / file, [of_clip(clip) for clip in clips]), name, clips, **how
        )

    return write


def table(
    name: str, file: str, header: str, line: str, columns: tuple[str, ...] = ("text", "speaker")
) -> Writer:
    """Writes a line for each clip, which begins with its path or its id, below a header,
    if there is one."""

    def write(top: Path, clips: Sequence[Clip]) -> Written:
        lines = [
            line.format(**clip._asdict(), id=clip.stem, seconds=clip.seconds) for clip in clips
        ]
        manifest = _lines(top / file, [*filter(None, [header.format(top=top)]), *lines])
        written = _by_path(manifest, name, clips, columns=columns)
        return (
            written
            if line.startswith("{path}")
            else written._replace(ids=[clip.stem for clip in clips])
        )

    return write


nemo = objects(
    "nemo",
    "nemo.json",
    lambda clip: {
        "audio_filepath": clip.path,
        "duration": clip.seconds,
        "text": clip.text,
        "speaker": clip.speaker,
    },
    has_seconds=True,
)


def recording(top: Path, clip: Clip) -> dict[str, Any]:
    return {
        "id": clip.stem,
        "sources": [{"type": "file", "channels": [0], "source": str(top / clip.path)}],
        "sampling_rate": RATE,
        "num_samples": clip.samples,
        "duration": clip.seconds,
        "channel_ids": [0],
    }


def _whole(clip: Clip) -> dict[str, Any]:
    return {"id": clip.stem, "start": 0.0, "duration": clip.seconds, "channel": 0}


def supervision(clip: Clip) -> dict[str, Any]:
    return {**_whole(clip), "recording_id": clip.stem, "text": clip.text, "speaker": clip.speaker}


def lhotse_recordings(top: Path, clips: Sequence[Clip]) -> Written:
    manifest = _json_lines(
        top / "digits_recordings_all.jsonl", [recording(top, clip) for clip in clips]
    )
    return _by_stem(manifest, "lhotse", clips, top, columns=(), has_seconds=True)


def lhotse_supervisions(top: Path, clips: Sequence[Clip]) -> Written:
    lhotse_recordings(top, clips)
    manifest = _json_lines(
        top / "digits_supervisions_all.jsonl", [supervision(clip) for clip in clips]
    )
    return _by_stem(manifest, "lhotse", clips, top, has_seconds=True)


def lhotse_cuts(top: Path, clips: Sequence[Clip]) -> Written:
    rows = [
        {
            **_whole(clip),
            "supervisions": [supervision(clip)],
            "recording": recording(top, clip),
            "type": "MonoCut",
        }
        for clip in clips
    ]
    path = _json_lines(top / "cuts.jsonl", rows)
    packed = top / "cuts.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return _by_stem(packed, "lhotse", clips, top, has_seconds=True)


def shar(top: Path, clips: Sequence[Clip]) -> Written:
    """Lhotse Shar, as its own writer makes it: two shards of FLAC."""
    from lhotse import CutSet, Recording, SupervisionSegment

    cuts = []
    for clip in clips:
        cut = Recording.from_file(top / clip.path, recording_id=clip.stem).to_cut()
        cut.id = clip.stem
        said = {"text": clip.text, "speaker": clip.speaker}
        cut.supervisions = [SupervisionSegment(clip.stem, clip.stem, 0, cut.duration, **said)]
        cuts.append(cut)
    folder, half = top / "shar", -(-len(clips) // 2)
    folder.mkdir()
    CutSet.from_cuts(cuts).to_shar(folder, {"recording": "flac"}, shard_size=half, verbose=False)
    ids = [clip.stem for clip in clips]
    places = [f"recording.{row // half:06d}.tar/{id_}.flac" for row, id_ in enumerate(ids)]
    return Written(folder, "lhotse", ids, places, has_seconds=True)


def audiofolder(top: Path, clips: Sequence[Clip]) -> Written:
    inside = [clip.path.partition("/")[2] for clip in clips]
    rows = [f"{path},{clip.text},{clip.speaker}" for path, clip in zip(inside, clips, strict=True)]
    _lines(
        top / clips[0].path.partition("/")[0] / "metadata.csv", ["file_name,text,speaker", *rows]
    )
    return _by_path(top, "audiofolder", clips)


def speechbrain_csv(top: Path, clips: Sequence[Clip]) -> Written:
    rows = [
        f"{clip.stem}, {clip.seconds}, $data_root/{clip.path}, {clip.speaker}, {clip.text}"
        for clip in clips
    ]
    manifest = _lines(top / "sb.csv", ["ID,duration,wav,spk_id,wrd", *rows])
    how = {"columns": ("wrd", "spk_id"), "values": {"data_root": str(top)}}
    return _by_stem(manifest, "speechbrain", clips, top, **how)


def speechbrain_json(top: Path, clips: Sequence[Clip]) -> Written:
    rows = {
        clip.stem: {
            "wav": f"{{data_root}}/{clip.path}",
            "length": clip.seconds,
            "words": clip.text,
            "spk": clip.speaker,
        }
        for clip in clips
    }
    (top / "sb.json").write_text(json.dumps(rows, indent=2))
    how = {"columns": ("words", "spk"), "values": {"data_root": str(top)}}
    return _by_stem(top / "sb.json", "speechbrain", clips, top, **how)


WRITERS: dict[str, Writer] = {
    "folder": folder,
    "kaldi": kaldi,
    "kaldi with segments": kaldi_segments,
    "nemo": nemo,
    "lhotse recordings": lhotse_recordings,
    "lhotse supervisions": lhotse_supervisions,
    "lhotse cuts": lhotse_cuts,
    "audiofolder": audiofolder,
    "speechbrain csv": speechbrain_csv,
    "speechbrain json": speechbrain_json,
    "fairseq": table("fairseq", "train.tsv", "{top}", "{path}\t{samples}", ()),
    "ljspeech": table("ljspeech", "metadata.csv", "", "{id}|{text}|{text}", ("text",)),
    "piper": table("piper", "piper.csv", "", "{id}|{speaker}|{text}"),
    "f5": table("f5", "f5.csv", "audio_file|text", "{path}|{text}", ("text",)),
    "gpt-sovits": table("gpt-sovits", "tts.list", "", "{path}|{speaker}|EN|{text}"),
    "styletts2": table("styletts2", "style.txt", "", "{path}|{text}|{speaker}"),
    "vits": table("vits", "vits.txt", "", "{path}|{speaker}|{text}"),
    "qwen3-tts": objects(
        "jsonl",
        "tts.jsonl",
        lambda clip: {"audio": clip.path, "text": clip.text, "ref_audio": CLIPS[0].path},
        columns=("text",),
    ),
    "moshi": objects(
        "jsonl",
        "moshi.jsonl",
        lambda clip: {"path": clip.path, "duration": clip.seconds},
        columns=(),
        has_seconds=True,
    ),
    "semicolons": table("csv", "train.csv", "id;path;text;speaker", "{id};{path};{text};{speaker}"),
    "paths": table("paths", "train.txt", "", "{path}", ()),
}
"""Every form of a manifest, by name."""


def dataset(top: Path, clips: Sequence[Clip], saved: bool) -> Written:
    """Hugging Face's, with the files' bytes inside: two tables of Arrow, or of Parquet."""
    import pyarrow
    import pyarrow.parquet

    data = top / "dataset"
    data.mkdir()
    names, ids = [], []
    for number, part in enumerate((clips[: len(clips) // 2], clips[len(clips) // 2 :])):
        name = f"data-{number}.{'arrow' if saved else 'parquet'}"
        audio = [{"bytes": (top / clip.path).read_bytes(), "path": clip.path} for clip in part]
        columns = {"audio": audio, "path": [clip.path for clip in part]}
        columns |= {
            "text": [clip.text for clip in part],
            "speaker": [clip.speaker for clip in part],
        }
        table = pyarrow.table(columns)
        if saved:
            with (
                pyarrow.OSFile(str(data / name), "wb") as file,
                pyarrow.ipc.new_stream(file, table.schema) as stream,
            ):
                stream.write_table(table)
        else:
            pyarrow.parquet.write_table(table, data / name)
        names.append({"filename": name})
        ids += [f"{name}/audio/{row}" for row in range(len(part))]
    if saved:
        (data / "state.json").write_text(json.dumps({"_data_files": names}))
    return Written(data, "datasets", ids, ids)
