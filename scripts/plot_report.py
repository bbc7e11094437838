"""Make the README's picture of the report: train the tiny GPT under (ln n)², write its page, photograph it.

make figures                                              writes .github/assets/report.png; needs chromium
python scripts/plot_report.py runs/tiny/log_squared.jsonl # of a run that is there already
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from attnscale.report import write_report

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / ".github" / "assets" / "report.png"
SIZE = (1400, 938)
VIEW = "step=200&layer=blocks.4.attention&head=3&lines=layers&theme=light"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Train if no run is given, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="JSONL of train_with_a_monitor.py (default: train now)")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"a browser is needed to draw the report: none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        run = options.run
        if run is None:
            run = Path(folder, "log_squared.jsonl")
            example = ROOT / "scripts" / "examples" / "train_with_a_monitor.py"
            subprocess.run([sys.executable, str(example), "--output", str(run)], check=True)
        photograph(browser, write_report(run, Path(folder, "report.html")), options.output, Path(folder))


def photograph(browser: str, page: Path, output: Path, folder: Path) -> None:
    """Open a page without a window and keep what it looks like once its scripts have run."""
    taken = folder / "report.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-sync",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size={},{}".format(*SIZE),
        "--virtual-time-budget=10000",
        f"--screenshot={taken}",
    ]
    subprocess.run([browser, *options, f"{page.resolve().as_uri()}#{VIEW}"], check=True, capture_output=True)
    shutil.copyfile(taken, output)  # only once there is a picture


if __name__ == "__main__":
    main()
