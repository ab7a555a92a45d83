"""A training on Ray as its users write it, with keepbusy's two lines in it; it prints what was found."""

TRAINING = """
import json
import sys

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

import keepbusy
from keepbusy.integrations.ray import RayRecording, VirtualGpus


def train(config):
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = ray.train.get_context().get_world_rank()
    for _ in range(16):
        x, y = torch.randn(32, 64, device=get_device()), torch.zeros(32, dtype=torch.long, device=get_device())
        for _ in range(config["more"] * rank):  # the second rank has much more to do
            x = x * 1.01
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def fails():
    raise LookupError("a row is missing")


ray.init(num_cpus=4, num_gpus=2, include_dashboard=False)
recording = RayRecording(train)
TorchTrainer(
    recording,
    train_loop_config={"more": 300},
    torch_config=VirtualGpus("h200", "modelled"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=True),
    run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
diagnosis = recording.explain()
keepbusy.save(recording.timeline, "run.busy")

without = RayRecording(fails)
said = []
try:
    TorchTrainer(without, run_config=RunConfig(storage_path=sys.argv[1])).fit()
except Exception as error:
    said.append(str(error))
try:
    without.explain()
except keepbusy.timeline.files.BadInput as error:
    said.append(str(error))

from pathlib import Path
from keepbusy.cli import main

traces = sorted(map(str, Path(sys.argv[2]).iterdir()))
told = [main(["explain", *traces, "--json", *more, "--save", f"{len(more)}.busy"]) for more in ([], ["--ray"])]
Path("found.json").write_text(json.dumps({"report": keepbusy.render(diagnosis), "said": said, "told": told}))
"""
