#!/usr/bin/env bash
# Lightning drops the last batches of each epoch that is longer than the first one.
#
# A loader whose batches hold about as many frames each has another number of batches in each
# epoch, and its __len__ says so. Lightning asks for it once, before the first epoch, and ends
# every later epoch after as many batches, without a warning. The example has 5, 8 and 3 batches.
# With reload_dataloaders_every_n_epochs=1, Lightning asks for the loader, and for its length,
# before each epoch. Seen with lightning 2.6.6 and torch 2.14.1.
#
# Seen:
#    as it is:              5, 5, 3 batches of 5, 8, 3
#    reloaded each epoch:   5, 8, 3 batches of 5, 8, 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import logging
import warnings

import lightning
import torch

print("lightning", lightning.__version__, "torch", torch.__version__)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LENGTHS = [5, 8, 3]


class Loader:
    """Has another number of batches in each epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return LENGTHS[self.epoch]

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.ones(2, 1)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = [0, 0, 0]

    def training_step(self, batch, _):
        self.seen[self.current_epoch] += 1
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        self.loader = Loader(self.current_epoch)
        return self.loader

    def on_train_epoch_start(self):
        self.loader.epoch = self.current_epoch


def seen(reload):
    model = Model()
    lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=reload,
    ).fit(model)
    return model.seen


for name, reload, expected in (
    ("as it is:", 0, [5, 5, 3]),
    ("reloaded each epoch:", 1, LENGTHS),
):
    batches = seen(reload)
    print(f"{name:22} {str(batches)[1:-1]} batches of {str(LENGTHS)[1:-1]}")
    assert batches == expected, "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightning==2.6.6 torch==2.14.1
"$folder/venv/bin/python" "$folder/try.py"
