"""Write docs/flags.md from the declarations in megatron_ds/config.

    python tools/write_flags_doc.py            write the file
    python tools/write_flags_doc.py --check    exit with code 1 if the file is out of date; write nothing
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ds.config.document import flags_document  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if the file is out of date")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "flags.md",
                        help="file to write (default: %(default)s)")
    args = parser.parse_args()
    text = flags_document()
    if args.check:
        stale = not args.output.is_file() or args.output.read_text(encoding="utf-8") != text
        print(f"{args.output} is {'out of date: run python tools/write_flags_doc.py' if stale else 'up to date'}")
        return int(stale)
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
