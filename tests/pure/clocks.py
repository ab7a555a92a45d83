"""A host and a device on paper: two clocks that drift apart, a queue between them, and events like real ones."""

from __future__ import annotations

from dataclasses import dataclass, field

LAUNCH = 6_000
"""From an event that is set to the device that passes it, when it has nothing else to do."""


@dataclass
class Event:
    """What `torch.cuda.Event` shows: whether it has passed, and the time to another one, in milliseconds."""

    device: PaperDevice
    passed: int = -1  # on the host's clock

    def query(self) -> bool:
        self.device.asked += 1
        return self.passed <= self.device.clock()

    def elapsed_time(self, later: Event) -> float:
        return (self.device.own(later.passed) - self.device.own(self.passed)) / 1e6


@dataclass
class PaperDevice:
    """Work is enqueued with `launch`; the host's clock is `now`. Nothing here ever lets the host wait."""

    ahead: int = 0  # of the host's clock, at the beginning
    drift: float = 0.0
    now: int = 1_000_000
    done: int = 0  # by then the device has done all that was launched
    made: int = 0
    asked: int = 0
    capturing: bool = False
    awake: bool = True
    true_lead: list[int] = field(default_factory=list)

    def clock(self) -> int:
        return self.now

    def own(self, moment: int) -> float:
        """The device's own clock at a moment of the host's."""
        return (moment - self.ahead) * (1 + self.drift)

    def work(self, time: int) -> None:
        self.now += time

    def launch(self, time: int) -> None:
        self.done = max(self.done, self.now + LAUNCH) + time

    def sync(self) -> None:
        self.now = max(self.now, self.done)

    def ready(self) -> bool:
        return self.awake and not self.capturing

    def new_event(self) -> Event:
        self.made += 1
        return Event(self)

    def set(self, event: Event) -> None:
        event.passed = max(self.done, self.now + LAUNCH)
        self.true_lead.append(event.passed - self.now)
