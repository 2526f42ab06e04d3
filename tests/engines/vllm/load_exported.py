"""Files of an export through vLLM's own loader: load_exported.py FOLDER RESULT."""

import sys
from pathlib import Path

from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

folder, result = map(Path, sys.argv[1:])
loaded = {path.stem: load_hidden_states(str(path)) for path in folder.glob("*.safetensors")}
save_file({f"{stem} {key}": value for stem, tensors in loaded.items() for key, value in tensors.items()}, result)
