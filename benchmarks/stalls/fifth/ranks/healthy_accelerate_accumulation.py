"""torchrun: accelerate with accumulation over four large pieces; the mean loss is gathered and read after each update."""
import torch
from accelerate import Accelerator
from setting import DEVICE, run, size, turns
from transformers import BertConfig, BertForMaskedLM

PIECES, BATCH, LENGTH, VOCAB = 4, size(64, 2), size(512, 16), size(30522, 64)


def main(variant):
    accelerator = Accelerator(gradient_accumulation_steps=PIECES, mixed_precision="bf16", cpu=DEVICE == "cpu")
    wide = size(1024, 32)
    config = BertConfig(vocab_size=VOCAB, hidden_size=wide, num_hidden_layers=size(12, 2), num_attention_heads=size(16, 2), intermediate_size=4 * wide)
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(PIECES * turns(16, 2)):
        tokens = torch.randint(4, VOCAB, (BATCH, LENGTH), device=accelerator.device)
        masked = torch.rand(tokens.shape, device=accelerator.device) < 0.15
        with accelerator.accumulate(model):
            loss = model(tokens.masked_fill(masked, 3), labels=tokens.masked_fill(~masked, -100)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if variant == "stalled":
                    losses.append(accelerator.gather(loss.detach()).mean().item())
                    accelerator.print(f"step {step}: {losses[-1]:.3f}")
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"last loss {accelerator.gather(loss.detach()).mean().item():.3f}")


if __name__ == "__main__":
    run(main)
