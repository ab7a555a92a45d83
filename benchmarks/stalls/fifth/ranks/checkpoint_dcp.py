"""torchrun: a Llama sharded by FSDP2 writes a distributed checkpoint every 20 steps."""
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from setting import DEVICE, run, size, turns
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH, VOCAB, EVERY = size(8, 2), size(1024, 16), size(32000, 64), size(20, 2)


def main(variant):
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    wide = size(1024, 32)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=wide, intermediate_size=4 * wide, num_hidden_layers=size(16, 2), num_attention_heads=size(16, 2))
    model = LlamaForCausalLM(config).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    writing = None
    for step in range(turns(80, 4)):
        tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), device=DEVICE)
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == EVERY - 1:
            state = {"model": get_model_state_dict(model)}
            if variant == "fixed":
                if writing:
                    writing.result()
                writing = dcp.async_save(state, checkpoint_id=f"{folders[0]}/{step}")
            else:
                dcp.save(state, checkpoint_id=f"{folders[0]}/{step}")
    if writing:
        writing.result()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
        shutil.rmtree(folders[0])


if __name__ == "__main__":
    run(main, backend="cpu:gloo,cuda:nccl")
