"""A ring is as fast as the slowest link in it. By its law: 1 GiB summed over hosts of eight GPUs."""

HELD = 8  # GPUs of a host
WITHIN = 350e3  # bytes a microsecond: NVLink of a GPU
CARD = 45e3  # one card of a network of 400 Gbit/s
SIZE = 2**30


def all_reduce(hosts: int, cards: int) -> float:
    """Milliseconds. NCCL makes a ring for each card, so that all of them carry a share."""
    ranks = HELD * hosts
    rate = WITHIN if hosts == 1 else min(WITHIN, CARD * cards)
    return 2 * SIZE * (ranks - 1) / ranks / rate / 1e3


print(f"one host: {all_reduce(1, 8):.1f} ms")
for cards in (8, 4, 1):
    print(f"two hosts with {cards} network cards each: {all_reduce(2, cards):.1f} ms")
assert all_reduce(2, 8) < all_reduce(2, 4) < all_reduce(2, 1)
