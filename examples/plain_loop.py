"""The script of the README: your own module, the plain PyTorch loop, parameters sharded over the ranks.

zeroshard run --nproc 2 examples/plain_loop.py     (or: python examples/plain_loop.py, on one process)
"""

import os

import torch
from torch import nn

import zeroshard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x.mean(dim=-1)


model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,  # the default leaves tensors this small unsharded
    },
}
engine, optimizer, _, _ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)

rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(rank)  # each rank draws its own part of the batch
for step in range(101):
    x = torch.randn(32, 64, device=engine.device)
    loss = (engine(x) - x[:, 0]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 20 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
engine.close()  # model has its full weights again
