"""Extraction from audio at URLs, beside the same from local files: what the way to a server costs.

    pip install '.[extract,cloud]'
    python scripts/bench/audio_by_url.py [--hours 2] [--latency 50] [--threads 2] [--rounds 3] [--json]

The corpus is the `long` one of `corpus.py`: FLAC files of 12 s, about 150 kB. A web server on this machine's loopback
waits for the latency before it answers each request. It is a process of its own and shares the cores, as a server
elsewhere would not: its CPU time is in the table, and so is the ratio that is left when it is taken off, which is what
the cores would do if the server were elsewhere. In each round, local files and URLs take turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from corpus import make_corpus

from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import Options, plan_extraction
from featcache.manifest import read_manifest

SERVER = """
import asyncio, os, sys, time

folder, latency = sys.argv[1], float(sys.argv[2])

async def serve(reader, writer):
    try:
        while True:
            request = (await reader.readuntil(b"\\r\\n\\r\\n")).split(b"\\r\\n", 1)[0].decode().split()
            await asyncio.sleep(latency)
            if request[1] == "/cpu":
                data = str(time.process_time()).encode()
            else:
                with open(folder + request[1], "rb") as file:
                    data = file.read()
            head = f'HTTP/1.1 200 OK\\r\\nETag: "{len(data)}"\\r\\nContent-Length: {len(data)}\\r\\n\\r\\n'
            writer.write(head.encode() + (b"" if request[0] == "HEAD" else data))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--latency", type=float, default=50.0, help="milliseconds before each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--corpora", type=Path, default=Path(tempfile.gettempdir()) / "corpora")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    manifest = make_corpus(arguments.corpora, "long", hours=arguments.hours)
    command = [sys.executable, "-c", SERVER, str(manifest.parent), str(arguments.latency / 1000)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            result = measure(manifest, url, arguments.threads, arguments.rounds)
        finally:
            server.kill()
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['files']:,} files, {result['megabytes']:.0f} MB, {arguments.latency:g} ms before each answer")
    for what in ("local", "url"):
        print(f"  {what:8}{result[what]['seconds']:8.2f} s{result[what]['cpu']:8.2f} s of CPU")
    print(f"  server  {'':8}  {result['server_cpu']:8.2f} s of CPU")
    print(f"  local / url: {result['ratio']:.2f}; without the server's CPU: {result['ratio_server_elsewhere']:.2f}")


def measure(manifest: Path, url: str, threads: int, rounds: int) -> dict:
    """Extract a corpus from its files and from a server, in turns."""
    roots = {"local": str(manifest.parent), "url": url}
    seconds: dict[str, list[float]] = {what: [] for what in roots}
    cpu: dict[str, list[float]] = {what: [] for what in roots}
    server_cpu = []
    extract(manifest, roots["local"], threads)  # the page cache, and what is compiled and imported once
    for _ in range(rounds):
        for what, root in roots.items():
            before = cpu_of(url)
            start, start_cpu = perf_counter(), process_time()
            extract(manifest, root, threads)
            seconds[what].append(perf_counter() - start)
            cpu[what].append(process_time() - start_cpu)
            if what == "url":
                server_cpu.append(cpu_of(url) - before)
    elsewhere = [
        local / max(remote - used / 2, 1e-9)
        for local, remote, used in zip(seconds["local"], seconds["url"], server_cpu, strict=True)
    ]
    files = list(manifest.parent.rglob("*.flac"))
    return {
        "files": len(files),
        "megabytes": sum(path.stat().st_size for path in files) / 1e6,
        **{what: {"seconds": median(seconds[what]), "cpu": median(cpu[what])} for what in roots},
        "server_cpu": median(server_cpu),
        "ratio": median(a / b for a, b in zip(seconds["local"], seconds["url"], strict=True)),
        "ratio_server_elsewhere": median(elsewhere),
    }


def extract(manifest: Path, root: str, threads: int) -> None:
    """Extract a corpus into a cache that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        options = Options(device="cpu", threads=threads)
        plan = plan_extraction(
            read_manifest(manifest, root=root, carry=False), [load_config("fbank80")], Path(folder) / "cache", options
        )
        summary = run_extraction(plan, run_locally)
        assert not summary.failed


def cpu_of(url: str) -> float:
    """Seconds of CPU that the server has used."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/cpu") as answer:
        return float(answer.read())


if __name__ == "__main__":
    main()
