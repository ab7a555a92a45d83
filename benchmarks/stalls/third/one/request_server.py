"""A server scores texts for 48 clients, who each wait for an answer before they ask again."""
import queue
import threading

import torch
from script import DEVICE, run, turns

from models import TextClassifier, size

CLIENTS, LENGTH, TURN = size(48, 4), size(96, 8), size(48, 4)


def client(seed, requests, stop):
    answer, words = queue.SimpleQueue(), [f"word{(seed * 31 + i * 17) % 5000}" for i in range(LENGTH)]
    while not stop.is_set():
        requests.put((" ".join(words), answer))
        if answer.get() is None:
            return
        words = words[1:] + words[:1]


def encode(text):
    return [hash(word) % 8192 for word in text.split()]


@torch.inference_mode()
def serve(model, requests, count, most, tick):
    served = 0
    while served < count:
        asked = [requests.get()]
        while len(asked) < most and not requests.empty():
            asked.append(requests.get())
        tokens = torch.tensor([encode(text) for text, _ in asked], device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            scores = model(tokens).softmax(1)
        for (_, answer), row in zip(asked, scores.tolist()):  # STALL: host_sync
            answer.put(row)
            served += 1
            if served % TURN == 0:
                tick()


def main(tick, fixed=False):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = TextClassifier(width=768, layers=12, heads=12).eval()
    requests, stop = queue.SimpleQueue(), threading.Event()
    clients = [threading.Thread(target=client, args=(seed, requests, stop), daemon=True) for seed in range(CLIENTS)]
    for thread in clients:
        thread.start()
    serve(model, requests, TURN * turns(40, 2), most=32 if fixed else 1, tick=tick)
    stop.set()
    while any(thread.is_alive() for thread in clients):
        try:
            requests.get(timeout=0.05)[1].put(None)
        except queue.Empty:
            pass


if __name__ == "__main__":
    run(main)
