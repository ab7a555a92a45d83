"""Further windows, `--live` and spawned ranks on a real GPU: `record_windows.py --out DIR [--ranks 2]` (150 s, 90 s).

One program under `keepbusy run --live` in a terminal of its own: what the windows said of its rare stalls, and of steps
that change half way; against what fixing gains when the program is timed alone. Then the program dies in a window.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "windows"
LONG, SHORT = 1600, 420
ROWS, COLUMNS = 24, 110


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--brief", action="store_true", help="without what is timed alone (60 s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = ranks(options.out) if options.ranks > 1 else one_gpu(options.out, options.brief)
    text = "\n".join(f"{what:34}{told}" for what, told in rows)
    (options.out / f"table{options.ranks}.txt").write_text(text + "\n")
    print("\n" + text)


def one_gpu(out: Path, brief: bool) -> list[tuple[str, str]]:
    watched = keepbusy(["--live", "--save", out / "windows.busy", PROGRAMS / "train.py", LONG, "drifts"], out / "live")
    said = explained(out / "windows.busy", out / "windows")
    alone = ([], ["fixed_evaluation"], ["saved_later"])
    plain, fixed, later = (float("nan") if brief else timed(SHORT, how, out) for how in alone)
    rows = [("the run itself", f"exit {watched['code']}, {watched['seconds']:.0f} s"), *seen(watched["text"])]
    rows += [("notes", note) for note in said["notes"]]
    rows += [("plain step, ms", f"{said['plain_step']:.2f}; stopwatch over all steps {plain:.2f}")]
    rows += stalls(said)
    rows += [("evaluation fixed, truly", f"{plain - fixed:.2f} ms less a step")]
    rows += [("checkpoint written later, truly", f"{plain - later:.2f} ms less a step")]
    rows += [("later", told(said["later"]))]
    return rows + [row for number in ((1,) if brief else (1, 2)) for row in dies(number, out)]


def ranks(out: Path) -> list[tuple[str, str]]:
    ran = keepbusy(["--save", out / "spawned.busy", PROGRAMS / "spawned.py", 400], out / "spawned-run")
    said = explained(out / "spawned.busy", out / "spawned")
    rows = [("the run itself", f"exit {ran['code']}, {ran['seconds']:.0f} s, printed {'all is done' in ran['text']}")]
    rows += [("ranks", f"{said['ranks']}, {said['steps']} steps, plain {said['plain_step']:.2f} ms")]
    return rows + [("notes", note) for note in said["notes"]] + stalls(said)


def stalls(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What the marks saw, and what the windows made of it."""
    rows = []
    for run in said["plain_runs"]:
        for one in run["stalls"][:4]:
            place = f"{one['what'] or '-'} {one['where']} called at {one['called_at'] or '-'}"
            rows.append(
                (f"rank {run['rank']} stalls", f"every {one['every']} × {one['count']}: {one['time']} ms {place}")
            )
    for one in said["rare"]:
        about = f"every {one['stall']['every']}, step {one['step']}, {one['plain_step']:.1f} ms"
        rows.append(("rare, explained", f"{about}: {one['predicted_gain']:.2f} ms less a step"))
        for cause in one["causes"]:
            gain = (one["plain_step"] - cause["predicted_step"]) / one["stall"]["every"]
            rows.append(("", f"{cause['cause']} {cause['where']}: {gain:.2f} ms less a step; {cause['code'][:60]}"))
    return rows


def told(later: dict[str, Any] | None) -> str:
    if later is None:
        return "nothing"
    causes = ", ".join(f"{cause['cause']} {cause['where']}" for cause in later["causes"])
    return f"since {later['since']} (truly {LONG // 2 + 1}) {later['plain_step']:.2f} ms: {causes or 'no cause'}"


def seen(text: str) -> list[tuple[str, str]]:
    """The frames of the last row, and whether the program's own lines are all there."""
    frames = re.findall(rf"\x1b\[{ROWS};1H\x1b\[2K(.*?)\x1b8", text, re.DOTALL)
    plain = list(dict.fromkeys(re.sub(r"\x1b\[[\d;]*m", "", frame) for frame in frames))
    own = re.findall(r"<(\d+)>", re.sub(r"\x1b7.*?\x1b8", "", text, flags=re.DOTALL))
    lines = [("live frames", f"{len(frames)}, {len(plain)} different ones; the program's lines {own}")]
    shown = plain[:1] + plain[1 :: max(1, len(plain) // 6)]
    return lines + [("", frame) for frame in shown]


def dies(window: int, out: Path) -> list[tuple[str, str]]:
    ran = keepbusy([PROGRAMS / "train.py", 300, f"dies_in={window}"], out / f"dies{window}")
    lines = [line for line in ran["text"].splitlines() if line.startswith(("keepbusy", "A step takes"))]
    return [(f"dies in window {window}", f"exit {ran['code']}: {' | '.join(lines)}")]


def timed(steps: int, how: list[str], out: Path) -> float:
    """Milliseconds a step, all of them counted, of the program alone."""
    command = [sys.executable, PROGRAMS / "train.py", str(steps), *how]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    (out / f"alone-{'-'.join(how) or 'plain'}.txt").write_text(ran.stdout + ran.stderr)
    found = re.search(r"TOOK (.*)", ran.stdout)
    return float(json.loads(found[1])["mean"]) if found else float("nan")


def keepbusy(arguments: list[Any], log: Path) -> dict[str, Any]:
    """Run in a terminal of its own; everything that is written there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written: list[bytes] = []
    reading = threading.Thread(target=lambda: written.extend(iter(lambda: _read(ours), b"")))
    reading.start()
    began = time.perf_counter()
    command = [sys.executable, "-m", "keepbusy", "run", *map(str, arguments)]
    code = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, check=False).returncode
    os.close(theirs)
    reading.join()
    text = b"".join(written).decode("utf-8", "replace")
    log.with_suffix(".txt").write_text(text)
    return {"code": code, "seconds": time.perf_counter() - began, "text": text}


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def explained(saved: Path, into: Path) -> dict[str, Any]:
    for name, how in ((".json", ["--json"]), (".report.txt", [])):
        command = [sys.executable, "-m", "keepbusy", "explain", str(saved), *how]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        Path(f"{into}{name}").write_text(done.stdout + ("" if how else done.stderr))
    said: dict[str, Any] = json.loads(Path(f"{into}.json").read_text())
    return said


if __name__ == "__main__":
    main()
