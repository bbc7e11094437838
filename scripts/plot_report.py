"""Create the README's screenshot of a report: train the tiny GPT with (ln n)², write its page, take a screenshot.

make figures                                              # writes .github/assets/report.png; needs chromium
python scripts/plot_report.py runs/tiny/log_squared.jsonl # uses an existing run
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
SIZE = (1400, 1240)
VIEW = "theme=light"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Train unless a run is given, then take the screenshot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="JSONL of train_with_a_monitor.py (default: train now)")
    parser.add_argument("--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser found to render the report: install one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder:
        run = options.run
        if run is None:
            run = Path(folder, "log_squared.jsonl")
            example = ROOT / "scripts" / "examples" / "train_with_a_monitor.py"
            subprocess.run([sys.executable, str(example), "--output", str(run)], check=True)
        photograph(browser, write_report(run, Path(folder, "report.html")), options.output, Path(folder))


def photograph(browser: str, page: Path, output: Path, folder: Path) -> None:
    """Render a page in a headless browser and save the screenshot."""
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
    shutil.copyfile(taken, output)  # only after a successful screenshot


if __name__ == "__main__":
    main()
