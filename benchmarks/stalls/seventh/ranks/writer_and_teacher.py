"""Answers are written on rank 1 and learnt from on rank 0, which sends its weights back: a policy gradient with clipped ratios."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from job import CUDA, DEVICE, run

VOCAB, PROMPT = 4096, 32


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    def __init__(self, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Layer(width, max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return self.head(self.norm(self.layers(self.words(tokens) + self.places[: tokens.shape[1]])))


def chances(policy, tokens):
    """The log-probability of each token of the answers."""
    scores = policy(tokens[:, :-1])[:, PROMPT - 1 :].float()
    return -F.cross_entropy(scores.transpose(1, 2), tokens[:, PROMPT:], reduction="none")


def flat(policy):
    return torch.cat([weight.detach().flatten() for weight in policy.parameters()])


class Writing:
    def __init__(self, policy, args):
        self.policy, self.args = policy, args
        self.arriving = flat(policy)

    @torch.no_grad()
    def write(self):
        tokens = torch.randint(0, VOCAB, (self.args.batch, PROMPT), device=DEVICE)
        for _ in range(self.args.more):
            tokens = torch.cat([tokens, torch.multinomial(self.policy(tokens)[:, -1].float().softmax(-1), 1)], 1)
        return tokens, chances(self.policy, tokens)

    @torch.no_grad()
    def renew(self):
        dist.recv(self.arriving, src=0)
        weights = list(self.policy.parameters())
        parts = self.arriving.split([weight.numel() for weight in weights])
        torch._foreach_copy_(weights, [part.view_as(weight) for part, weight in zip(parts, weights)])

    def work(self):
        for turn in range(self.args.rounds):
            answers = self.write()
            if self.args.fixed and turn:
                self.renew()
            for part in answers:
                dist.send(part, dst=0)
            if not self.args.fixed:
                self.renew()
        if self.args.fixed:
            self.renew()


class Teaching:
    def __init__(self, policy, args):
        self.policy, self.args = policy, args
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, fused=CUDA)
        self.tokens = torch.empty(args.batch, PROMPT + args.more, dtype=torch.int64, device=DEVICE)
        self.before = torch.empty(args.batch, args.more, device=DEVICE)

    def learn(self):
        reward = (self.tokens[:, PROMPT:] % 7 == self.tokens[:, :1] % 7).float().mean(1)
        worth = ((reward - reward.mean()) / (reward.std() + 1e-4))[:, None]
        for _ in range(self.args.passes):
            ratio = (chances(self.policy, self.tokens) - self.before).exp()
            loss = -torch.minimum(ratio * worth, ratio.clamp(0.8, 1.2) * worth).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        return reward.mean()

    def work(self):
        for turn in range(self.args.rounds):
            dist.recv(self.tokens, src=1)
            dist.recv(self.before, src=1)
            reward = self.learn()
            dist.send(flat(self.policy), dst=1)
            if turn % 8 == 7:
                print(f"{turn + 1}: reward {reward.item():.4f}", flush=True)


def main(args):
    policy = Policy(args.width, args.layers, PROMPT + args.more).to(DEVICE)
    (Writing if dist.get_rank() else Teaching)(policy, args).work()
    dist.barrier()


if __name__ == "__main__":
    run(main, rounds=34, batch=160, more=48, passes=8, width=768, layers=12)
