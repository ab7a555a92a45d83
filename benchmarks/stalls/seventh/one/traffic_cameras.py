"""How much of the road is taken, seen by eight cameras: films are read with OpenCV, DeepLab labels each frame, and the share of each class is kept."""
import argparse
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import torch
from torchvision.models.segmentation import deeplabv3_resnet50

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLASSES = 21


def film(folder, cameras, frames, high, across):
    """One film of moving blobs on noise; every camera has it."""
    rng = np.random.default_rng(0)
    ground = cv2.resize(rng.integers(0, 256, (high // 8, across // 8, 3), dtype=np.uint8), (across, high))
    paths = [Path(folder, f"{camera}.avi") for camera in range(cameras)]
    writer = cv2.VideoWriter(str(paths[0]), cv2.VideoWriter_fourcc(*"MJPG"), 25, (across, high))
    for number in range(frames):
        frame = np.roll(ground, 3 * number, axis=1)
        cv2.circle(frame, (9 * number % across, high // 2), high // 6, (40, 200, 90), -1)
        writer.write(frame)
    writer.release()
    for path in paths[1:]:
        shutil.copy(paths[0], path)
    return paths


class Camera:
    """A film that begins anew when it ends."""

    def __init__(self, path, size):
        self.path, self.size, self.capture = str(path), size, cv2.VideoCapture(str(path))

    def read(self, count):
        frames = []
        while len(frames) < count:
            there, frame = self.capture.read()
            if not there:
                self.capture.release()
                self.capture = cv2.VideoCapture(self.path)
                continue
            frames.append(cv2.cvtColor(cv2.resize(frame, self.size, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2RGB))
        return np.stack(frames)


def in_turn(cameras, each, turns):
    for _ in range(turns):
        frames = np.concatenate([camera.read(each) for camera in cameras])
        yield torch.from_numpy(frames).to(DEVICE)


def ahead(cameras, each, turns):
    """Every camera has a thread, which reads the next frames while these are labelled."""

    def gather(parts):
        frames = torch.from_numpy(np.concatenate([part.result() for part in parts]))
        return frames.pin_memory() if DEVICE == "cuda" else frames

    with ThreadPoolExecutor(len(cameras) + 1) as pool:

        def ask():
            return pool.submit(gather, [pool.submit(camera.read, each) for camera in cameras])

        asked = [ask(), ask()]
        for turn in range(turns):
            frames = asked.pop(0).result()
            if turn + 2 < turns:
                asked.append(ask())
            yield frames.to(DEVICE, non_blocking=True)


@torch.inference_mode()
def shares(model, frames):
    frames = ((frames.permute(0, 3, 1, 2).float() - 115) / 58).contiguous(memory_format=torch.channels_last)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        labels = model(frames)["out"].argmax(1)
    return torch.stack([(labels == number).float().mean((1, 2)) for number in range(CLASSES)], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="for a CPU")
    parser.add_argument("--turns", type=int, default=64)
    options = parser.parse_args()
    cameras, each, high, across, size = (2, 1, 96, 128, (64, 48)) if options.tiny else (8, 8, 720, 1280, (640, 384))
    torch.manual_seed(0)
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES).to(DEVICE, memory_format=torch.channels_last).eval()
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        watching = [Camera(path, size) for path in film(folder, cameras, each * 12, high, across)]
        for frames in (ahead if options.fixed else in_turn)(watching, each, options.turns):
            kept.append(shares(model, frames) if options.fixed else shares(model, frames).cpu())
    print(f"mean shares {torch.cat(kept).mean(0).cpu().numpy().round(3).tolist()}")
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main()
