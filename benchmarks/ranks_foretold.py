"""Claim: of programs of several ranks, the plan foretells the step that the fixed program has.

    python benchmarks/ranks_foretold.py [NAME ...]

Each program of `stalls/virtual_ranks` runs stalled and fixed on virtual GPUs, with the modelled clock and without
values. The explanation of the stalled run never sees the fixed one, and the virtual engine knows nothing of the
explanation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "stalls/virtual_ranks"
PLANTED = json.loads((PROGRAMS / "planted.json").read_text())


def told(name: str, kept: Path, fixed: bool) -> dict:
    """The report of one run as JSON, with what is planted fixed."""
    path = os.pathsep.join([str(HERE / "stalls"), str(HERE / "stalls/third"), os.environ.get("PYTHONPATH", "")])
    environment = {"THIRD_SCALE": "0.12", **os.environ, "PYTHONPATH": path}
    keepbusy = [sys.executable, "-m", "keepbusy"]
    asked = ["--clock", "modelled", "--values", "none", "--ranks", str(PLANTED[name]["ranks"]), "--save", str(kept)]
    script = [str(PROGRAMS / f"{name}.py"), *(["--fixed"] if fixed else [])]
    subprocess.run([*keepbusy, "run", *asked, *script], env=environment, capture_output=True, timeout=300, check=True)
    what_if = ["--what-if", ",".join(PLANTED[name]["causes"])] if PLANTED[name]["causes"] else []
    said = subprocess.run(
        [*keepbusy, "explain", str(kept), "--json", *what_if], capture_output=True, text=True, check=True
    )
    return json.loads(said.stdout)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", choices=[*PLANTED, []])
    for name in arguments.parse_args().names or PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            stalled, fixed = (told(name, Path(folder) / f"{way}.busy", way == "fixed") for way in ("stalled", "fixed"))
        if not PLANTED[name]["causes"]:  # what launching costs is every program's
            blamed = [cause["cause"] for cause in stalled["causes"] if cause["cause"] != "launch_bound"]
            print(f"{name}: {stalled['plain_step']:.2f} ms, blamed: {', '.join(blamed) or 'nobody'}", flush=True)
            continue
        fixes = {fix["fix"]: fix["predicted"]["after"] for fix in stalled["plan"]}
        foretold = fixes.get(PLANTED[name].get("fix"), stalled["predicted_step"])
        error = abs(foretold - fixed["plain_step"]) / stalled["plain_step"]
        print(
            f"{name}: {stalled['plain_step']:.2f} ms, foretold {foretold:.2f}, "
            f"came {fixed['plain_step']:.2f}, error {error:.1%}",
            flush=True,
        )
        for fix in stalled["plan"]:
            print(f"  {fix['fix']} at {', '.join(fix['where'][:2])}: {fix['predicted']['after']:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
