"""Install each extra of this checkout into an environment of its own, and use it once.

    python scripts/check_extras.py                    all extras, one after the other
    python scripts/check_extras.py models torchaudio  these extras
    python scripts/check_extras.py --keep models      and leave its environment where it is

The newest releases that pip finds are installed, without constraints.txt: this finds what
a user gets today. Each environment is removed before the next one is made. One with
PyTorch takes up to 8 GB under $TMPDIR, and some minutes.

The last run: on 2026-11-28, with Python 3.13, x86-64, without a GPU.

LAST_RUN
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
FEATCACHE = [sys.executable, "-m", "featcache"]

SHOWN = (
    *("torch", "torchaudio", "transformers", "av", "pyarrow", "obstore", "ray", "numpy"),
    *("snac", "speechtokenizer", "speechbrain", "lhotse", "datasets", "pillow"),
)
"""The packages whose versions are printed."""


# The uses. Each runs in the extra's environment, in an empty folder.


def read() -> None:
    import featcache

    shutil.copytree(ROOT / "tests" / "version" / "format2" / "cache", "cache")
    cache = featcache.open("cache")
    assert len(cache[cache.ids[0]]) == cache.lengths[0]
    run("info", "cache")


def train() -> None:
    import featcache

    read()
    features, lengths = featcache.open("cache").batch([0, 1])
    assert features.shape[:2] == (2, max(lengths))


def extract(*options: object, manifest: object = EXAMPLES / "manifest.csv") -> None:
    run("extract", manifest, "-o", "features", "--device", "cpu", *options)
    run("verify", "features")


def extract_and_fit_units() -> None:
    extract("-c", "fbank80", "-c", "mfcc13")
    run("fit-kmeans", "features/mfcc13", "-k", "4", "-o", "units.safetensors")
    Path("units.yaml").write_text(
        "name: units\nextractor: units\nparams: {weights: units.safetensors}\n"
    )
    extract("-c", "units.yaml")


def use_models() -> None:
    import small_models
    import small_ssl

    for name in ("hubert", "wavlm", "w2v-bert"):
        small_ssl.save(name, Path(name))
        write_config("ssl", f"{{weights: {name}, layer: 2}}", name)
        extract("-c", f"{name}.yaml")
    small_models.encodec_24khz(Path("encodec"))
    write_config("encodec", "{weights: encodec, bandwidth: 6.0}", "codes", 24000)
    extract("-c", "codes.yaml")


def use_torchaudio() -> None:
    import torch
    from torchaudio import models, pipelines

    model = models.wav2vec2_model(**{**pipelines.WAV2VEC2_BASE._params, "aux_num_out": None})
    torch.save(model.state_dict(), "drawn.pth")
    write_config("torchaudio", "{bundle: WAV2VEC2_BASE, weights: drawn.pth, layer: 2}", "layer")
    extract("-c", "layer.yaml")


def use_packages_with_weights() -> None:
    extract("-c", "vad-silero", "-c", "f0-swift", "-c", "dnsmos")
    run("vad", "features/vad-silero", "-o", "segments.csv")


def use_speechtokenizer() -> None:
    from featcache.extractors.speechtokenizer import _model_class

    assert _model_class().__name__ == "SpeechTokenizer"


def use_snac() -> None:
    import small_models

    small_models.snac_24khz(Path("snac"))
    write_config("snac", "{weights: snac}", "codes", 24000)
    extract("-c", "codes.yaml")


def read_parquet() -> None:
    import pyarrow.csv
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.csv.read_csv(EXAMPLES / "manifest.csv"), "m.parquet")
    extract("--root", EXAMPLES, manifest="m.parquet")


def decode_m4a() -> None:
    import av
    import numpy as np

    with av.open("tone.m4a", "w") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        tone = np.sin(np.arange(32000) / 5).astype(np.float32)[None]
        for first in range(0, tone.shape[1], 1024):
            frame = av.AudioFrame.from_ndarray(tone[:, first : first + 1024], "fltp", "mono")
            frame.sample_rate, frame.pts = 16000, first
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    Path("m.csv").write_text("id,path\na,tone.m4a\n")
    extract(manifest="m.csv")


def read_from_a_server() -> None:
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

    handler = partial(SimpleHTTPRequestHandler, directory=EXAMPLES)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        extract("--root", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def use_ray() -> None:
    extract("--engine", "ray")


def draw_png() -> None:
    import featcache

    read()
    id_ = featcache.open("cache").ids[0]
    run("show", "cache", id_, "--plot", "a.png")
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def build_site() -> None:
    config = ROOT / "docs" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", config, "-d", Path.cwd() / "s"]
    subprocess.run(command, check=True)


def collect_tests() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def import_peers() -> None:
    import datasets
    import lhotse
    import lilcom
    import scipy
    import speechbrain
    import torchaudio

    extract()
    assert all((datasets, lhotse, lilcom, scipy, speechbrain, torchaudio))


USES: dict[str, tuple[str, Callable[[], None]]] = {
    "": ("", read),
    "torch": ("torch", train),
    "extract": ("extract", extract_and_fit_units),
    "models": ("extract,models", use_models),
    "torchaudio": ("extract,torchaudio", use_torchaudio),
    "analysis": ("extract,analysis", use_packages_with_weights),
    "speechtokenizer": ("extract,models,speechtokenizer", use_speechtokenizer),
    "snac": ("extract,models,snac", use_snac),
    "parquet": ("extract,parquet", read_parquet),
    "formats": ("extract,formats", decode_m4a),
    "cloud": ("extract,cloud", read_from_a_server),
    "ray": ("extract,ray", use_ray),
    "plot": ("plot", draw_png),
    "docs": ("docs", build_site),
    "test": ("extract,test", collect_tests),
    "bench": ("extract,bench", import_peers),
}
"""What is installed for each extra, and how it is used."""


def run(*words: object) -> None:
    """Run a command of featcache, which prints only if it fails."""
    done = subprocess.run([*FEATCACHE, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stderr}")


def write_config(extractor: str, params: str, name: str, rate: int = 16000) -> None:
    sections = f"extractor: {extractor}\nparams: {params}\naudio: {{sample_rate: {rate}}}\n"
    Path(f"{name}.yaml").write_text(f"name: {name}\n{sections}")


def use_inside(extra: str) -> None:
    """Use an extra, in its own environment, and print the versions that were used."""
    from importlib.metadata import PackageNotFoundError, version

    sys.path.append(str(ROOT / "tests" / "helpers"))
    USES[extra][1]()
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    print(", ".join(found))


def check(extra: str, keep: bool) -> str:
    """Install an extra, and use it; what was seen, in a line."""
    environment = Path(tempfile.mkdtemp(prefix="featcache-extra."))
    begun = time.monotonic()
    python = environment / "bin" / "python"
    installed, _ = USES[extra]
    source = f"{ROOT}[{installed}]" if installed else str(ROOT)
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    inside = {**variables, "PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    try:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", source]
        subprocess.run(pip, check=True, env=inside)
        seconds = time.monotonic() - begun
        (environment / "use").mkdir()
        done = subprocess.run(
            [python, Path(__file__).resolve(), "--inside", extra],
            cwd=environment / "use",
            env=inside,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return f"FAILED: {(done.stderr or done.stdout).strip()[-2000:]}"
        return f"{done.stdout.strip()} (installed in {seconds:.0f} s)"
    except subprocess.CalledProcessError as error:
        return f"FAILED: {error}"
    finally:
        if keep:
            print(f"  left in {environment}")
        else:
            shutil.rmtree(environment, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="by default all, and none")
    parser.add_argument("--keep", action="store_true", help="leave environments where they are")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside is not None:
        use_inside(asked.inside)
        return
    failed = 0
    for extra in asked.extras or USES:
        seen = check(extra, asked.keep)
        failed += seen.startswith("FAILED")
        print(f"{extra or '(none)':16} {seen}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
