"""Whole trainings: torch's DataLoader with workers that live on, Lightning's Trainer, two
ranks of DDP."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from processes import run_script, start_script
from torch.utils.data import DataLoader

import featcache
from featcache import masks


def test_persistent_workers_under_every_start_method_also_with_copies_in_memory(cli, made):
    run_script(
        cli,
        """
        import sys
        import warnings
        import featcache
        from torch.utils.data import DataLoader

        warnings.filterwarnings("ignore", "a worker process takes longer")  # in workers, too
        if __name__ == "__main__":
            from make_cache import assert_same

            expected = {}
            for method, ram in ((None, None), ("fork", None), ("fork", "1GB"), ("spawn", "1GB")):
                cache = featcache.open(sys.argv[1], "fbank80", ram=ram)
                dataset = featcache.FeatureDataset(cache, sys.argv[2], crop=7)
                sampler = featcache.BucketBatchSampler(dataset.lengths, max_frames=100)
                workers = {"num_workers": 2 if method == "fork" else 1, "multiprocessing_context": method}
                workers["persistent_workers"] = True
                loader = DataLoader(
                    dataset, batch_sampler=sampler, collate_fn=dataset.collate, **(workers if method else {})
                )
                for epoch in range(3):
                    sampler.set_epoch(epoch)
                    dataset.set_epoch(epoch)  # which workers that live on hear of
                    batches = list(loader)
                    assert sorted(id_ for batch in batches for id_ in batch["ids"]) == sorted(dataset.ids)
                    assert all(batch["features"].shape[:2].numel() <= 100 for batch in batches)
                    assert_same(batches, expected.setdefault(epoch, batches))
            assert [batch["ids"] for batch in expected[0]] != [batch["ids"] for batch in expected[1]]
        """,
        made.folder / "features",
        made.manifest,
    )


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .srun. command is available")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("kind", [DataLoader, featcache.DataLoader], ids=["torch", "featcache"])
def test_fits_and_validates_in_epochs_that_differ(made, tmp_path, kind):
    lightning = pytest.importorskip("lightning")

    class Digits(lightning.LightningModule):
        """Digits from mean frames; notes what it sees."""

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(80, 10)
            self.seen, self.validated, self.losses = [], [], []

        def training_step(self, batch, number):
            self.seen.append((self.current_epoch, batch["ids"]))
            padding = masks.padding_mask(batch["lengths"], batch["features"].shape[1])
            means = (batch["features"].float() * padding[..., None]).sum(1) / batch["lengths"][
                :, None
            ]
            loss = torch.nn.functional.cross_entropy(self.layer(means), batch["digit"])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, number):
            self.validated += batch["ids"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    off = [
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "barebones",
    ]
    options = {
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        **dict.fromkeys(off, False),
    }
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **options
    )
    model, dataset = Digits(), made.dataset(columns=["digit"])

    def load(sampler):
        if kind is featcache.DataLoader:
            return featcache.DataLoader(dataset, sampler)
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)

    sampler = featcache.BucketBatchSampler(dataset.lengths, max_frames=100)
    validation = featcache.BucketBatchSampler(dataset.lengths, batch_size=8, shuffle=False)
    trainer.fit(model, load(sampler), load(validation))
    for number in range(2):
        seen = [ids for epoch, ids in model.seen if epoch == number]
        assert sorted(id_ for ids in seen for id_ in ids) == sorted(made.rows)
        sampler.set_epoch(number)
        assert seen == [[dataset.ids[row] for row in rows] for rows in sampler]
    assert sorted(model.validated) == sorted([*made.rows] * 2)
    assert np.isfinite(model.losses).all()


EACH_STEP = {
    "filename": "{step}",
    "every_n_train_steps": 1,
    "save_top_k": -1,
    "save_on_train_epoch_end": False,
}


def seen_in_training(folder, load, checkpoint=None, callbacks=(), **options):
    """Train in Lightning on the loader that `load` returns for an epoch. Returns the epoch
    of each batch, its ids, and the sum of its features, which tells crops apart."""
    import lightning

    class Looks(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.zeros(()))
            self.seen = []

        def train_dataloader(self):
            return load(self.current_epoch)

        def training_step(self, batch, number):
            self.seen.append(
                (self.current_epoch, batch["ids"], batch["features"].float().sum().item())
            )
            return self.scale * len(batch["ids"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[*callbacks],
        enable_checkpointing=bool(callbacks),
        log_every_n_steps=1,
        **dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False),
        **options,
    )
    model = Looks()
    trainer.fit(model, ckpt_path=checkpoint)
    return model.seen


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .srun. command is available")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
@pytest.mark.parametrize("has_sampler", [False, True])
def test_lightning_goes_on_from_any_checkpoint_as_without_it(made, tmp_path, has_sampler):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    dataset = made.dataset(columns=["digit"], crop=7)
    size = len(dataset) // 3 + 1  # three batches in an epoch

    def fit(**options):
        loader = featcache.DataLoader(dataset, batch_size=size)
        if has_sampler:
            sampler = featcache.BucketBatchSampler(dataset.lengths, batch_size=size)
            loader = featcache.DataLoader(dataset, sampler)
        options |= {"max_epochs": 3, "use_distributed_sampler": False}
        return seen_in_training(tmp_path, lambda epoch: loader, **options)

    each_step = ModelCheckpoint(tmp_path, **EACH_STEP)
    each_epoch = ModelCheckpoint(tmp_path, "end-{step}", every_n_epochs=1, save_top_k=-1)
    whole = fit(callbacks=[each_step, each_epoch])
    assert [epoch for epoch, *_ in whole] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({total for *_, total in whole}) == 9
    for name in ("step=1", "step=3", "step=5", "end-step=3"):
        assert fit(checkpoint=tmp_path / f"{name}.ckpt") == whole[int(name[-1]) :]


RANK = """
    import itertools, json, os, sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    import featcache
    from featcache import masks

    def loss_of(model, batch, num_frames):
        padding = masks.padding_mask(batch["lengths"], batch["features"].shape[1])
        errors = model(batch["features"].double()).squeeze(-1) - batch["score"][:, None]
        return (errors.square() * padding).sum() / num_frames

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=world_size)
    dataset = featcache.FeatureDataset(featcache.open(sys.argv[1], "fbank80"), sys.argv[2])
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(80, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = {"max_frames": 100, "world_size": world_size}
    samplers = [featcache.BucketBatchSampler(dataset.lengths, rank=each, **rules) for each in range(world_size)]
    kinds = {
        "torch": DataLoader(dataset, batch_sampler=samplers[rank], collate_fn=dataset.collate),
        "featcache": featcache.DataLoader(dataset, samplers[rank]),
    }
    seen = {kind: [] for kind in kinds}
    for kind, epoch in itertools.product(kinds, range(2)):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        steps = list(zip(*samplers, strict=True))
        ids = []
        for rows, batch in zip(steps, kinds[kind], strict=True):
            num_frames = batch["lengths"].sum()
            dist.all_reduce(num_frames)
            optimizer.zero_grad()
            (world_size * loss_of(model, batch, num_frames)).backward()  # DDP takes the mean over the ranks

            alone = torch.nn.Linear(80, 1).double()
            alone.load_state_dict(model.module.state_dict())
            every = dataset.batch([row for part in rows for row in part])
            assert num_frames == every["lengths"].sum()
            loss_of(alone, every, num_frames).backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
            optimizer.step()
            ids += batch["ids"]
        seen[kind].append(ids)
    print(json.dumps(seen))
    dist.destroy_process_group()
"""


def test_two_ranks_see_each_utterance_once_and_step_as_one_process_would(cli, made, tmp_path):
    arguments = (made.folder / "features", made.manifest, f"file://{tmp_path}/rendezvous")
    env = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        start_script(cli, RANK, *arguments, env={**env, "RANK": str(rank)}) for rank in range(2)
    ]
    results = [rank.wait() for rank in running]
    assert [rank.code for rank in results] == [0, 0], [rank.err for rank in results]
    for kind in ("torch", "featcache"):
        ours, theirs = (rank.json()[kind] for rank in results)
        for first, second in zip(ours, theirs, strict=True):
            assert sorted(first + second) == sorted(made.rows)
            assert first
            assert second
        assert ours[0] != ours[1]


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .srun. command is available")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_lightning_goes_on_with_packed_rows_from_any_checkpoint(made, tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    dataset = made.dataset(columns=["digit"])

    def fit(**options):
        tokens = int(dataset.lengths.max())
        loader = featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow="error")
        options |= {"max_epochs": 2, "use_distributed_sampler": False}
        return seen_in_training(tmp_path, lambda epoch: loader, **options)

    each_step = ModelCheckpoint(tmp_path, **EACH_STEP)
    whole = fit(callbacks=[each_step])
    epochs = [[ids for epoch, ids, _ in whole if epoch == number] for number in range(2)]
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert sorted(chain(*batches)) == sorted(made.rows)
    first_steps = len(epochs[0])
    for step in (1, first_steps - 1, first_steps, first_steps + 1):
        assert fit(checkpoint=tmp_path / f"step={step}.ckpt") == whole[step:]


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .srun. command is available")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_lightning_takes_all_batches_of_an_epoch_that_has_more_than_the_first(made, tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    dataset = made.dataset(columns=["digit"])

    def load(seed, epoch):
        tokens = int(dataset.lengths.max())
        options = {"tokens": tokens, "rows": 1, "overflow": "error", "window": 2, "seed": seed}
        loader = featcache.PackedLoader(dataset, **options)
        loader.set_epoch(epoch)
        return loader

    seed = next(seed for seed in range(100) if len(load(seed, 0)) < len(load(seed, 1)))

    def fit(**options):
        options |= {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
        return seen_in_training(tmp_path, partial(load, seed), **options)

    each_step = ModelCheckpoint(tmp_path, **EACH_STEP)
    whole = fit(callbacks=[each_step])
    ids = [batch["ids"] for epoch in range(2) for batch in load(seed, epoch)]
    assert [seen for _, seen, _ in whole] == ids
    first_steps = len(load(seed, 0))
    for step in (1, first_steps - 1, first_steps + 1, len(whole) - 1):
        assert fit(checkpoint=tmp_path / f"step={step}.ckpt") == whole[step:]


def test_accelerate_saves_and_loads_the_state_of_packed_rows(made, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def begun():
        dataset = made.dataset(columns=["digit"])
        tokens = int(dataset.lengths.max())
        loader = featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow="error")
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = begun()
    whole = [batch["ids"] for batch in loader]
    accelerator, loader = begun()
    batches = iter(loader)
    assert [next(batches)["ids"] for _ in range(2)] == whole[:2]
    accelerator.save_state(tmp_path)
    accelerator, loader = begun()
    accelerator.load_state(tmp_path)
    assert [batch["ids"] for batch in loader] == whole[2:]


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_workers_of_torchs_loader_share_the_packed_rows(made, num_workers):
    dataset = made.dataset(columns=["digit"])
    tokens = int(dataset.lengths.max())
    loader = featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow="error")
    shared = DataLoader(
        loader, batch_size=None, num_workers=num_workers, multiprocessing_context="fork"
    )
    assert [batch["ids"] for batch in shared] == [batch["ids"] for batch in loader]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("num_workers", "method", "moments"),
    [(0, None, (0, 1, 3, -1)), (2, "fork", (0, 1, 3, -1)), (2, "spawn", (1,))],
)
def test_torchdata_goes_on_with_packed_rows_from_any_state(made, num_workers, method, moments):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = made.dataset(columns=["digit"])
    tokens = int(dataset.lengths.max())
    whole = [
        batch["ids"]
        for batch in featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow="error")
    ]

    def begun():
        packed = featcache.PackedLoader(dataset, tokens=tokens, rows=2, overflow="error")
        return stateful.StatefulDataLoader(
            packed, batch_size=None, num_workers=num_workers, multiprocessing_context=method
        )

    for moment in moments:
        steps = moment % len(whole)
        loader = begun()
        batches = iter(loader)
        assert [next(batches)["ids"] for _ in range(steps)] == whole[:steps]
        state = loader.state_dict()
        del batches
        resumed = begun()
        resumed.load_state_dict(state)
        assert [batch["ids"] for batch in resumed] == whole[steps:]


def test_persistent_workers_begin_the_next_epoch_together(made):
    """Some have ended the pass that training leaves, and some have not."""
    dataset = made.dataset(columns=["digit"])

    def packed():
        tokens = int(dataset.lengths.max())
        return featcache.PackedLoader(dataset, tokens=tokens, rows=1, overflow="error")

    alone = packed()
    first, second, third = ([batch["ids"] for batch in alone] for _ in range(3))
    for steps in range(len(first) - 5, len(first) + 1):
        loader = DataLoader(packed(), batch_size=None, num_workers=2, persistent_workers=True)
        batches = iter(loader)
        assert [next(batches)["ids"] for _ in range(steps)] == first[:steps]
        assert [batch["ids"] for batch in loader] == second
        assert [batch["ids"] for batch in loader] == third


def test_workers_that_end_with_a_pass_begin_where_the_loader_is(made):
    dataset = made.dataset(columns=["digit"])
    packed = featcache.PackedLoader(
        dataset, tokens=int(dataset.lengths.max()), rows=2, overflow="error"
    )
    loader = DataLoader(packed, batch_size=None, num_workers=2)
    first, again = ([batch["ids"] for batch in loader] for _ in range(2))
    assert first == again
    packed.set_epoch(1)
    second = [batch["ids"] for batch in loader]
    assert [batch["ids"] for batch in packed] == second != first
