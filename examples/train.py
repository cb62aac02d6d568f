"""A training loop on the examples' features: which of the two voices is it?

In the folder above, after `featcache extract examples/manifest.csv`:

    python examples/train.py
"""

import torch

import featcache

torch.manual_seed(0)

dataset = featcache.FeatureDataset(featcache.open("features/fbank80"), manifest="examples/manifest.csv")
sampler = featcache.BucketBatchSampler(dataset.lengths, batch_size=4)  # or max_frames=, a limit on padded frames
batches = featcache.DataLoader(dataset, sampler)  # or device="cuda": pinned, and copied while training runs
model = torch.nn.Sequential(torch.nn.LayerNorm(80), torch.nn.Linear(80, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in range(30):
    batches.set_epoch(epoch)
    for batch in batches:  # ids, features [batch, frames, 80], lengths [batch], and the manifest's columns
        means = batch["features"].float().sum(dim=1) / batch["lengths"][:, None]
        is_ben = torch.tensor([[float(voice == "ben")] for voice in batch["voice"]])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(means), is_ben)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch % 10 == 9 or epoch == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
