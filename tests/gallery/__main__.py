"""``python -m tests.gallery``: records the gallery's jobs, and writes reports, pictures and pages. Some minutes; needs torch and Chromium.

``--keep FOLDER`` keeps the run directories there, and uses those that are there already.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

import ddpdoctor
from ddpdoctor.demo import JOB, find_fault
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.trials import TRIALS_FILE
from ddpdoctor.plain import plain
from ddpdoctor.report.read import read_diagnosis
from ddpdoctor.report.summary import cost_sentence, main_finding
from ddpdoctor.report.words import milliseconds, speedup

from . import dashboard, gallery

sys.path.insert(0, str(gallery.ROOT / "tests" / "report"))
import chromium
import devtools

TRIES = 2
"""Recordings of a job until its diagnosis has the planted fault: on a busy machine another one may cost more."""
DASHBOARD_S = 45
"""Of a job whose metrics are drawn as the dashboard's panels."""
HISTORY_STEPS = 60
STEPS = {gallery.FRONT: 200}
"""Steps of jobs that `watch` looks at while they run; else as many as the demo has."""
FIXED_STEPS = 100
WATCH_S = 1.5
"""Between two looks, which take time from the job."""
TRIED = (gallery.FRONT,)
"""Faults with a fix that `ddpdoctor try` can measure."""
TRIAL_S = 100
"""Time for the trials of one job; with a decision they end before."""
WIDTH, HEIGHT, MOST_HEIGHT, SCALE = 1100, 760, 1000, 1.5
"""Of the pictures, in CSS pixels, and pixels of the picture per CSS pixel."""
QUALITY = 70
SCREEN_LINES = 24


def main() -> int:
    """Make everything; exit code 1 if a diagnosis has not the planted fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.gallery", description=__doc__)
    parser.add_argument(
        "--keep", type=Path, help="folder for run directories, which are used if they are there"
    )
    keep = parser.parse_args().keep
    if chromium.PROGRAM is None:
        sys.exit("make gallery needs Chromium, for the pictures.")
    if dashboard.PROGRAM is None:
        sys.exit("make gallery needs Prometheus, for the picture of the dashboard.")
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-gallery-") as temporary:
        runs = (keep or Path(temporary)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        gallery.FOLDER.mkdir(exist_ok=True)
        wrong = [name for name in gallery.FAULTS if not _is_recorded(name, runs)]
        found = {name: _report(name, runs) for name in gallery.FAULTS}
        gains = {name: _gain(name, diagnosis, runs) for name, diagnosis in found.items()}
        _pictures(runs)
    told = {
        "made": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {"ddpdoctor": ddpdoctor.__version__, **found["healthy"].job.versions},
        "templates": gallery.templates_digest(),
        "reports": {name: _told(diagnosis, gains[name]) for name, diagnosis in found.items()},
    }
    gallery.MADE.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    gallery.PAGE.write_text(gallery.page(told), encoding="utf-8")
    if gallery.TOUR.exists():
        gallery.TOUR.write_text(gallery.refreshed(gallery.TOUR.read_text(encoding="utf-8")), encoding="utf-8")
    size = sum(file.stat().st_size for file in gallery.FOLDER.iterdir())
    print(f"{size / 1e6:.2f} MB in docs/gallery, {(time.monotonic() - begun_s) / 60:.1f} min")
    for name in wrong:
        print(
            f"{name}: not diagnosed as {find_fault(name).expected_rule}; make it again on a machine that is less busy",
            file=sys.stderr,
        )
    return int(bool(wrong))


def _is_recorded(name: str, runs: Path) -> bool:
    """Record a fault, a few times if need be, unless it was kept. Whether the diagnosis names it."""
    expected = find_fault(name).expected_rule
    run = runs / name
    kept = (run / "diagnosis.json").exists()
    for _ in range(1 if kept else TRIES):
        if not kept:
            # The job with the fix is compared with this one.
            for old in (run, runs / f"{name}-fixed"):
                shutil.rmtree(old, ignore_errors=True)
            _record(name, run)
        verdict = read_diagnosis(run / "diagnosis.json").verdict
        # On a busy machine a healthy job may have a remark.
        if verdict.rule == expected and (expected or verdict.headline.startswith("Healthy")):
            break
    else:
        return False
    if name in gallery.EDITS:
        _record_fixed(name, runs)
    if name in TRIED and not any(run.glob(TRIALS_FILE)):
        _ddpdoctor("try", run, "--all", "--steps", 60, "--budget", TRIAL_S, "--", *_job(JOB, name, 10_000))
    return True


def _record_fixed(name: str, runs: Path) -> None:
    """Record the job with the fix in its script, after the job with the fault: both on an equally busy machine."""
    script, run = runs / f"{name}-fixed.py", runs / f"{name}-fixed"
    if not (run / "diagnosis.json").exists():
        print(f"recording {name} with its fix", flush=True)
        script.write_text(gallery.fixed_script(name), encoding="utf-8")
        _ddpdoctor("run", "--out", run, "--", *_job(script, name, FIXED_STEPS))


def _record(name: str, run: Path) -> None:
    print(f"recording {name}", flush=True)
    command = [sys.executable, "-m", "ddpdoctor", "demo", "--fault", name, "--out", str(run)]
    command += ["--steps", str(STEPS[name])] if name in STEPS else []
    process = subprocess.Popen(
        command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    frame = ""
    while name in STEPS and process.poll() is None:
        if (run / "manifest.json").exists():
            shown = _ddpdoctor("watch", run, "--once", FORCE_COLOR="1")
            # The last one that has a verdict while the job runs.
            if "no verdict" not in shown and "ended" not in shown:
                frame = shown
        time.sleep(WATCH_S)
    process.wait()
    if frame:
        (run.parent / "watch.txt").write_text(frame, encoding="utf-8")


def _report(name: str, runs: Path) -> Diagnosis:
    """Write the redacted report into the gallery; the diagnosis in it."""
    target = gallery.FOLDER / f"{name}.html"
    target.unlink(missing_ok=True)
    _ddpdoctor("analyze", runs / name, "--redact", "--static", "-q", "--html", target)
    return read_diagnosis(target)


def _pictures(runs: Path) -> None:
    with devtools.opened() as tab:
        for name in gallery.FAULTS:
            _picture(tab, gallery.FOLDER / f"{name}.html", f"{name}.webp", dark=False)
        front = gallery.FOLDER / f"{gallery.FRONT}.html"
        _picture(tab, front, "report-dark.webp", dark=True)
        tab.dark(False)
        for target, (name, part) in gallery.PARTS.items():
            _part(tab, gallery.FOLDER / f"{name}.html", part, target)
        (comparison := runs / "compare.html").unlink(missing_ok=True)
        _ddpdoctor("compare", f"{gallery.FRONT}.html", "healthy.html", "--html", comparison)
        _picture(tab, comparison, "compare.webp", dark=False)
        _picture(tab, _history(runs), "history.webp", dark=False)
        _part(tab, _dashboard(runs), "main", "dashboard.webp")
    screen = _ddpdoctor("analyze", front, FORCE_COLOR="1").splitlines()[:SCREEN_LINES]
    _terminal("terminal.svg", "ddpdoctor analyze RUN", "\n".join(screen))
    frame = (runs / "watch.txt").read_text(encoding="utf-8")
    for secret, shown in ((str(runs), "ddpdoctor-runs"), (socket.gethostname(), "host-1")):
        frame = frame.replace(secret, shown)
    _terminal("watch.svg", "ddpdoctor watch RUN", frame.rstrip("\n"))


def _history(runs: Path) -> Path:
    """The page of a history: a job that was recorded four times without a fault and four times with one."""
    for number, name in enumerate(gallery.HISTORY, 1):
        run = runs / "history" / f"run-{number}"
        if not (run / "diagnosis.json").exists():
            print(f"recording {name}, for the history", flush=True)
            shutil.rmtree(run, ignore_errors=True)
            _ddpdoctor("demo", "--fault", name, "--steps", HISTORY_STEPS, "--out", run)
    (page := runs / "history.html").unlink(missing_ok=True)
    _ddpdoctor("history", "history", "--html", page, cwd=runs)
    return page


def _dashboard(runs: Path) -> Path:
    """The page with the dashboard's panels."""
    print(f"recording {gallery.FRONT}, for the dashboard", flush=True)
    port, run = dashboard.free_port(), runs / "dashboard"
    shutil.rmtree(run, ignore_errors=True)
    recorder = [
        sys.executable,
        "-m",
        "ddpdoctor",
        "run",
        "--no-analysis",
        "--prometheus",
        str(port),
        "--out",
        str(run),
    ]
    command = [*recorder, "--", *_job(JOB, gallery.FRONT, 10_000)]
    shown = dashboard.record(command, port, _environment(), DASHBOARD_S)
    page = runs / "dashboard.html"
    page.write_text(dashboard.page(shown, "slow-data-one-rank"), encoding="utf-8")
    return page


def _picture(tab: devtools.Tab, page: Path, target: str, *, dark: bool) -> None:
    """The first screen of a page, with the whole of the savings if they begin there."""
    tab.dark(dark)
    _open(tab, page, HEIGHT)
    end = tab.value("document.getElementById('savings')?.getBoundingClientRect().bottom ?? 0")
    _open(tab, page, min(max(HEIGHT, round(end) + 24), MOST_HEIGHT))
    _shoot(tab, target)


def _part(tab: devtools.Tab, page: Path, part: str, target: str) -> None:
    """A section of a page, or a heading with its chart."""
    _open(tab, page, HEIGHT)
    _open(tab, page, int(tab.value("document.documentElement.scrollHeight")))
    left, top, width, height = tab.function(f"""
      const first = document.getElementById("{part}");
      const boxes = [first, ...(/^H/.test(first.tagName) ? [first.nextElementSibling] : [])].map(e => e.getBoundingClientRect());
      return [Math.min(...boxes.map(b => b.left)), boxes[0].top, Math.max(...boxes.map(b => b.width)), boxes.at(-1).bottom - boxes[0].top];
    """)
    _shoot(
        tab,
        target,
        clip={"x": left - 20, "y": top - 10, "width": width + 40, "height": height + 20, "scale": 1},
    )


def _open(tab: devtools.Tab, page: Path, height: int) -> None:
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": SCALE, "mobile": False}
    tab.ask("Emulation.setDeviceMetricsOverride", **size)
    tab.open(page)


def _shoot(tab: devtools.Tab, target: str, **options: Any) -> None:
    answer = tab.ask("Page.captureScreenshot", format="webp", quality=QUALITY, **options)
    (gallery.FOLDER / target).write_bytes(base64.b64decode(answer["data"]))


def _terminal(target: str, title: str, coloured: str) -> None:
    """The output of a command, with its escape sequences, as SVG that loads no font from elsewhere."""
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"\x1b[1m$ {title}\x1b[0m\n{coloured}"))
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    drawn = console.export_svg(title=title, code_format=form, unique_id=target.partition(".")[0])
    (gallery.FOLDER / target).write_text(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE), encoding="utf-8")


def _told(diagnosis: Diagnosis, gain: str) -> dict[str, Any]:
    """What the page says of a report."""
    main = main_finding(diagnosis)
    fix = main.fixes[0].title if main is not None and main.fixes else ""
    return {
        "verdict": plain(diagnosis.verdict.headline),
        "cost": cost_sentence(diagnosis),
        "fix": fix,
        "gain": gain,
    }


def _gain(name: str, diagnosis: Diagnosis, runs: Path) -> str:
    """What the fix gained in a job with the fix in its script; "" where the script has none."""
    if not (runs / f"{name}-fixed").exists():
        return ""
    run = runs / f"{name}-fixed"
    before_ms, after_ms = diagnosis.steps.mean_ms, read_diagnosis(run / "diagnosis.json").steps.mean_ms
    assert before_ms is not None and after_ms is not None, name
    if after_ms >= before_ms:
        print(
            f"{name}: its fix gained nothing; make it again on a machine that is less busy", file=sys.stderr
        )
    return (
        f"What it gained: the same job {gallery.EDITS[name][0]}, recorded soon after it, takes {milliseconds(after_ms)} instead of "
        f"{milliseconds(before_ms)} per step on average ({speedup(before_ms / after_ms)} as fast)."
    )


def _job(script: Path, fault: str, steps: int) -> list[str]:
    """The demo's command with another script or more steps."""
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, str(script), "--fault", fault, "--steps", str(steps)]


def _ddpdoctor(*arguments: object, cwd: Path = gallery.FOLDER, **environment: str) -> str:
    """What a command prints, started in the gallery's folder."""
    command = [sys.executable, "-m", "ddpdoctor", *map(str, arguments)]
    shell = {"cwd": cwd, "env": _environment() | environment}
    return subprocess.run(command, **shell, capture_output=True, text=True, check=True).stdout


def _environment() -> dict[str, str]:
    # The job and ddpdoctor must be those of this checkout.
    kept = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(gallery.ROOT)}


if __name__ == "__main__":
    sys.exit(main())
