"""A training loop on the examples' features: which of the two voices is it?

In the folder above, after `featcache extract examples/manifest.csv`:

    python examples/train.py
"""

import torch

import featcache

torch.manual_seed(0)

dataset = featcache.FeatureDataset(
    featcache.open("features/fbank80"), "examples/manifest.csv", classes="voice"
)
# or max_frames=; device="cuda" copies while training runs
batches = featcache.DataLoader(dataset, batch_size=4)
model = torch.nn.Sequential(
    torch.nn.LayerNorm(80), torch.nn.Linear(80, len(dataset.classes["voice"]))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(30):
    # ids, features [batch, frames, 80], lengths [batch], and the manifest's columns
    for batch in batches:
        means = batch["features"].float().sum(dim=1) / batch["lengths"][:, None]
        loss = torch.nn.functional.cross_entropy(model(means), batch["voice"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 10 == 9 or epoch == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
