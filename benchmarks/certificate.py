"""The certificate of the verification rules and how long it takes: enumeration and mutants, without a head.

python benchmarks/certificate.py   # writes benchmarks/results/exact-certificate.json, under half a minute
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results_file import write_result

SCRIPT = Path(__file__).resolve().parents[1] / "eval" / "certify.py"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        subprocess.run([sys.executable, str(SCRIPT), "--out", folder], check=True)
        seconds = time.perf_counter() - started
        certificate = json.loads((Path(folder) / "certificate.json").read_text(encoding="utf-8"))
    write_result("exact-certificate", {"seconds": seconds, "certificate": certificate})


if __name__ == "__main__":
    main()
