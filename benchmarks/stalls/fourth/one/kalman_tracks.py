"""4096 tracks followed by Kalman filters in three dimensions; twelve radars report in turn in every frame."""
import torch
from script import DEVICE, run, turns

from models import size

TRACKS, RADARS, GATE, LOST = size(4096, 16), size(12, 2), 16.0, 4


def inverse3(m):
    """Of 3×3 matrices, by their cofactors: nothing to be checked on the host."""
    a, b, c = m.unbind(-1)
    cross = torch.linalg.cross
    cofactors = torch.stack([cross(b, c), cross(c, a), cross(a, b)], -2)
    return cofactors / (a * cofactors[..., 0, :]).sum(-1)[..., None, None]


class Tracker:
    def __init__(self, unread):
        with torch.device(DEVICE):
            eye = torch.eye(6)
            self.move = eye.clone()
            self.move[:3, 3:] = 0.05 / RADARS * torch.eye(3)
            self.drift = 1e-3 * eye
            self.seen, self.noise = torch.eye(3, 6), 0.01 * torch.eye(3)
            self.state, self.spread = torch.zeros(TRACKS, 6), eye.repeat(TRACKS, 1, 1)
            self.missed, self.fresh = torch.zeros(TRACKS, dtype=torch.long), eye
            self.rejected = torch.zeros((), dtype=torch.long)
        self.unread = unread

    def scan(self, points):
        """One radar's report: predict, gate, correct, and begin lost tracks anew."""
        state = self.state @ self.move.T
        spread = self.move @ self.spread @ self.move.T + self.drift
        surprise = points - state @ self.seen.T
        cover = self.seen @ spread @ self.seen.T + self.noise
        inverse = inverse3(cover) if self.unread else torch.linalg.inv(cover)  # STALL: host_sync
        far = torch.einsum("ni,nij,nj->n", surprise, inverse, surprise) > GATE
        gain = spread @ self.seen.T @ inverse
        if self.unread or far.any():  # STALL: host_sync
            gain = gain.masked_fill(far[:, None, None], 0.0)
        state = state + (gain @ surprise[..., None])[..., 0]
        spread = spread - gain @ self.seen @ spread
        missed = torch.where(far, self.missed + 1, 0)
        lost = missed > LOST
        if self.unread:
            state = torch.where(lost[:, None], torch.cat([points, torch.zeros_like(points)], 1), state)
            spread = torch.where(lost[:, None, None], self.fresh, spread)
        elif lost.any():  # STALL: host_sync
            state[lost] = torch.cat([points[lost], torch.zeros_like(points[lost])], 1)
            spread[lost] = self.fresh
        missed = missed.masked_fill(lost, 0)
        self.rejected += far.sum()
        self.state.copy_(state), self.spread.copy_(spread), self.missed.copy_(missed)

    def frame(self, reports):
        for points in reports:
            self.scan(points)


def captured(tracker, reports):
    """The whole frame as a CUDA graph, which reads `reports`."""
    kept = [tensor.clone() for tensor in (tracker.state, tracker.spread, tracker.missed, tracker.rejected)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tracker.frame(reports), tracker.frame(reports)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tracker.frame(reports)
    for tensor, value in zip((tracker.state, tracker.spread, tracker.missed, tracker.rejected), kept):
        tensor.copy_(value)
    return graph


@torch.inference_mode()
def main(tick, fixed=False):
    """`fixed` may also be "reads", to mend these alone and leave the small kernels to be launched one by one."""
    torch.manual_seed(0)
    tracker = Tracker(unread=bool(fixed))
    truth, speed = torch.randn(2, TRACKS, 3, device=DEVICE)
    reports = torch.empty(RADARS, TRACKS, 3, device=DEVICE)
    graph = captured(tracker, reports) if fixed is True and DEVICE == "cuda" else None
    for _ in range(turns(1100, 3)):
        truth = truth + 0.05 * speed
        strays = (torch.rand(RADARS, TRACKS, 1, device=DEVICE) < 0.02) * 30.0
        torch.add(truth, 0.1 * torch.randn_like(reports) + strays, out=reports)
        if graph is not None:
            graph.replay()
        else:
            tracker.frame(reports)  # STALL: launch_bound
        tick()


if __name__ == "__main__":
    run(main)
