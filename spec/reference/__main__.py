"""Print a dataset's samples as JSON."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from spec.reference.dataset import load, to_json

if __name__ == "__main__":
    print(json.dumps(to_json(load(Path(sys.argv[1]))), indent=1, ensure_ascii=False))
