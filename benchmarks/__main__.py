"""`python -m benchmarks forward`: measures as `maxsim.bench` does and keeps the record beside this file."""

from pathlib import Path

from maxsim.bench import main

raise SystemExit(main(out=Path(__file__).parent / "records", program="python -m benchmarks"))
