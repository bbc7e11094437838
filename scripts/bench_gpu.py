"""`attnscale bench gpu` as a script, with the same options: python scripts/bench_gpu.py --dry-run"""

import sys

from attnscale.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gpu", *sys.argv[1:]]))
