"""`featcache verify --recompute`: what differs by more than rounding; and a device whose
memory is small."""

import re

import pytest
import torch
from cache_contents import only_version
from corpora import Corpus
from extractions import write_config
from odd_extractors import Halves, Slow
from row_extractors import HOP, Moments, Small

from featcache.care.compare import ClipResult, compare, tied_frames
from featcache.care.recompute import recompute
from featcache.care.sources import SourceCheck
from featcache.device import Device
from featcache.extractors.rows import Rows
from featcache.version.indexing import open_index

pytestmark = pytest.mark.usefixtures("trusted")


@pytest.fixture
def made(cli, plain, scratch):
    """Extracts clips, by default twelve, by an extractor of that name; gives what
    recomputes them in this process."""

    def make(extractor: str, module: str = "row_extractors", corpus: Corpus = plain, **params):
        config = write_config(scratch, extractor, module=module, **params)
        cli("extract", corpus.manifest(), "-c", config, "-o", scratch / "cache").with_code(0)
        version = only_version(scratch / "cache")
        index = open_index(version)
        return lambda: recompute(version, index, range(len(index)), SourceCheck(), Device("cpu", 1))

    return make


@pytest.mark.parametrize(
    ("latent", "is_tie"), [(0.25, True), (0.25 * (1 - 1e-6), True), (0.25 * (1 - 1e-3), False)]
)
def test_codes_that_rounding_changes_are_no_problem(made, quarters, monkeypatch, latent, is_tie):
    """Latents that are nearer to the border than rounding may lie on either side of it."""
    recomputed = made("Halves", "odd_extractors", quarters)
    again = recomputed()
    assert (again.utterances, again.identical, again.differing) == (4, 4, 0)
    latents = Halves.latents
    monkeypatch.setattr(Halves, "latents", lambda *call: torch.full_like(latents(*call), latent))
    monkeypatch.setattr(Device, "label", "another")
    again = recomputed()
    assert again.identical == 0
    assert again.differing == again.codes > 100
    assert again.tied == (again.codes if is_tie else 0)
    assert len(again.problems) == (0 if is_tie else 4)
    for problem in again.problems:
        assert (
            "codes differ by more than rounding; it was written "
            "on cpu, and this is another" in problem.message
        )


def test_what_is_beside_features_is_extracted_again_too(made, speech, monkeypatch):
    again = made("Moments", corpus=speech, piece=20)
    assert again().identical == len(speech.rows)
    encode = Moments.encode

    def one_more(*call):
        rows = encode(*call)
        return Rows(rows.features, {"counts": rows.side["counts"] + 1})

    monkeypatch.setattr(Moments, "encode", one_more)
    problems = again().problems
    assert len(problems) == len(speech.rows)
    assert all(problem.message.endswith("its counts differ") for problem in problems)


def test_rounding_is_relative_to_a_frame():
    """A code that differs is a tie where the latents agree, an error where they do not,
    or are not known."""
    latents = torch.ones(3, 4)
    moved = latents * torch.tensor([1 + 1e-5, 1 + 1e-4, 1.0])[:, None]
    codes = torch.zeros(3, 2, dtype=torch.long)
    others = torch.tensor([[0, 1], [1, 1], [0, 0]])
    found = compare(ClipResult(others, moved), ClipResult(codes, latents))
    assert (found.values, found.differing, found.mismatched) == (6, 3, 2)
    assert (found.first, found.last) == (2, 2)
    assert compare(ClipResult(others), ClipResult(codes)).mismatched == 3
    assert compare(ClipResult(latents * torch.nan), ClipResult(latents)).mismatched == 3


def test_noise_finds_ties_of_residual_codes():
    """Between two codewords that are equally near either is right; a code that is further
    away is not."""
    generator = torch.Generator().manual_seed(0)
    codebooks = [
        size * torch.randn(count, 8, generator=generator)
        for size, count in ((9, 16), (1, 2), (0.1, 16))
    ]

    def quantize(latents):
        codes = []
        for codebook in codebooks:
            codes.append(torch.cdist(latents, codebook.expand(len(latents), -1, -1)).argmin(2))
            latents = latents - codebook[codes[-1]]
        return torch.stack(codes, dim=2)

    latents = codebooks[0] + codebooks[1].mean(0)
    codes = quantize(latents[None])[0]
    tied, wrong_before, wrong_after = codes.clone(), codes.clone(), codes.clone()
    tied[:, 1] = 1 - codes[:, 1]
    tied[:, 2] = 0  # behind a tie: means nothing
    wrong_before[:, 0] = (codes[:, 0] + 1) % 16
    wrong_before[:, 1] = 1 - codes[:, 1]
    wrong_after[:, 2] = (codes[:, 2] + 1) % 16
    assert tied_frames(quantize, latents, codes, tied).all()
    assert not tied_frames(quantize, latents, codes, wrong_before).any()
    assert not tied_frames(quantize, latents, codes, wrong_after).any()
    assert not tied_frames(quantize, latents + 0.01 * codebooks[1][0], codes, tied).all()


# A device whose memory is small, which is a CPU that says it is full


def fails(monkeypatch, owner, method, fits, error=None):
    """Have a method run out of memory unless its input fits; gives the shapes of all
    inputs."""
    original = getattr(owner, method)
    shapes = []

    def limited(self, given, *rest):
        shapes.append(tuple(given.shape) if isinstance(given, torch.Tensor) else (len(given),))
        if not fits(shapes):
            raise error or torch.OutOfMemoryError("CUDA out of memory")
        return original(self, given, *rest)

    monkeypatch.setattr(owner, method, limited)
    return shapes


@pytest.mark.parametrize("piece", [0, 20])
def test_batches_that_do_not_fit_are_halved(made, monkeypatch, piece):
    """As in extraction: those that follow are small at once, also where a clip is in
    pieces of several lengths."""
    again = made("Moments", piece=piece)
    shapes = fails(monkeypatch, Moments, "encode", lambda shapes: shapes[-1][0] <= Small.limit)
    found = again()
    assert (found.utterances, found.identical, found.problems) == (12, 12, [])
    too_large = [rows for rows, _ in shapes if rows > Small.limit]
    assert 1 <= len(too_large) <= 4  # until 16 have become 2


def test_codes_and_their_latents_come_from_the_smaller_batches(made, monkeypatch):
    """Latents tell ties from errors, so they have to be those of the codes."""
    again = made("Halves", "odd_extractors")
    shapes = fails(monkeypatch, Halves, "latents", lambda shapes: shapes[-1][0] == 1)
    found = again()
    assert (found.identical, found.differing, found.problems) == (12, 0, [])
    assert [rows for rows, *_ in shapes[-11:]] == [1] * 11


def test_a_clip_that_fits_when_it_is_tried_once_more(made, monkeypatch):
    """Memory that others held may be free by then."""
    again = made("Slow", "odd_extractors")
    shapes = fails(monkeypatch, Slow, "extract", lambda shapes: len(shapes) != 3)
    assert again().identical == 12
    assert len(shapes) == 13


@pytest.mark.parametrize("extractor", ["Moments", "Slow"])
def test_a_clip_that_does_not_fit_is_a_problem_of_its_own(made, monkeypatch, extractor):
    if extractor == "Moments":
        again = made(extractor)
        fails(monkeypatch, Moments, "encode", lambda shapes: shapes[-1][1] < 60 * HOP)
    else:
        again = made(extractor, "odd_extractors")
        fails(monkeypatch, Slow, "extract", lambda shapes: len(shapes) not in (12, 13))
    found = again()
    kinds = {problem.kind for problem in found.problems}
    assert kinds == {"recompute"}
    assert found.utterances == 12 == found.identical + len(found.problems)
    assert found.problems[-1].id == "utt-11"
    assert found.problems[-1].message.startswith("utt-11: 11.wav: ")
    assert re.search(
        "too_long: 1 s do not fit on cpu|out_of_memory: .* takes more memory",
        found.problems[-1].message,
    )


def test_other_errors_of_a_device_are_not_taken_for_it(made, monkeypatch):
    again = made("Moments")
    fails(
        monkeypatch,
        Moments,
        "encode",
        lambda shapes: False,
        RuntimeError("CUDA error: an illegal memory access"),
    )
    found = again()
    assert {problem.kind for problem in found.problems} == {"recompute"}
    assert len(found.problems) == found.utterances
    message = "00.wav: extractor_error: RuntimeError: CUDA error: an illegal memory access (care/"
    assert message in found.problems[0].message


def test_the_command_goes_on_in_smaller_batches(cli, plain, scratch):
    """`Small` runs out of memory in every process anew, in torch's words and in those of
    cuBLAS."""
    config = write_config(scratch, "Small", module="row_extractors")
    assert cli("extract", plain.manifest(), "-c", config, "-o", scratch / "c").code == 0
    done = cli("verify", scratch / "c", "--recompute", 5, "--trust-remote-code").with_code(0)
    assert "extracted 5 again: 5 bit-identical" in done.out
