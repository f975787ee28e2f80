"""A script of plain accelerate, as people have it; started by `accelerate launch` or torchrun.

    script_accelerate.py OUT [--resume]

writes what it computed to OUT/rank0.json, and its state to OUT/state. On a machine without GPUs.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, resume = Path(sys.argv[1]), "--resume" in sys.argv
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
PartialState(cpu=True)  # or accelerate looks for a GPU
accelerator = Accelerator()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
x = torch.randn(64, 10)
data = TensorDataset(x, x.sum(-1, keepdim=True).sin())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, batches, tests = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4), DataLoader(data, batch_size=8)
)


def evaluate() -> float:
    model.eval()
    squares = []
    for inputs, wanted in tests:
        with torch.no_grad():
            squares.append(accelerator.gather_for_metrics((model(inputs) - wanted).square()))
    model.train()
    return torch.cat(squares).mean().item()


found = {"kind": str(accelerator.distributed_type), "ranks": accelerator.num_processes, "losses": []}
if resume:
    accelerator.load_state(out / "state")
    found["at start"] = evaluate()
for inputs, wanted in batches:
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found["losses"].append(loss.item())
found["at end"] = evaluate()
found["stage"] = accelerator.state.deepspeed_plugin.zero_stage
found["clipping"] = accelerator.deepspeed_engine_wrapped.engine.gradient_clipping()
found["window"] = accelerator.gradient_accumulation_steps
accelerator.save_state(out / "state")
if accelerator.is_main_process:
    (out / "rank0.json").write_text(json.dumps(found))
accelerator.end_training()
