"""Train a language model of speech on packed codes of two corpora, killed and resumed.

    pip install '.[extract,models]'
    python scripts/stories/train_speech_lm.py [--limit 300] [--steps 40] [--device cuda]

Two corpora, the digits of some speakers and those of the others, are tokenised by EnCodec
(24 kHz, 6 kbps; as in train_keywords.py, with random weights unless --weights are given).
A small decoder-only Transformer learns to tell each frame's codes from the frames before it.
It reads a `featcache.PackedLoader` over a weighted mixture of the two corpora.

The training runs twice: once in one process without an interruption; and once in two
processes, which are killed with SIGKILL in the middle, and then in four, which go on from the
latest checkpoint. The rows of a step are the same in number each time. The table has the loss
of each part of the run, and the largest difference of all steps.

The mask comes from `document_ids`: one function says which token attends to which. On a
GPU, `flex_attention` takes it. torch's flex_attention has no backward pass on a CPU, and
its varlen attention no CPU kernel. There, `scaled_dot_product_attention` takes the same
function as a dense mask, and the script compares it with the forward pass of
flex_attention."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from train_keywords import make_config
from training import OPTIONS, extract, split

import featcache

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from corpus import write_manifest
from harness import KEPT, Table, options, present, temporary_folder

TOKENS, ROWS = 512, 8
"""The frames of a row, and the rows of a step over all processes."""

WIDTH, HEADS, LAYERS = 64, 4, 2


class Attention(nn.Module):
    """Causal attention within documents."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.project(x).view(rows, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(attended(q, k, v, mask).transpose(1, 2).reshape(rows, tokens, WIDTH))


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Attention by a dense mask, or by a block mask of flex_attention."""
    if isinstance(mask, Tensor):
        return functional.scaled_dot_product_attention(q, k, v, mask)
    flex = torch.compile(flex_attention) if q.is_cuda else flex_attention
    return flex(q, k, v, block_mask=mask)


def mask_of(document_ids: Tensor, is_flex: bool) -> Any:
    """The mask in which a token attends to its own document up to itself; padding, to padding."""

    def sees(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    rows, tokens = document_ids.shape
    if is_flex:
        device = str(document_ids.device)
        return create_block_mask(sees, rows, None, tokens, tokens, device=device)
    place = torch.arange(tokens, device=document_ids.device)
    row = torch.arange(rows, device=document_ids.device)[:, None, None]
    return sees(row, None, place[:, None], place)[:, None]


class Model(nn.Module):
    """A decoder-only Transformer over frames of `codebooks` codes."""

    def __init__(self, codebooks: int, size: int) -> None:
        super().__init__()
        self.codes = nn.ModuleList(nn.Embedding(size, WIDTH) for _ in range(codebooks))
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.heads = nn.Linear(WIDTH, codebooks * size)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The sum of the loss over the frames of a batch that follow another frame."""
        codes, ids = batch["features"], batch["document_ids"]
        mask = mask_of(ids, ids.device.type == "cuda")
        x = self.places(batch["positions"])
        x = x + sum(embed(codes[..., book]) for book, embed in enumerate(self.codes))
        for number, (attention, layer) in enumerate(zip(self.attentions, self.layers, strict=True)):
            x = x + attention(self.norms[2 * number](x), mask)
            x = x + layer(self.norms[2 * number + 1](x))
        scores = self.heads(self.norms[-1](x[:, :-1])).unflatten(-1, (codes.shape[-1], -1))
        is_next = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
        return functional.cross_entropy(
            scores[is_next].flatten(0, 1), codes[:, 1:][is_next].flatten(), reduction="sum"
        )


def batches_of(folder: Path, rank: int, world_size: int, device: str) -> featcache.PackedLoader:
    """The rows of a rank: three tokens of the first corpus for each of the second."""
    sources = {
        name: featcache.FeatureDataset(featcache.open(folder / name), folder / f"{name}.csv", columns=[])
        for name in ("first", "second")
    }  # fmt: skip
    mixture = featcache.Mixture.weighted(sources, by="tokens", weights={"first": 3, "second": 1})
    return featcache.PackedLoader(
        mixture,
        tokens=TOKENS,
        rows=ROWS // world_size,
        overflow="error",
        window=32,
        rank=rank,
        world_size=world_size,
        dtype=torch.long,
        device=device,
    )


def train(rank: int, world_size: int, folder: Path, steps: int, device: str) -> None:
    """Train in one process of several, from the checkpoint in the folder, if there is one."""
    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    loader = batches_of(folder, rank, world_size, device)
    spec = loader.mixture.versions[0].cache.spec
    torch.manual_seed(0)
    model = Model(len(spec.codebook_sizes), max(spec.codebook_sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    path, losses = folder / "checkpoint.pt", []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        losses = saved["losses"]
    for batch in loader:
        if len(losses) == steps:
            break
        ids = batch["document_ids"]
        frames = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)).sum()
        totals = torch.stack([torch.zeros((), device=device), frames.float()])
        loss = model(batch)
        loss.backward()
        totals[0] = loss.detach()
        dist.all_reduce(totals)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= totals[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(totals[0] / totals[1]))
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state = {**states, "loader": loader.state_dict(), "losses": losses}
            torch.save(state, folder / "new.pt")
            os.replace(folder / "new.pt", path)
    if rank == 0:
        shares = {name: share.reached for name, share in loader.shares.items()}
        (folder / "done.json").write_text(json.dumps({"losses": losses, "shares": shares}))
    dist.destroy_process_group()


def run(world_size: int, folder: Path, steps: int, device: str, kill_after: int = 0) -> list[float]:
    """Train in so many processes; returns the losses of all steps. With `kill_after`, kill
    the processes once the checkpoint has so many steps."""
    (folder / f"rendezvous-{world_size}").unlink(missing_ok=True)
    context = mp.spawn(train, (world_size, folder, steps, device), world_size, join=False)
    if not kill_after:
        while not context.join():
            pass  # until all have ended
        return json.loads((folder / "done.json").read_text())["losses"]
    path = folder / "checkpoint.pt"
    while not path.exists() or len(torch.load(path, weights_only=True)["losses"]) < kill_after:
        sleep(0.05)
    for process in context.processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in context.processes:
        process.join()
    return torch.load(path, weights_only=True)["losses"]


def differences(loader: Iterator[dict[str, Any]]) -> float:
    """The largest difference between flex_attention and the dense mask, of one batch."""
    ids = next(loader)["document_ids"]
    q, k, v = torch.randn(3, len(ids), HEADS, TOKENS, WIDTH // HEADS, device=ids.device)
    with torch.inference_mode():
        dense, flex = (attended(q, k, v, mask_of(ids, is_flex)) for is_flex in (False, True))
    return float((dense - flex).abs().max())


def measure(asked: argparse.Namespace, folder: Path) -> tuple[Any, ...]:
    """Train without and with an interruption, and compare."""
    manifests = split(asked.data, folder, asked.limit)
    rows = [line.split(",") for line in manifests["all"].read_text().splitlines()]
    speaker = rows[0].index("speaker")
    speakers = sorted({row[speaker] for row in rows[1:]})
    first = speakers[: len(speakers) // 2]
    config = folder / "codes.yaml"
    config.write_text(yaml.safe_dump(make_config(asked)))
    for name in ("first", "second"):
        own = [row for row in rows[1:] if (row[speaker] in first) == (name == "first")]
        manifest = write_manifest(folder / f"{name}.csv", own, rows[0])
        extract(manifest, [config], folder / name, asked)
    device = str(asked.device)
    difference = differences(iter(batches_of(folder, 0, 1, device)))
    whole = run(1, folder, asked.steps, device)
    shares = json.loads((folder / "done.json").read_text())["shares"]
    (folder / "checkpoint.pt").unlink()
    killed = run(2, folder, asked.steps, device, kill_after=asked.steps // 3)
    resumed = run(4, folder, asked.steps, device)
    parts = {
        "first step": slice(0, 1),
        "in two processes, killed": slice(1, len(killed)),
        "in four processes, resumed": slice(len(killed), None),
        "last step": slice(-1, None),
    }
    table = Table("loss", {"one process": "{:.5f}", "killed and resumed": "{:.5f}"})
    for name, part in parts.items():
        table.add(name, *(sum(losses[part]) / len(losses[part]) for losses in (whole, resumed)))
    largest = max(abs(one - other) for one, other in zip(whole, resumed, strict=True))
    return (
        table,
        f"killed after {len(killed)} of {len(resumed)} steps; the largest difference of a step's "
        f"loss is {largest:.1e}",
        f"tokens of the first corpus: {shares['first']:.2%}, asked for 75 %",
        f"flex_attention and the dense mask differ by up to {difference:.1e}",
    )


def main() -> None:
    asked = options(
        __doc__,
        **{**OPTIONS, "limit": (300, "utterances, drawn at random")},
        weights=(str, "a folder, or facebook/encodec_24khz; random ones by default"),
        folder=KEPT,
        steps=40,
    )
    with temporary_folder() as folder:
        present(asked, *measure(asked, folder))


if __name__ == "__main__":
    main()
