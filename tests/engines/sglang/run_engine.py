"""Runs in SGLang's environment: an offline engine. run_engine.py JOB.json; the last line printed is the outcome.

JOB.json: {"engine": keywords of sglang.Engine, "requests": [fields of a request, …]}.
"""

import json
import sys
from pathlib import Path


def main(job):
    import sglang

    engine = sglang.Engine(**job["engine"])
    body = {name: [fields[name] for fields in job["requests"]] for name in job["requests"][0]}
    responses = engine.generate(**body)
    engine.collective_rpc("hsfmt_flush")
    states = engine.get_server_info()["internal_states"]
    engine.shutdown()  # kills the schedulers: nothing is committed any more
    outcome = {"responses": responses, "status": [state["hsfmt"] for state in states]}
    print(json.dumps(outcome, default=str))  # noqa: T201  for the test


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
