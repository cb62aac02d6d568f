"""What is shown of a cache, a dataset or a batch: a line in a console; in a notebook a table, and a picture of an item.

Ids, names and values may be a stranger's, and a cache may be damaged: all text is escaped, and nothing raises."""

from __future__ import annotations

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import hours, megabytes

if TYPE_CHECKING:
    from featcache.loader.cache import Cache

_PICTURE_SECONDS = 10.0
"""How much of an item a picture shows, from its beginning."""

_WIDTH, _HEIGHT = 600, 128
"""The most pixels of a picture."""

_LONGEST = 200
"""The most characters of a text that is shown."""

_COUNTED = ("parts", "utterances")


class Batch(dict[str, Any]):
    """A batch: a dictionary, of which a notebook shows shapes and the first item."""

    def _repr_html_(self) -> str:
        return card("Batch", self._facts, self._first_item)

    def _facts(self) -> dict[str, str]:
        facts = {}
        for name, value in self.items():
            for inner, one in value.items() if isinstance(value, Mapping) else [("", value)]:
                facts[f"{name} {inner}".strip()] = _described(one)
        return facts

    def _first_item(self) -> NDArray[Any]:
        if not self["ids"]:
            return np.empty(0)
        features, lengths = self["features"], self["lengths"]
        if isinstance(features, Mapping):  # of several versions, the first
            features, lengths = next(iter(features.values())), next(iter(lengths.values()))
        first = features[0, : int(lengths[0])].detach().cpu()
        values: NDArray[Any] = (first.float() if first.dtype.is_floating_point else first).numpy()
        return values


def line_of(cache: Cache) -> str:
    """A cache as one line."""
    facts = (f"{value} {name}" if name in _COUNTED else value for name, value in _facts_of(cache).items())
    return f"{type(cache).__name__}({cache.version.path.name}: {', '.join(facts)})"


def card_of(cache: Cache) -> str:
    """HTML that shows a cache, and its first utterance."""
    title = f"{type(cache).__name__} {cache.version.path.name}"
    return card(title, lambda: _facts_of(cache), lambda: first_of(cache, range(len(cache))))


def _facts_of(cache: Cache) -> dict[str, str]:
    """What a cache holds, in numbers with their units."""
    spec, num_frames = cache.spec, int(cache.lengths.sum())
    num_bytes = num_frames * math.prod(spec.item_shape) * cache.version.dtype.itemsize
    shape = ", ".join(map(str, ("frames", *spec.item_shape)))
    parts = getattr(cache, "parts", None)  # of a corpus
    return {
        **({} if parts is None else {"parts": f"{len(parts):,}"}),
        "utterances": f"{len(cache):,}",
        "duration": f"{hours(num_frames / spec.frame_rate)} of frames",
        "size": megabytes(num_bytes),
        "features": f"{spec.dtype}{' in uint8' * spec.is_quantized} [{shape}] at {spec.frame_rate:g} Hz",
    }


def first_of(cache: Cache, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[Any]:
    """The frames that a picture shows of the first of some utterances, compared with their checksum."""
    if not len(positions):
        return np.empty(0)
    return cache.item(positions[0], check=True)[: math.ceil(_PICTURE_SECONDS * cache.spec.frame_rate)]


def card(title: str, facts: Callable[[], Mapping[str, object]], picture: Callable[[], NDArray[Any]]) -> str:
    """HTML that shows facts, and features `[frames, ...]` as a picture; what raises is shown as its message."""
    rows: dict[str, object] = {}
    image = ""
    try:
        rows |= facts()
        image = _image(picture())
    except Exception as error:  # noqa: BLE001 - a notebook that fails to show a cache says nothing about the cache
        rows["not shown"] = f"{type(error).__name__}: {error}"
    table = "".join(
        f'<tr><th style="text-align:left">{_escaped(name)}</th><td style="text-align:left">{_escaped(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><strong>{_escaped(title)}</strong><table>{table}</table>{image}</div>"


def png(levels: NDArray[np.uint8]) -> bytes:
    """A PNG file of grey levels, uint8 `[height, width]`.

    Source: W3C, Portable Network Graphics (PNG) Specification, sections 5 and 11.2."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = levels.shape
    header = struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)
    lines = np.pad(levels, ((0, 0), (1, 0))).tobytes()  # each begins with its filter: none
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def _image(features: NDArray[Any]) -> str:
    """An image element of features `[frames, ...]`, time to the right and the first dimension at the bottom."""
    if not features.size or features.ndim < 2:
        return ""
    values = features.reshape(len(features), -1).astype(np.float32)
    values = values[:: -(-len(values) // _WIDTH), :: -(-values.shape[1] // _HEIGHT)]
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, [1, 99]) if finite.size else (0.0, 1.0)
    scaled = np.nan_to_num((values - low) / max(high - low, 1e-12), posinf=1, neginf=0).clip(0, 1)
    data = b64encode(png((255 * scaled).astype(np.uint8).T[::-1])).decode()
    style = f"image-rendering:pixelated;width:{len(values)}px;height:{_HEIGHT}px;max-width:100%"
    return f'<img alt="features of the first item" style="{style}" src="data:image/png;base64,{data}">'


def _described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {getattr(value, 'device', 'cpu')}"
    if isinstance(value, list):
        return f"{len(value):,}: {', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''}"
    return str(value)


def _escaped(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")
