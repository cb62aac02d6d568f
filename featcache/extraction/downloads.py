"""Reads ahead: files at URLs are fetched before a worker wants them, by many threads that mostly wait for servers.

The engine says which files will be wanted (`expect`), a batch at a time and in order, as long as there `is_room`; the
worker that decodes a file takes it. Rows that cut the same file share what was fetched as long as one of them is
expected. A file that nobody expected is fetched when it is wanted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

from featcache.audio.remote import Fetched, TriedInVainError, fetch
from featcache.errors import AudioError, Reason, counted
from featcache.manifest import Utterance
from featcache.manifest.audio_locations import AudioLocation, Url, locate, without_secrets

_PER_WORKER = 32
_MOST = 256
_LEAST = 64
"""Requests at once: enough for a server that takes 50 ms to answer, and for workers that decode 600 files a second."""

_MOST_IN_A_ROW = 100
"""Files that cannot be fetched, one after the other, until it is no use to go on: the network is gone, say."""

_AHEAD_BYTES = 256 << 20
"""The bytes that may be held ahead, approximately. One batch is held in any case."""


class Downloads:
    """The files that are being fetched, or were and are still wanted.

    Leaving the `with` block gives up what has not been fetched.

    Args:
        root: What relative paths are relative to.
        workers: The number of threads that decode.
        give_up: Called once, with the reason, if nothing can be fetched any more.
    """

    def __init__(self, root: AudioLocation, workers: int, give_up: Callable[[str], object]) -> None:
        self._root = root
        self._give_up = give_up
        self._at_once = min(_MOST, max(_LEAST, _PER_WORKER * workers))
        self._threads = ThreadPoolExecutor(self._at_once, "featcache-fetch")
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._files: dict[Url, Future[Fetched]] = {}
        self._wanted: Counter[Url] = Counter()  # how often each will be taken
        self._sizes: dict[Url, int] = {}  # of those that have been fetched
        self._fetched_bytes = self._fetched_files = 0
        self._in_vain = 0  # files in a row

    def __enter__(self) -> Downloads:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)

    @property
    def is_room(self) -> bool:
        """Whether more should be expected, so that threads and memory are used."""
        with self._lock:
            mean = self._fetched_bytes / self._fetched_files if self._fetched_files else 0.0
            under_way = len(self._files) - len(self._sizes)
            held = sum(self._sizes.values()) + mean * under_way
            # Before any has come, nobody knows how large they are: the number doubles with those that have.
            return under_way < min(2 * self._at_once, 8 + 2 * self._fetched_files) and held < _AHEAD_BYTES

    def expect(self, utterances: Sequence[Utterance]) -> None:
        """Begin to fetch the files of a batch, which will be taken in this order, once for each run of equal paths."""
        for url in self._urls(utterances):
            with self._lock:
                self._wanted[url] += 1
                if url not in self._files:
                    self._files[url] = self._threads.submit(self._fetch, url)

    def take(self, url: Url) -> Fetched:
        """A file; waits until it is fetched.

        Raises:
            AudioError: It cannot be fetched, or is empty.
        """
        with self._lock:
            future = self._files.get(url)
            if future is not None:
                self._wanted[url] -= 1
                if not self._wanted[url]:
                    del self._wanted[url], self._files[url]
                    self._sizes.pop(url, None)
        return fetch(url, self._wait) if future is None else future.result()

    def _urls(self, utterances: Iterable[Utterance]) -> Iterable[Url]:
        for path, _ in groupby(utterances, key=lambda utterance: utterance.path):
            location = locate(self._root, path)
            if isinstance(location, Url):
                yield location

    def _fetch(self, url: Url) -> Fetched:
        try:
            fetched = fetch(url, self._wait)
        except TriedInVainError as error:
            with self._lock:
                self._in_vain += 1
                is_hopeless = self._in_vain == _MOST_IN_A_ROW
            if is_hopeless:
                count = counted(_MOST_IN_A_ROW, "audio file")
                self._give_up(f"{count} in a row could not be fetched, the last one {without_secrets(url)}: {error}")
                self._closed.set()
            raise
        with self._lock:
            self._in_vain = 0
            self._fetched_bytes += fetched.stamp.size
            self._fetched_files += 1
            if url in self._files:
                self._sizes[url] = fetched.stamp.size
        return fetched

    def _wait(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise AudioError(Reason.FILE_UNREADABLE, "cannot be fetched: the run ends")
