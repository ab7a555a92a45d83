"""A trainer as many repositories have one: a loop inside `fit`, running averages, clipping and a hook."""
import torch


class Average:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self):
        return self.total / max(1, self.count)


class Trainer:
    def __init__(self, model, optimizer, device, read=float, on_step=None):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.read = read  # how a metric is turned into what the averages add up
        self.on_step = on_step or (lambda _: None)
        self.averages = {name: Average() for name in ("loss", "top1", "top5", "norm")}

    def measure(self, logits, labels, loss):
        with torch.no_grad():
            hits = logits.topk(5, 1).indices == labels[:, None]
            metrics = {"loss": loss.detach(), "top1": hits[:, 0].float().mean(), "top5": hits.any(1).float().mean()}
        for name, metric in metrics.items():
            self.averages[name].update(self.read(metric))  # STALL: host_sync

    def fit(self, batches, loss_function):
        self.model.train()
        for x, y in batches:
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            with torch.autocast(self.device, dtype=torch.bfloat16):
                logits = self.model(x)
                loss = loss_function(logits, y)
            self.measure(logits, y, loss)
            self.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.averages["norm"].update(self.read(norm))  # STALL: host_sync
            self.optimizer.step()
            self.on_step(self)
        return {name: float(average.value) for name, average in self.averages.items()}
