"""GRPO for a small Llama: groups of answers are sampled, rewarded by their edit distance to references, and learnt from."""
import copy
import multiprocessing
import random

import torch
import torch.nn.functional as F
from rewards import rewards, rewards_by
from setting import DEVICE, run, size, turns
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS, GROUP, ASKED, TOKENS, VOCAB, REFERENCES = size(16, 2), size(8, 2), size(64, 8), size(112, 8), size(8192, 64), size(3, 2)


def make_policy():
    wide = size(768, 32)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=wide, intermediate_size=size(2048, 64), num_hidden_layers=size(8, 2), num_attention_heads=size(12, 2),
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def log_probabilities(model, tokens):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits[:, ASKED - 1 :]
    return -F.cross_entropy(logits.float().transpose(1, 2), tokens[:, ASKED:], reduction="none")


@torch.no_grad()
def sample(policy, prompts):
    policy.eval()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        tokens = policy.generate(
            prompts.repeat_interleave(GROUP, 0), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, top_k=0, temperature=1.0,
        )
    return tokens


def main(variant):
    # Before anything is on the device, since the workers are forked.
    pool = multiprocessing.get_context("fork").Pool(size(14, 2)) if variant == "fixed" else None
    rng = random.Random(0)
    policy = make_policy()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=DEVICE == "cuda")
    for turn in range(turns(8, 2)):
        prompts = torch.randint(3, VOCAB, (PROMPTS, ASKED), device=DEVICE)
        known = [[[rng.randrange(3, VOCAB) for _ in range(rng.randint(TOKENS * 3 // 4, TOKENS))] for _ in range(REFERENCES)] for _ in range(PROMPTS)]
        known = [each for each in known for _ in range(GROUP)]
        tokens = sample(policy, prompts)
        answers = tokens[:, ASKED:].tolist()
        if pool:
            coming = rewards_by(pool, answers, known)
        else:
            earned = rewards(answers, known)
        with torch.no_grad():
            usual = log_probabilities(reference, tokens)
            old = log_probabilities(policy, tokens)
        if pool:
            earned = coming.get()
        earned = torch.tensor(earned).to(DEVICE).view(PROMPTS, GROUP)
        advantage = ((earned - earned.mean(1, keepdim=True)) / (earned.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
        policy.train()
        for _ in range(2):
            now = log_probabilities(policy, tokens)
            ratio = (now - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            drift = (usual - now).exp() - (usual - now) - 1
            loss = (0.04 * drift - gain).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        print(f"turn {turn}: reward {earned.mean().item():.4f}, loss {loss.item():+.4f}")
    if pool:
        pool.terminate()


if __name__ == "__main__":
    run(main)
